"""text-embeddings-inference's native routes."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request, Response

from ivy_gateway.errors import UnsupportedTask
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
    timing_headers,
)
from ivy_gateway.routes.inputs import read_inputs, read_prompt_name, read_truncation
from ivy_gateway.routes.render import TeiRoute
from ivy_gateway.routes.schema import (
    COUNT,
    DIMENSIONS,
    PROMPT_NAME,
    TEXT,
    TOKEN_IDS,
    TRUNCATION_FIELDS,
    TRUNCATION_SIDE,
    VECTOR,
    Schema,
    array,
    body,
    boolean,
    either,
    number,
    record,
    string,
)

router = APIRouter(route_class=TeiRoute, tags=["TEI"])

EMBED_FIELDS: dict[str, Schema] = {
    "inputs": either(
        TEXT,
        TOKEN_IDS,
        array(either(TEXT, TOKEN_IDS), minItems=1),
        says="string, list of token ids, or a list of both",
    ),
    **TRUNCATION_FIELDS,
    "truncation_direction": TRUNCATION_SIDE,
    "prompt_name": PROMPT_NAME,
    "input_type": string("instead: query or document, where the model has a prompt for it"),
    "normalize": boolean("scale vectors to length 1; default true. /embed_all never does"),
    "dimensions": DIMENSIONS,
}


@router.post(
    "/embed",
    **documented(
        "Embed texts or token ids",
        request={"inputs": ["What is a ferry?", "A ship that carries people."], "truncate": True},
        takes=body(EMBED_FIELDS, ("inputs",)),
        reply=[[0.0123, -0.0456], [0.0789, 0.0012]],
        answers=array(VECTOR),
    ),
)
async def embed(request: Request) -> Response:
    """One vector per input, in order: `[[float]]`, also for a single string."""
    pipeline = pipeline_of(request)
    job = to_job(await read_fields(request, pipeline.config.max_body_bytes), pipeline)
    async with hangup_cancels(request):
        result = await pipeline.embed(job)
    return from_result(result, pipeline)


@router.post(
    "/embed_all",
    **documented(
        "A vector for every token of texts or token ids",
        request={"inputs": ["What is a ferry?"]},
        takes=body(EMBED_FIELDS, ("inputs",)),
        reply=[[[0.0123, -0.0456], [0.0789, 0.0012]]],
        answers=array(array(VECTOR)),
    ),
)
async def embed_all(request: Request) -> Response:
    """The last hidden state of every token, special tokens included: input, token, dimension."""
    pipeline = pipeline_of(request)
    job = to_job(await read_fields(request, pipeline.config.max_body_bytes), pipeline)
    async with hangup_cancels(request):
        result = await pipeline.embed_tokens(replace(job, normalize=False, dimensions=None))
    headers = result_headers(pipeline, result.usage)
    headers |= timing_headers(pipeline, result.usage, result.timings)
    return json_response(result.parts(), headers)


@router.post(
    "/embed_sparse",
    **documented(
        "Sparse vectors: no model served here gives any",
        request={"inputs": ["What is a ferry?"]},
        takes=body({"inputs": EMBED_FIELDS["inputs"]}),
        reply=[[{"index": 0, "value": 0.5}]],
        answers=array(array(record({"index": COUNT, "value": number()}))),
    ),
)
async def embed_sparse(request: Request) -> Response:  # noqa: ARG001 - handlers take the request
    """An error in TEI's words."""
    raise UnsupportedTask("Model is not a sparse embedding model; /embed gives dense vectors")


def to_job(fields: Fields, pipeline: Pipeline) -> EmbedJob:
    """The neutral job for a body of `/embed`."""
    config = pipeline.config
    normalize = fields.boolean("normalize")
    return EmbedJob(
        inputs=read_inputs(fields.require("inputs"), "inputs", config.max_client_batch_size),
        input_field="inputs",
        deadline=deadline_for(config),
        truncation=read_truncation(fields, "truncation_direction"),
        prompt_name=read_prompt_name(fields, pipeline.profile, "input_type"),
        normalize=normalize is not False,
        dimensions=fields.integer("dimensions", minimum=1),
    )


def from_result(result: EmbeddingResult, pipeline: Pipeline) -> Response:
    """The vectors, with TEI's headers about time and size."""
    headers = result_headers(pipeline, result.usage)
    headers |= timing_headers(pipeline, result.usage, result.timings)
    return json_response(list(result.vectors), headers)
