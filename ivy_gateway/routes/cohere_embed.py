"""Cohere's two embed routes: one job, and a reply with every kind of vector that was asked for."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter, Request, Response

from ivy_gateway.errors import EmptyInput, InvalidValue
from ivy_gateway.jobs import EmbedJob, Truncation
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.routes import encodings
from ivy_gateway.routes.body import Fields, JsonValue, read_fields, refuse
from ivy_gateway.routes.docs import documented
from ivy_gateway.routes.encodings import Listed, Results
from ivy_gateway.routes.handling import (
    check_model,
    deadline_for,
    hangup_cancels,
    json_response,
    pipeline_of,
    result_headers,
)
from ivy_gateway.routes.inputs import check_batch_size, read_inputs, read_prompt_name
from ivy_gateway.routes.render import OpenAiRoute
from ivy_gateway.routes.schema import (
    COUNT,
    DIMENSIONS,
    MODEL,
    PROMPT_NAME,
    TEXT,
    TEXT_PART,
    VECTOR,
    Schema,
    array,
    body,
    choice,
    either,
    integer,
    record,
    string,
)

router = APIRouter(route_class=OpenAiRoute, tags=["Cohere"])

_ENCODINGS = {
    "float": encodings.FLOAT,
    "int8": encodings.INT8,
    "uint8": encodings.UINT8,
    "binary": encodings.BINARY,
    "ubinary": encodings.UBINARY,
    "base64": encodings.BASE64,
}
_TRUNCATIONS = {
    "NONE": Truncation(enabled=False),
    "START": Truncation(enabled=True, side="left"),
    "END": Truncation(enabled=True, side="right"),
}
FIELDS: dict[str, Schema] = {
    "texts": array(TEXT, "list of strings", minItems=1),
    "inputs": array(
        body({"content": array(TEXT_PART, minItems=1)}, ("content",)),
        "instead: list of {content: [{type: text, text: string}]}, whose texts are joined by line ends",
        minItems=1,
    ),
    "images": array({}, "not supported: these models take texts"),
    "model": MODEL,
    "input_type": string("search_query or search_document: the model's own prompt for it, where it has one"),
    "prompt_name": PROMPT_NAME,
    "embedding_types": either(
        choice("", *_ENCODINGS),
        array(choice("", *_ENCODINGS), minItems=1),
        says="any of float (default; absent on /v1/embed: plain lists), base64 (of little-endian float32),"
        " binary and ubinary (signs, the first dimension in the most significant bit), int8 and uint8 (of"
        " models that quantise)",
    ),
    "output_dimension": DIMENSIONS,
    "truncate": choice(
        "of inputs over the limit: NONE refuses, START and END cut; default: the server's setting",
        *_TRUNCATIONS,
    ),
    "max_tokens": integer("a lower limit of tokens", minimum=1),
}
_BY_TYPE = record(
    {},
    optional={
        name: array(string() if name == "base64" else VECTOR if name == "float" else array(integer()))
        for name in _ENCODINGS
    },
)
REPLY = record(
    {
        "id": string(),
        "embeddings": either(array(VECTOR), _BY_TYPE),
        "texts": array(string()),
        "meta": record(
            {"api_version": record({"version": string()}), "billed_units": record({"input_tokens": COUNT})}
        ),
        "response_type": choice("", "embeddings_floats", "embeddings_by_type"),
    }
)
_NEEDED = (("texts",), ("inputs",))
_REQUEST = {
    "input_type": "search_document",
    "texts": ["What is a ferry?", "A ship that carries people."],
    "embedding_types": ["float"],
}
_BY_TYPE_REPLY = {
    "id": "5d8c",
    "embeddings": {"float": [[0.0123, -0.0456], [0.0789, 0.0012]]},
    "texts": ["What is a ferry?", "A ship that carries people."],
    "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 14}},
    "response_type": "embeddings_by_type",
}


@router.post(
    "/v2/embed",
    **documented(
        "Embed texts, as Cohere does",
        request=_REQUEST,
        takes=body(FIELDS, *_NEEDED),
        reply=_BY_TYPE_REPLY,
        answers=REPLY,
    ),
)
async def embed_v2(request: Request) -> Response:
    """Vectors of every type asked for, by type."""
    return await _embed(request, version="2")


@router.post(
    "/v1/embed",
    **documented(
        "Embed texts, as Cohere's first version does",
        request={"texts": ["What is a ferry?"], "truncate": "END"},
        reply=_BY_TYPE_REPLY | {"embeddings": [[0.0123, -0.0456]], "response_type": "embeddings_floats"},
        takes=body(FIELDS, *_NEEDED),
        answers=REPLY,
    ),
)
async def embed_v1(request: Request) -> Response:
    """Vectors as numbers, or, once types are asked for, by type."""
    return await _embed(request, version="1")


async def _embed(request: Request, version: str) -> Response:
    pipeline = pipeline_of(request)
    fields = await read_fields(request, pipeline.config.max_body_bytes)
    wanted = read_types(fields, by_type=version == "2")
    job = to_job(fields, pipeline)
    async with hangup_cancels(request):
        results = await pipeline.embed_as(job, wanted.outputs)
    return from_results(results, wanted, job, pipeline, version)


def read_types(fields: Fields, *, by_type: bool) -> Listed:
    """The kinds of vectors; where none is named floats, `by_type` or bare."""
    names = fields.choices("embedding_types", tuple(_ENCODINGS))
    chosen = {name: _ENCODINGS[name] for name in names or ("float",)}
    return Listed(chosen, keyed=by_type or names is not None)


def to_job(fields: Fields, pipeline: Pipeline) -> EmbedJob:
    """The neutral job for either body."""
    config = pipeline.config
    check_model(fields, config)
    field, texts = read_texts(fields, config.max_client_batch_size)
    return EmbedJob(
        inputs=texts,
        input_field=field,
        deadline=deadline_for(config),
        truncation=_read_truncation(fields),
        prompt_name=read_prompt_name(fields, pipeline.profile, "input_type"),
        dimensions=fields.integer("output_dimension", minimum=1),
        dimensions_field="output_dimension",
        output_field="embedding_types",
    )


def read_texts(fields: Fields, limit: int) -> tuple[str, tuple[str, ...]]:
    """The field that holds the texts, and these."""
    if "images" in fields:
        raise InvalidValue("`images`: this model takes texts only", "images")
    if "texts" in fields and "inputs" in fields:
        raise InvalidValue("give either `texts` or `inputs`, not both", "inputs")
    field = fields.one_of("inputs") or "texts"
    items = fields.require(field)
    if not isinstance(items, list):
        refuse(field, "a list", items)
    if field == "inputs":
        check_batch_size(len(items), limit)
        items = [_read_content(item, f"inputs[{i}].content") for i, item in enumerate(items)]
    return field, _only_texts(items, field, limit)


def from_results(
    results: Results, wanted: Listed, job: EmbedJob, pipeline: Pipeline, version: str
) -> Response:
    """Vectors by type, or bare floats, with the texts they are of."""
    usage = next(iter(results.values())).usage
    body: dict[str, Any] = {
        "id": secrets.token_hex(12),
        "embeddings": wanted.columns(results) if wanted.keyed else list(wanted.values(results)),
        "texts": job.inputs,
        "meta": {
            "api_version": {"version": version},
            "billed_units": {"input_tokens": usage.num_tokens},
        },
        "response_type": "embeddings_by_type" if wanted.keyed else "embeddings_floats",
    }
    return json_response(body, result_headers(pipeline, usage))


def _read_truncation(fields: Fields) -> Truncation:
    name = fields.choice("truncate", tuple(_TRUNCATIONS))
    max_tokens = fields.integer("max_tokens", minimum=1)
    if name is not None:
        chosen = _TRUNCATIONS[name]
        return Truncation(chosen.enabled, max_tokens, chosen.side)
    return Truncation(None if max_tokens is None else True, max_tokens)


def _only_texts(items: list[JsonValue], field: str, limit: int) -> tuple[str, ...]:
    wrong = next((i for i, item in enumerate(items) if not isinstance(item, str)), None)
    if wrong is not None:
        refuse(f"{field}[{wrong}]", "a string", items[wrong])
    texts = read_inputs(items, field, limit)
    return tuple(text for text in texts if isinstance(text, str))


def _read_content(item: JsonValue, place: str) -> str:
    """The text parts of one input, joined."""
    parts = item.get("content") if isinstance(item, dict) else None
    if not isinstance(parts, list):
        refuse(place, "a list of parts", parts)
    if not parts:
        raise EmptyInput(f"`{place}` cannot be empty", place)
    return "\n".join(_read_part(part, f"{place}[{i}]") for i, part in enumerate(parts))


def _read_part(part: JsonValue, place: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidValue(
            f"`{place}` must be {{type: text, text: string}}: this model takes no images", place
        )
    return str(part["text"])
