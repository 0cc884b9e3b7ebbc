"""vLLM's pooling route: vectors of inputs, vectors of their tokens, or label scores, as `task` says."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request, Response

from ivy_gateway.errors import InvalidValue
from ivy_gateway.jobs import Usage
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.routes import classify, encodings, openai
from ivy_gateway.routes.body import Fields, read_fields
from ivy_gateway.routes.docs import documented
from ivy_gateway.routes.encodings import FloatFormat, Format, Listed, Octets
from ivy_gateway.routes.handling import (
    hangup_cancels,
    json_response,
    listing_of,
    pipeline_of,
    result_headers,
)
from ivy_gateway.routes.render import OpenAiRoute
from ivy_gateway.routes.schema import (
    VECTOR,
    Schema,
    array,
    body,
    boolean,
    choice,
    either,
    indexed,
    integer,
    listing,
    string,
)

router = APIRouter(route_class=OpenAiRoute, tags=["vLLM"])

_FORMATS = ("float", "base64", *openai.OCTETS)
TASKS = ("embed", "token_embed", "classify")
_SHARED = {name: schema for name, schema in openai.FIELDS.items() if name != "late_chunking"}
FIELDS: dict[str, Schema] = _SHARED | {
    "task": choice(
        "embed: a vector per input; token_embed: a vector per token, special tokens included; classify:"
        " scores of every label. Default: embed, or classify for a model that scores",
        *TASKS,
    ),
    "encoding_format": choice(
        "float (default); base64 of the values' bytes, of all tokens together; of vectors of inputs also"
        " bytes and bytes_only, as on /v1/embeddings",
        *_FORMATS,
    ),
    **{name: string("not used here") for name in ("embedding_type", "encoding_type")},
    "use_activation": boolean(
        "false: hidden states as they are, or logits; default: vectors of length 1, or shares"
    ),
    "raw_scores": boolean("with classify: true: logits"),
    "dimensions": integer("not supported: /v1/embeddings shortens vectors"),
}


REPLY = listing(indexed("pooling", {"data": either(VECTOR, array(VECTOR), string("base64"))}))


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
        takes=body(FIELDS, ("input",), ("messages",)),
        answers=REPLY,
        octets=True,
    ),
)
async def pooling(request: Request) -> Response:
    """One item of data per input, in order."""
    pipeline = pipeline_of(request)
    return await answer(request, await read_fields(request, pipeline.config.max_body_bytes))


async def answer(request: Request, fields: Fields) -> Response:
    """The reply to a body of `/pooling`."""
    pipeline = pipeline_of(request)
    pool = _POOLERS[read_task(fields, pipeline)]
    async with hangup_cancels(request):
        return await pool(fields, pipeline)


def read_task(fields: Fields, pipeline: Pipeline) -> str:
    """What is asked for. Raises `InvalidValue` for `dimensions`, which this route does not have."""
    if "dimensions" in fields:
        raise InvalidValue(
            "`dimensions` is not supported here; /v1/embeddings shortens vectors", "dimensions"
        )
    return fields.choice("task", TASKS) or ("embed" if pipeline.embeds else "classify")


async def _embed(fields: Fields, pipeline: Pipeline) -> Response:
    wanted = read_format(fields)
    job = openai.to_job(fields, pipeline)
    openai.check_describable(job, wanted)
    results = await pipeline.embed_as(job, wanted.outputs)
    if isinstance(wanted, Octets):
        return openai.from_results(results, wanted, pipeline)
    return _reply(wanted.values(results), next(iter(results.values())).usage, pipeline)


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


_POOLERS = {"embed": _embed, "token_embed": _embed_tokens, "classify": _classify}


def read_format(fields: Fields) -> Format:
    """How vectors of inputs are to be written."""
    floats = FloatFormat.read(fields)
    name = fields.choice("encoding_format", _FORMATS) or "float"
    if name in openai.OCTETS:
        return Octets(floats, openai.OCTETS[name])
    return Listed({name: floats.base64() if name == "base64" else encodings.FLOAT})


def _reply(values: Iterable[object], usage: Usage, pipeline: Pipeline) -> Response:
    data: list[dict[str, Any]] = [
        {"index": i, "object": "pooling", "data": value} for i, value in enumerate(values)
    ]
    return json_response(listing_of("pool", pipeline.config, data, usage), result_headers(pipeline, usage))
