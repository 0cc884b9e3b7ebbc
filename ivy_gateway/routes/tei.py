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
            "input_type": "instead: query or document, where the model has a prompt for it",
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


@router.post(
    "/embed_all",
    **documented(
        "A vector for every token of texts or token ids",
        request={"inputs": ["What is a ferry?"]},
        reply=[[[0.0123, -0.0456], [0.0789, 0.0012]]],
        fields={
            "inputs": "string, list of token ids, or a list of both",
            "truncate": "cut inputs over the model's limit; default: the server's setting",
            "truncation_direction": "right (default) or left",
            "prompt_name": "one of the model's prompts",
        },
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


@router.post("/embed_sparse", summary="Sparse vectors: no model served here gives any")
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
