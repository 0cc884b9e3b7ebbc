"""text-embeddings-inference's native routes."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ivy_gateway.jobs import EmbeddingResult, EmbedJob
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.routes.body import Fields, read_fields
from ivy_gateway.routes.docs import documented
from ivy_gateway.routes.handling import (
    deadline_for,
    hangup_cancels,
    json_response,
    pipeline_of,
    result_headers,
)
from ivy_gateway.routes.inputs import read_inputs, read_truncation
from ivy_gateway.routes.render import TeiRoute

router = APIRouter(route_class=TeiRoute, tags=["TEI"])


@router.post(
    "/embed",
    **documented(
        "Embed texts or token ids",
        request={"inputs": ["What is a ferry?", "A ship that carries people."], "truncate": True},
        reply=[[0.0123, -0.0456], [0.0789, 0.0012]],
        fields={
            "inputs": "string, list of token ids, or a list of both",
            "truncate": "cut inputs over the model's limit; default: the server's setting",
            "truncation_direction": "right (default) or left",
            "prompt_name": "one of the model's prompts",
            "normalize": "scale vectors to length 1; default true",
            "dimensions": "shorten vectors, where the model allows it",
        },
    ),
)
async def embed(request: Request) -> Response:
    """One vector per input, in order: `[[float]]`, also for a single string."""
    pipeline = pipeline_of(request)
    job = to_job(await read_fields(request, pipeline.config.max_body_bytes), pipeline)
    async with hangup_cancels(request):
        result = await pipeline.embed(job)
    return from_result(result, pipeline)


def to_job(fields: Fields, pipeline: Pipeline) -> EmbedJob:
    """The neutral job for a body of `/embed`."""
    config = pipeline.config
    normalize = fields.boolean("normalize")
    return EmbedJob(
        inputs=read_inputs(fields.require("inputs"), "inputs", config.max_client_batch_size),
        input_field="inputs",
        deadline=deadline_for(config),
        truncation=read_truncation(fields, "truncation_direction"),
        prompt_name=fields.text("prompt_name"),
        normalize=normalize is not False,
        dimensions=fields.integer("dimensions", minimum=1),
    )


def from_result(result: EmbeddingResult, pipeline: Pipeline) -> Response:
    """The vectors, with TEI's headers about time and size."""
    return json_response(
        list(result.vectors), result_headers(pipeline, result.usage) | _timing_headers(result, pipeline)
    )


def _timing_headers(result: EmbeddingResult, pipeline: Pipeline) -> dict[str, str]:
    """Milliseconds and counts, all integers, under TEI's names."""
    timings, usage = result.timings, result.usage
    on_gpu = pipeline.pool.description.device.startswith("cuda")
    return {
        "x-compute-type": "gpu+optimized" if on_gpu else "cpu",
        "x-compute-time": _milliseconds(timings.total),
        "x-compute-characters": str(usage.num_characters),
        "x-compute-tokens": str(usage.num_tokens),
        "x-total-time": _milliseconds(timings.total),
        "x-tokenization-time": _milliseconds(timings.tokenize),
        "x-queue-time": _milliseconds(timings.queue),
        "x-inference-time": _milliseconds(timings.inference),
    }


def _milliseconds(seconds: float) -> str:
    return str(int(1000 * seconds))
