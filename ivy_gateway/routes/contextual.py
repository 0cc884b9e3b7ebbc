"""Contextual embeddings, as Perplexity and Voyage ask for them: a vector per chunk of each document.

The two share a path and are told apart by the documents' field: `input` is Perplexity's, `inputs` Voyage's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from ivy_gateway.errors import EmptyInput, InvalidField, TooManyInputs
from ivy_gateway.jobs import DocumentsJob, NestedResult
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.routes import encodings
from ivy_gateway.routes.body import Fields, JsonValue, read_fields, refuse
from ivy_gateway.routes.docs import documented
from ivy_gateway.routes.encodings import Encoding
from ivy_gateway.routes.handling import (
    check_model,
    deadline_for,
    hangup_cancels,
    json_response,
    listing_of,
    pipeline_of,
    result_headers,
)
from ivy_gateway.routes.inputs import check_batch_size
from ivy_gateway.routes.render import OpenAiRoute
from ivy_gateway.routes.schema import (
    ENCODED,
    MODEL,
    TEXT,
    USAGE,
    Schema,
    array,
    body,
    choice,
    indexed,
    integer,
    record,
    string,
)

router = APIRouter(route_class=OpenAiRoute, tags=["Perplexity", "Voyage"])

MAX_CHUNKS = 16_000  # of all documents of a request, as Perplexity documents it

_PERPLEXITY_ENCODINGS = {
    "base64_int8": encodings.BASE64_INT8,
    "base64_binary": encodings.BASE64_BINARY,
    "float": encodings.FLOAT,  # more than Perplexity has: the codes as numbers
}
_VOYAGE_ENCODINGS = {
    "float": encodings.FLOAT,
    "int8": encodings.INT8,
    "uint8": encodings.UINT8,
    "binary": encodings.BINARY,
    "ubinary": encodings.UBINARY,
}
_DOCUMENTS = array(array(TEXT, minItems=1), minItems=1)
FIELDS: dict[str, Schema] = {
    "input": _DOCUMENTS
    | {
        "description": "documents, each a list of its chunks' texts in order; a query is a document of one"
        " chunk. Documents over the model's limit are refused, not cut"
    },
    "inputs": _DOCUMENTS | {"description": "the same, in Voyage's dialect"},
    "model": MODEL,
    "encoding_format": choice(
        "with input: base64_int8 (default), base64_binary (signs, the first dimension in the least"
        " significant bit) or float (codes as numbers); with inputs: base64 of the output_dtype's bytes;"
        " default: numbers",
        *_PERPLEXITY_ENCODINGS,
        "base64",
    ),
    "dimensions": integer("with input: shorten vectors, where the model allows it", minimum=1),
    "output_dimension": integer("with inputs: the same", minimum=1),
    "output_dtype": choice("with inputs: float (default), int8, uint8, binary, ubinary", *_VOYAGE_ENCODINGS),
    "input_type": choice("with inputs: a side, which these models do not tell apart", "query", "document"),
}
_DOCUMENTATION = documented(
    "Embed the chunks of documents, each in view of its whole document",
    request={"input": [["A ferry leaves at noon.", "It carries people."], ["What is a ferry?"]]},
    takes=body(FIELDS, ("input",), ("inputs",)),
    reply={
        "id": "ctxe-5d8c",
        "object": "list",
        "created": 1790000000,
        "data": [
            {
                "object": "list",
                "index": 0,
                "data": [{"object": "embedding", "index": 0, "embedding": "pQ=="}],
            }
        ],
        "model": "demo",
        "usage": {"prompt_tokens": 12, "total_tokens": 12},
    },
    answers=record(
        {
            "id": string(),
            "object": choice("", "list"),
            "created": integer(),
            "model": string(),
            "data": array(indexed("list", {"data": array(indexed("embedding", {"embedding": ENCODED}))})),
            "usage": USAGE,
        }
    ),
)


@router.post("/v1/contextualizedembeddings", **_DOCUMENTATION)
@router.post("/perplexity/v1/contextualizedembeddings", **_DOCUMENTATION)
async def contextualized_embeddings(request: Request) -> Response:
    """A list of vectors per document, in order, each with its index."""
    pipeline = pipeline_of(request)
    fields = await read_fields(request, pipeline.config.max_body_bytes)
    encoding = read_encoding(fields)
    job = to_job(fields, encoding, pipeline)
    async with hangup_cancels(request):
        result = await pipeline.embed_documents(job)
    return from_result(result, encoding, pipeline)


def speaks_voyage(fields: Fields) -> bool:
    """Whether the body is in Voyage's words. Raises `InvalidField` for one in both dialects or in neither."""
    if ("input" in fields) == ("inputs" in fields):
        raise InvalidField("give the documents either as `input` or as `inputs`", "input")
    return "inputs" in fields


def read_encoding(fields: Fields) -> Encoding:
    """How vectors are to be written."""
    if speaks_voyage(fields):
        encoding = _VOYAGE_ENCODINGS[fields.choice("output_dtype", tuple(_VOYAGE_ENCODINGS)) or "float"]
        return _in_base64(encoding) if fields.choice("encoding_format", ("base64",)) else encoding
    name = fields.choice("encoding_format", tuple(_PERPLEXITY_ENCODINGS)) or "base64_int8"
    return _PERPLEXITY_ENCODINGS[name]


def _in_base64(encoding: Encoding) -> Encoding:
    """The bytes of what `encoding` writes as numbers; of floats, those of float32."""
    if encoding is encodings.FLOAT:
        return encodings.BASE64
    return Encoding(
        encoding.output, lambda rows: encodings.as_base64(np.stack([*map(np.asarray, encoding.write(rows))]))
    )


def to_job(fields: Fields, encoding: Encoding, pipeline: Pipeline) -> DocumentsJob:
    """The neutral job for either dialect."""
    config = pipeline.config
    check_model(fields, config)
    names = ("input", "dimensions", "encoding_format")
    if speaks_voyage(fields):
        names = ("inputs", "output_dimension", "output_dtype")
        fields.choice("input_type", ("query", "document"))
    input_field, dimensions_field, output_field = names
    return DocumentsJob(
        documents=read_documents(fields.require(input_field), input_field, config.max_client_batch_size),
        input_field=input_field,
        deadline=deadline_for(config),
        dimensions=fields.integer(dimensions_field, minimum=1),
        dimensions_field=dimensions_field,
        output=encoding.output,
        output_field=output_field,
    )


def read_documents(value: JsonValue, field: str, limit: int) -> tuple[tuple[str, ...], ...]:
    """Documents as lists of texts.

    Raises `EmptyInput` naming every empty document and chunk, `TooManyInputs` for more than `limit`
    documents or `MAX_CHUNKS` chunks.
    """
    items = _read_list(value, field)
    check_batch_size(len(items), limit)
    documents = tuple(_read_document(item, f"{field}[{i}]") for i, item in enumerate(items))
    empty = [
        f"{field}[{i}][{n}]" for i, texts in enumerate(documents) for n, text in enumerate(texts) if not text
    ]
    if empty:
        raise EmptyInput(f"`{field}` cannot hold empty chunks: {', '.join(empty)}", empty[0])
    if (count := sum(map(len, documents))) > MAX_CHUNKS:
        raise TooManyInputs(f"`{field}` holds {count} chunks; at most {MAX_CHUNKS} are allowed", field)
    return documents


def _read_document(item: JsonValue, place: str) -> tuple[str, ...]:
    texts = []
    for i, text in enumerate(_read_list(item, place)):
        if not isinstance(text, str):
            refuse(f"{place}[{i}]", "a string", text)
        texts.append(text)
    return tuple(texts)


def _read_list(value: JsonValue, place: str) -> list[JsonValue]:
    if not isinstance(value, list):
        refuse(place, "a list", value)
    if not value:
        raise EmptyInput(f"`{place}` cannot be empty", place)
    return value


def from_result(result: NestedResult, encoding: Encoding, pipeline: Pipeline) -> Response:
    """A list of documents, each a list of embeddings."""
    data: list[dict[str, Any]] = [
        {
            "object": "list",
            "index": i,
            "data": [{"object": "embedding", "index": n, "embedding": v} for n, v in enumerate(values)],
        }
        for i, values in enumerate(result.nest(encoding.write(result.vectors)))
    ]
    body = listing_of("ctxe", pipeline.config, data, result.usage)
    return json_response(body, result_headers(pipeline, result.usage))
