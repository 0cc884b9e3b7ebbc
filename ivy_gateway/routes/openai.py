"""OpenAI's embeddings route, with the extra fields of vLLM, Jina and Infinity."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray

from ivy_gateway.errors import InvalidValue
from ivy_gateway.jobs import EmbeddingResult, EmbedJob, Output, TokenIds
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.routes.body import Fields, read_fields
from ivy_gateway.routes.docs import documented
from ivy_gateway.routes.handling import (
    check_model,
    deadline_for,
    hangup_cancels,
    json_response,
    listing,
    pipeline_of,
    result_headers,
)
from ivy_gateway.routes.inputs import read_inputs, read_truncation
from ivy_gateway.routes.render import OpenAiRoute

router = APIRouter(route_class=OpenAiRoute, tags=["OpenAI"])

_ENCODING_FIELDS = ("encoding_format", "encoding_type", "embedding_type")  # OpenAI, LlamaIndex, Jina
_NORMALIZE_FIELDS = ("normalize", "normalized", "use_activation")  # TEI, Jina, vLLM
_DOCUMENTATION = documented(
    "Embed texts, as OpenAI does",
    request={"input": ["What is a ferry?", "A ship that carries people."], "encoding_format": "float"},
    reply={
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.0123, -0.0456]}],
        "model": "demo",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    },
    fields={
        "input": "string, list of strings, or token ids (where the server allows them), flat or nested",
        "model": "absent, or a served name",
        "encoding_format": "float (default); base64 of little-endian float32; base64_int8, where the model"
        " quantises; signs: base64_binary (first dimension in the least significant bit), ubinary, binary"
        " (first in the most significant bit; binary is 128 less)",
        "dimensions": "shorten vectors, where the model allows it",
        "truncate": "cut inputs over the model's limit; default: the server's setting",
        "truncate_prompt_tokens": "cut inputs to this many tokens; -1 = the model's limit",
        "truncation_side": "right (default) or left",
        "normalize": "scale vectors to length 1; default true",
        "prompt_name": "one of the model's prompts",
    },
)


@router.post("/v1/embeddings", **_DOCUMENTATION)
@router.post("/embeddings", **_DOCUMENTATION)
async def embeddings(request: Request) -> Response:
    """One vector per input, in order, with its index."""
    pipeline = pipeline_of(request)
    fields = await read_fields(request, pipeline.config.max_body_bytes)
    encoding = read_encoding(fields)
    job = to_job(fields, pipeline, encoding.output)
    async with hangup_cancels(request):
        result = await pipeline.embed(job)
    return from_result(result, encoding, pipeline)


@dataclass(frozen=True, slots=True)
class Encoding:
    """How vectors are written: the output that is asked for, and from its rows to JSON values."""

    output: Output
    write: Callable[[NDArray[Any]], Iterable[object]]


def encode_float32(vectors_ND: NDArray[Any]) -> list[str]:
    """Each row as base64, standard alphabet, over its little-endian float32 bytes."""
    return encode_bytes(vectors_ND.astype("<f4", copy=False))


def encode_bytes(rows: NDArray[Any]) -> list[str]:
    """Each row's own bytes as base64."""
    return [base64.b64encode(row).decode("ascii") for row in np.ascontiguousarray(rows)]


def encode_reversed_bits(bits: NDArray[np.uint8]) -> list[str]:
    """Each row as base64, the first of eight bits in the least significant place (Perplexity's order)."""
    return encode_bytes(np.packbits(np.unpackbits(bits, axis=1), axis=1, bitorder="little"))


def signed(bits: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Bytes less 128 (Jina's and Cohere's `binary`)."""
    return (bits ^ np.uint8(128)).view(np.int8)


ENCODINGS = {
    "float": Encoding(Output.OWN, iter),
    "base64": Encoding(Output.OWN, encode_float32),
    "base64_int8": Encoding(Output.INT8, encode_bytes),
    "base64_binary": Encoding(Output.BITS, encode_reversed_bits),
    "ubinary": Encoding(Output.BITS, iter),
    "binary": Encoding(Output.BITS, signed),
}


def read_encoding(fields: Fields) -> Encoding:
    """How vectors are to be written."""
    name = fields.one_of(*_ENCODING_FIELDS)
    return ENCODINGS[(name and fields.choice(name, tuple(ENCODINGS))) or "float"]


def to_job(fields: Fields, pipeline: Pipeline, output: Output) -> EmbedJob:
    """The neutral job for an embeddings body whose vectors are wanted as `output`."""
    config = pipeline.config
    check_model(fields, config)
    refuse_unsupported(fields)
    inputs = read_inputs(fields.require("input"), "input", config.max_client_batch_size, objects=True)
    if any(isinstance(item, TokenIds) for item in inputs) and config.token_ids != "model":  # noqa: S105
        raise InvalidValue(_REFUSED_IDS, "input")
    normalize = [fields.boolean(name) for name in _NORMALIZE_FIELDS]
    return EmbedJob(
        inputs=inputs,
        input_field="input",
        deadline=deadline_for(config),
        truncation=read_truncation(fields, "truncation_side"),
        prompt_name=_read_prompt_name(fields, pipeline),
        normalize=False not in normalize,
        dimensions=fields.integer("dimensions", minimum=1),
        output=output,
        output_field=fields.one_of(*_ENCODING_FIELDS) or _ENCODING_FIELDS[0],
    )


_REFUSED_IDS = (
    "`input` holds token ids, which this route refuses because most clients send those of another model's"
    " vocabulary. LangChain users: set check_embedding_ctx_length=False on OpenAIEmbeddings, to send text."
    " Ids of the served model itself: start the gateway with --token-ids model, or use /embed"
)


def refuse_unsupported(fields: Fields) -> None:
    """Raise `InvalidValue` for known extras with a value that would change the reply and is not honoured."""
    fields.choice("embed_dtype", ("float32",))
    fields.choice("endianness", ("native", "little"))
    for name, honoured in (("add_special_tokens", True), ("late_chunking", False)):
        if fields.boolean(name) not in (None, honoured):
            raise InvalidValue(f"`{name}` must be {str(honoured).lower()} or absent", name)


def _read_prompt_name(fields: Fields, pipeline: Pipeline) -> str | None:
    """`prompt_name` must exist; `task` and `input_type` count where the model has a prompt of that name."""
    named = fields.text("prompt_name")
    hints = (fields.get("task"), fields.get("input_type"))
    return named or next((h for h in hints if isinstance(h, str) and h in pipeline.profile.prompts), None)


def from_result(result: EmbeddingResult, encoding: Encoding, pipeline: Pipeline) -> Response:
    """OpenAI's list of embeddings."""
    data: list[dict[str, Any]] = [
        {"object": "embedding", "index": i, "embedding": vector}
        for i, vector in enumerate(encoding.write(result.vectors))
    ]
    body = listing("embd", pipeline.config, data, result.usage)
    return json_response(body, result_headers(pipeline, result.usage))
