"""Jina's late chunking: a request's inputs are the chunks of one document, each embedded in view of it.

Only a contextual model has vectors for that. Knows nothing of how vectors are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ivy_gateway.errors import InvalidValue, TooLong
from ivy_gateway.jobs import DocumentsJob, EmbeddingResult, EmbedJob, Output
from ivy_gateway.pipeline import Pipeline

_FIELD = "late_chunking"


def as_document(job: EmbedJob, pipeline: Pipeline) -> DocumentsJob:
    """`job` with all of its inputs in one document.

    Raises `InvalidValue` for a model that is not contextual, and for what chunks of a document cannot have:
    token ids, a prompt, a length of their own, other special tokens.
    """
    if pipeline.profile.separator is None:
        raise InvalidValue(f"`{_FIELD}` must be false or absent: this model embeds inputs alone", _FIELD)
    if job.conversation is not None:
        raise InvalidValue(f"`{_FIELD}` takes texts, not messages", _FIELD)
    texts = tuple(item for item in job.inputs if isinstance(item, str))
    if len(texts) < len(job.inputs):
        raise InvalidValue(f"`{_FIELD}` takes texts, not token ids", job.input_field)
    if job.truncation.max_tokens is not None or not job.add_special_tokens or _has_prompt(job, pipeline):
        raise InvalidValue(
            f"`{_FIELD}` goes with no prompt, no `truncate_prompt_tokens` and no `add_special_tokens`", _FIELD
        )
    return DocumentsJob(
        documents=(texts,),
        input_field=job.input_field,
        deadline=job.deadline,
        normalize=job.normalize,
        dimensions=job.dimensions,
        dimensions_field=job.dimensions_field,
        output_field=job.output_field,
    )


async def embed(
    job: EmbedJob, outputs: Sequence[Output], pipeline: Pipeline
) -> dict[Output, EmbeddingResult]:
    """One vector per input, in each of `outputs`. Raises as `as_document` and `Pipeline.embed_documents`."""
    document, results = as_document(job, pipeline), {}
    for output in outputs:
        try:
            nested = await pipeline.embed_documents(replace(document, output=output))
        except TooLong as error:
            raise TooLong(f"`{_FIELD}` joins all inputs: {error.message}", job.input_field) from None
        results[output] = EmbeddingResult(nested.vectors, nested.usage, nested.timings)
    return results


def _has_prompt(job: EmbedJob, pipeline: Pipeline) -> bool:
    return bool(job.prompt_name and pipeline.profile.prompts.get(job.prompt_name, job.prompt_name))
