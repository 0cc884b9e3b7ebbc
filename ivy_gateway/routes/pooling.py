"""vLLM's pooling route: vectors of inputs, vectors of their tokens, or label scores, as `task` says."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request, Response

from ivy_gateway.errors import InvalidValue
from ivy_gateway.jobs import Usage
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.routes import classify, openai
from ivy_gateway.routes.body import Fields, read_fields
from ivy_gateway.routes.docs import documented
from ivy_gateway.routes.encodings import FloatFormat, Listed
from ivy_gateway.routes.handling import (
    hangup_cancels,
    json_response,
    listing,
    pipeline_of,
    result_headers,
)
from ivy_gateway.routes.render import OpenAiRoute

router = APIRouter(route_class=OpenAiRoute, tags=["vLLM"])


@router.post(
    "/pooling",
    **documented(
        "Vectors of inputs or of their tokens, or label scores",
        request={"input": ["What is a ferry?"], "task": "token_embed"},
        reply={
            "id": "pool-5d8c",
            "object": "list",
            "created": 1790000000,
            "model": "demo",
            "data": [{"index": 0, "object": "pooling", "data": [[0.0123, -0.0456], [0.0789, 0.0012]]}],
            "usage": {"prompt_tokens": 7, "total_tokens": 7},
        },
        fields={
            "task": "embed: a vector per input; token_embed: a vector per token, special tokens included;"
            " classify: scores of every label. Default: embed, or classify for a model that scores",
            "input": "string, list of strings, or token ids (where the server allows them), flat or nested",
            "model": "absent, or a served name",
            "encoding_format": "float (default), or base64 of the values' bytes, of all tokens together",
            "embed_dtype, endianness": "of base64: as on /v1/embeddings",
            "use_activation": "false: hidden states as they are, or logits; default: vectors of length 1, or"
            " shares",
            "truncate, truncate_prompt_tokens, truncation_side": "as on /v1/embeddings",
        },
    ),
)
async def pooling(request: Request) -> Response:
    """One item of data per input, in order."""
    pipeline = pipeline_of(request)
    fields = await read_fields(request, pipeline.config.max_body_bytes)
    answer = _TASKS[read_task(fields, pipeline)]
    async with hangup_cancels(request):
        return await answer(fields, pipeline)


def read_task(fields: Fields, pipeline: Pipeline) -> str:
    """What is asked for. Raises `InvalidValue` for `dimensions`, which this route does not have."""
    if "dimensions" in fields:
        raise InvalidValue(
            "`dimensions` is not supported here; /v1/embeddings shortens vectors", "dimensions"
        )
    return fields.choice("task", tuple(_TASKS)) or ("embed" if pipeline.embeds else "classify")


async def _embed(fields: Fields, pipeline: Pipeline) -> Response:
    encoding = _read_encoding(fields)
    results = await pipeline.embed_as(openai.to_job(fields, pipeline), encoding.outputs)
    return _reply(encoding.values(results), next(iter(results.values())).usage, pipeline)


async def _embed_tokens(fields: Fields, pipeline: Pipeline) -> Response:
    floats = FloatFormat.read(fields)
    as_base64 = fields.choice("encoding_format", ("float", "base64")) == "base64"
    result = await pipeline.embed_tokens(openai.to_job(fields, pipeline))
    rows = result.parts()
    if not as_base64:
        return _reply(rows, result.usage, pipeline)
    packed = (base64.b64encode(floats.pack(rows_TD).tobytes()).decode("ascii") for rows_TD in rows)
    return _reply(packed, result.usage, pipeline)


async def _classify(fields: Fields, pipeline: Pipeline) -> Response:
    fields.choice("encoding_format", ("float",))
    result = await pipeline.classify(classify.to_vllm_job(fields, pipeline))
    return _reply(result.scores, result.usage, pipeline)


_TASKS = {"embed": _embed, "token_embed": _embed_tokens, "classify": _classify}


def _read_encoding(fields: Fields) -> Listed:
    fields.choice("encoding_format", ("float", "base64"))
    encoding = openai.read_format(fields)
    assert isinstance(encoding, Listed), "neither float nor base64: this is a bug"
    return encoding


def _reply(values: Iterable[object], usage: Usage, pipeline: Pipeline) -> Response:
    data: list[dict[str, Any]] = [
        {"index": i, "object": "pooling", "data": value} for i, value in enumerate(values)
    ]
    return json_response(listing("pool", pipeline.config, data, usage), result_headers(pipeline, usage))
