"""OpenAI's embeddings route, with the extra fields of vLLM, Jina and Infinity."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request, Response

from ivy_gateway.errors import InvalidValue
from ivy_gateway.jobs import EmbedJob, TokenIds
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.routes import encodings, late_chunking
from ivy_gateway.routes.body import Fields, read_fields
from ivy_gateway.routes.conversation import read_conversation
from ivy_gateway.routes.docs import documented
from ivy_gateway.routes.encodings import FloatFormat, Format, Listed, Octets, Results
from ivy_gateway.routes.handling import (
    check_model,
    deadline_for,
    hangup_cancels,
    json_response,
    listing_of,
    pipeline_of,
    result_headers,
)
from ivy_gateway.routes.inputs import read_inputs, read_prompt_name, read_truncation
from ivy_gateway.routes.render import OpenAiRoute
from ivy_gateway.routes.schema import (
    CHAT_FIELDS,
    DIMENSIONS,
    ENCODED,
    MODEL,
    PROMPT_NAME,
    TEXT,
    TEXT_OBJECT,
    TOKEN_IDS,
    TRUNCATION_FIELDS,
    TRUNCATION_SIDE,
    VECTOR,
    Schema,
    array,
    body,
    boolean,
    choice,
    either,
    indexed,
    listing,
    mapping,
    string,
)
from ivy_gateway.vectors import FLOAT_SIZES

router = APIRouter(route_class=OpenAiRoute, tags=["OpenAI"])

_ENCODING_FIELDS = ("encoding_format", "encoding_type", "embedding_type")  # OpenAI, LlamaIndex, Jina
_NORMALIZE_FIELDS = ("normalize", "normalized", "use_activation")  # TEI, Jina, vLLM
_ENCODINGS = {
    "float": encodings.FLOAT,
    "base64": encodings.BASE64,
    "base64_int8": encodings.BASE64_INT8,
    "base64_binary": encodings.BASE64_BINARY,
    "ubinary": encodings.UBINARY,
    "binary": encodings.BINARY,
}
OCTETS = {"bytes": True, "bytes_only": False}  # whether a header describes them
_FORMATS = (*_ENCODINGS, *OCTETS)
# A vector takes up to 105 bytes of the `metadata` header, and Python's own client reads lines up to 64 KiB.
_MAX_DESCRIBED = 512
FIELDS: dict[str, Schema] = {
    "input": either(
        TEXT,
        TOKEN_IDS,
        array(either(TEXT, TEXT_OBJECT, TOKEN_IDS), minItems=1),
        says="string, list of strings or {text: string}, or token ids (where the server allows them), flat or"
        " nested",
    ),
    **CHAT_FIELDS,
    "model": MODEL,
    "encoding_format": choice(
        "float (default); base64 of the vector's bytes; bytes: all vectors as one binary body, placed by the"
        " header `metadata`; bytes_only: without it; base64_int8, where the model quantises; signs:"
        " base64_binary (first dimension in the least significant bit), ubinary, binary (first in the most"
        " significant bit; binary is 128 less)",
        *_ENCODINGS,
        *OCTETS,
    ),
    **{
        name: either(
            choice("", *_ENCODINGS),
            array(choice("", *_ENCODINGS), minItems=1),
            says="the same without bytes, or a list: each `embedding` is then an object by type",
        )
        for name in _ENCODING_FIELDS[1:]
    },
    "embed_dtype": choice("of base64 and bytes: float32 (default), float16 or bfloat16", *FLOAT_SIZES),
    "endianness": choice("of base64 and bytes: little (default), big or native", "little", "big", "native"),
    "dimensions": DIMENSIONS,
    **TRUNCATION_FIELDS,
    "truncation_side": TRUNCATION_SIDE,
    "add_special_tokens": boolean("default true; with messages false"),
    "late_chunking": boolean("true: inputs are chunks of one document (contextual models)"),
    **{name: boolean("scale vectors to length 1; default true") for name in _NORMALIZE_FIELDS},
    "prompt_name": PROMPT_NAME,
    **{
        name: string(
            "instead, where the model has such a prompt: its name, or search_query, search_document,"
            " retrieval.query, retrieval.passage"
        )
        for name in ("task", "input_type")
    },
}
_BY_TYPE = mapping(either(VECTOR, string()), "by type, where a list of types was asked for")
REPLY = listing(indexed("embedding", {"embedding": either(*ENCODED["anyOf"], _BY_TYPE)}))
_DOCUMENTATION = documented(
    "Embed texts, as OpenAI does",
    request={"input": ["What is a ferry?", "A ship that carries people."], "encoding_format": "float"},
    takes=body(FIELDS, ("input",), ("messages",)),
    reply={
        "id": "embd-5d8c",
        "object": "list",
        "created": 1790000000,
        "data": [{"object": "embedding", "index": 0, "embedding": [0.0123, -0.0456]}],
        "model": "demo",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    },
    answers=REPLY,
    octets=True,
)


@router.post("/v1/embeddings", **_DOCUMENTATION)
@router.post("/embeddings", **_DOCUMENTATION)
async def embeddings(request: Request) -> Response:
    """One vector per input, in order, with its index."""
    pipeline = pipeline_of(request)
    return await answer(request, await read_fields(request, pipeline.config.max_body_bytes))


async def answer(request: Request, fields: Fields) -> Response:
    """The reply to a body of `/v1/embeddings`."""
    pipeline = pipeline_of(request)
    wanted = read_format(fields)
    job = to_job(fields, pipeline)
    check_describable(job, wanted)
    late = fields.boolean("late_chunking")
    async with hangup_cancels(request):
        if late:
            results = await late_chunking.embed(job, wanted.outputs, pipeline)
        else:
            results = await pipeline.embed_as(job, wanted.outputs)
    return from_results(results, wanted, pipeline)


def read_format(fields: Fields) -> Format:
    """How vectors are to be written. Only the newer two spellings take a list, only the oldest has bytes."""
    floats = FloatFormat.read(fields)
    known = _ENCODINGS if floats == FloatFormat() else _ENCODINGS | {"base64": floats.base64()}
    field = fields.one_of(*_ENCODING_FIELDS)
    if field in (None, "encoding_format"):
        name = fields.choice("encoding_format", _FORMATS) or "float"
        if name in OCTETS:
            return Octets(floats, OCTETS[name])
        return Listed({name: known[name]})
    names = fields.choices(field, tuple(known)) or ()
    return Listed({name: known[name] for name in names}, keyed=isinstance(fields.get(field), list))


def to_job(fields: Fields, pipeline: Pipeline) -> EmbedJob:
    """The neutral job for an embeddings body, whatever its vectors are wanted as."""
    config = pipeline.config
    check_model(fields, config)
    conversation = read_conversation(fields, "input")
    prompt_name = read_prompt_name(fields, pipeline.profile, "task", "input_type")
    if conversation is not None and prompt_name is not None:
        raise InvalidValue("`messages` take no prompt", "prompt_name")
    normalize = [fields.boolean(name) for name in _NORMALIZE_FIELDS]
    return EmbedJob(
        inputs=read_texts_or_ids(fields, pipeline) if conversation is None else (),
        input_field="input" if conversation is None else "messages",
        deadline=deadline_for(config),
        truncation=read_truncation(fields, "truncation_side"),
        prompt_name=prompt_name,
        normalize=False not in normalize,
        dimensions=fields.integer("dimensions", minimum=1),
        add_special_tokens=fields.boolean("add_special_tokens") is not False,
        output_field=fields.one_of(*_ENCODING_FIELDS) or _ENCODING_FIELDS[0],
        conversation=conversation,
    )


def read_texts_or_ids(fields: Fields, pipeline: Pipeline) -> tuple[str | TokenIds, ...]:
    """`input` under the server's policy for token ids: those of OpenAI's vocabulary become text again.

    Raises `InvalidValue` where the policy is to refuse ids, saying what to change.
    """
    config, vocabulary = pipeline.config, pipeline.foreign_vocabulary
    inputs = read_inputs(fields.require("input"), "input", config.max_client_batch_size, objects=True)
    if not any(isinstance(item, TokenIds) for item in inputs):
        return inputs
    if vocabulary is not None:
        return tuple(
            vocabulary.decode(item, f"input[{i}]") if isinstance(item, TokenIds) else item
            for i, item in enumerate(inputs)
        )
    if config.token_ids == "reject":  # noqa: S105
        raise InvalidValue(_REFUSED_IDS, "input")
    return inputs


_REFUSED_IDS = (
    "`input` holds token ids, which this route refuses because most clients send those of another model's"
    " vocabulary. LangChain users: set check_embedding_ctx_length=False on OpenAIEmbeddings, to send text."
    " Ids of the served model itself: start the gateway with --token-ids model, or use /embed; ids of"
    " OpenAI's models: --token-ids cl100k_base"
)


def check_describable(job: EmbedJob, wanted: Format) -> None:
    """Raise `InvalidValue` for more vectors than the header of `bytes` has room for."""
    if isinstance(wanted, Octets) and wanted.described and len(job.inputs) > _MAX_DESCRIBED:
        raise InvalidValue(
            f"`encoding_format` bytes describes each vector in a header, which has room for {_MAX_DESCRIBED}"
            f" inputs, got {len(job.inputs)}; bytes_only has no such header",
            "encoding_format",
        )


def from_results(results: Results, wanted: Format, pipeline: Pipeline) -> Response:
    """OpenAI's list of embeddings, or vLLM's bytes."""
    usage = next(iter(results.values())).usage
    headers = result_headers(pipeline, usage)
    if isinstance(wanted, Listed):
        data: list[dict[str, Any]] = [
            {"object": "embedding", "index": i, "embedding": vector}
            for i, vector in enumerate(wanted.values(results))
        ]
        return json_response(listing_of("embd", pipeline.config, data, usage), headers)
    if wanted.described:
        described = listing_of("embd", pipeline.config, wanted.places(results), usage)
        headers["metadata"] = json.dumps(described, separators=(",", ":"))  # ASCII, as headers must be
    return Response(wanted.pack(results).tobytes(), headers=headers, media_type="application/octet-stream")
