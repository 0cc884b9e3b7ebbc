"""Between texts and token ids: TEI's `/tokenize` and `/decode`, vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ivy_gateway.errors import EmptyInput
from ivy_gateway.jobs import DecodeJob, TokenIds, TokenizeJob
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.routes.body import Fields, JsonValue, read_fields, refuse
from ivy_gateway.routes.conversation import read_conversation
from ivy_gateway.routes.docs import EITHER_PROBLEM, documented
from ivy_gateway.routes.handling import (
    check_model,
    deadline_for,
    hangup_cancels,
    json_response,
    pipeline_of,
)
from ivy_gateway.routes.inputs import check_batch_size, read_nonempty_texts, read_prompt_name, read_token_ids
from ivy_gateway.routes.render import Family, OpenAiRoute, TeiRoute
from ivy_gateway.routes.schema import (
    CHAT_FIELDS,
    COUNT,
    MODEL,
    TEXT,
    TEXT_OBJECT,
    TOKEN_IDS,
    Schema,
    array,
    body,
    boolean,
    either,
    nullable,
    record,
    string,
)

router = APIRouter(route_class=TeiRoute, tags=["Tokens"])
vllm_router = APIRouter(route_class=OpenAiRoute, tags=["Tokens"])

TOKENIZE_FIELDS: dict[str, Schema] = {
    "inputs": either(
        TEXT,
        array(either(TEXT, TEXT_OBJECT), minItems=1),
        says="a text or a list of texts: the reply lists each one's tokens, with their places in bytes of"
        " UTF-8",
    ),
    "prompt": string("instead, as in vLLM: one text; the reply has count, max_model_len and tokens (ids)"),
    **CHAT_FIELDS,
    "model": MODEL,
    "add_special_tokens": boolean("default true; with messages false"),
    "prompt_name": string("with inputs: one of the model's prompts, to put in front"),
    "input_type": string("with inputs, instead: query or document, where the model has a prompt for it"),
    "return_token_strs": boolean("with prompt or messages: also the vocabulary's spelling of each token"),
}
DECODE_FIELDS: dict[str, Schema] = {
    "ids": either(
        TOKEN_IDS,
        array(TOKEN_IDS, minItems=1),
        says="token ids of the model: one list, or a list of lists",
    ),
    "skip_special_tokens": boolean("leave special tokens out; default true"),
}
_TOKEN = record(
    {
        "id": COUNT,
        "text": string(),
        "special": boolean(),
        "start": nullable(COUNT),
        "stop": nullable(COUNT),
    }
)
_COUNTED = record(
    {
        "count": COUNT,
        "max_model_len": COUNT,
        "tokens": array(COUNT),
        "token_strs": nullable(array(string())),
    }
)


@router.post(
    "/tokenize",
    **documented(
        "Show the tokens of texts",
        request={"inputs": ["A ferry."]},
        reply=[
            [
                {"id": 101, "text": "[CLS]", "special": True, "start": None, "stop": None},
                {"id": 1037, "text": "A", "special": False, "start": 0, "stop": 1},
            ]
        ],
        takes=body(TOKENIZE_FIELDS, ("inputs",), ("prompt",), ("messages",)),
        answers=either(array(array(_TOKEN)), _COUNTED),
        problem=EITHER_PROBLEM,
    ),
)
async def tokenize(request: Request) -> Response:
    """Tokens of the whole text, never cut, as the embedding routes see them."""
    pipeline = pipeline_of(request)
    fields = await read_fields(request, pipeline.config.max_body_bytes, for_servers=False)
    if fields.one_of("inputs", "prompt", "messages") in ("prompt", "messages"):
        request.state.family = Family.O
        return await _answer_vllm(request, fields)
    async with hangup_cancels(request):
        texts = await pipeline.tokenize(to_job(fields, pipeline))
    return json_response([text.tokens for text in texts])


@router.post(
    "/decode",
    **documented(
        "Turn token ids into texts",
        request={"ids": [[101, 1037, 7115, 102]], "skip_special_tokens": True},
        reply=["a ferry"],
        takes=body(DECODE_FIELDS, ("ids",)),
        answers=array(string()),
    ),
)
async def decode(request: Request) -> Response:
    """One text per list of ids, in a list."""
    pipeline = pipeline_of(request)
    job = to_decode_job(
        await read_fields(request, pipeline.config.max_body_bytes, for_servers=False), pipeline
    )
    async with hangup_cancels(request):
        return json_response(await pipeline.decode(job))


@vllm_router.post(
    "/detokenize",
    **documented(
        "Turn token ids into a text, as vLLM does",
        request={"tokens": [101, 1037, 7115, 102]},
        reply={"prompt": "[CLS] a ferry [SEP]"},
        takes=body(
            {"tokens": TOKEN_IDS | {"description": "token ids of the model"}, "model": MODEL}, ("tokens",)
        ),
        answers=record({"prompt": string()}),
    ),
)
async def detokenize(request: Request) -> Response:
    """The text of one list of ids, special tokens included."""
    pipeline = pipeline_of(request)
    job = to_detokenize_job(
        await read_fields(request, pipeline.config.max_body_bytes, for_servers=False), pipeline
    )
    async with hangup_cancels(request):
        (text,) = await pipeline.decode(job)
    return json_response({"prompt": text})


async def _answer_vllm(request: Request, fields: Fields) -> Response:
    pipeline = pipeline_of(request)
    job = to_vllm_job(fields, pipeline)
    spelled = fields.boolean("return_token_strs") is True
    async with hangup_cancels(request):
        (text,) = await pipeline.tokenize(job)
    body = {
        "count": len(text.tokens),
        "max_model_len": pipeline.profile.max_length,
        "tokens": [token.id for token in text.tokens],
        "token_strs": text.pieces if spelled else None,
    }
    return json_response(body)


def to_job(fields: Fields, pipeline: Pipeline) -> TokenizeJob:
    """The neutral job for TEI's body of `/tokenize`."""
    config = pipeline.config
    return TokenizeJob(
        texts=read_nonempty_texts(fields.require("inputs"), "inputs", config.max_client_batch_size),
        input_field="inputs",
        deadline=deadline_for(config),
        prompt_name=read_prompt_name(fields, pipeline.profile, "input_type"),
        add_special_tokens=fields.boolean("add_special_tokens") is not False,
    )


def to_vllm_job(fields: Fields, pipeline: Pipeline) -> TokenizeJob:
    """The neutral job for vLLM's body of `/tokenize`."""
    check_model(fields, pipeline.config)
    conversation = read_conversation(fields, "prompt")
    return TokenizeJob(
        texts=read_nonempty_texts(fields.text("prompt"), "prompt", 1) if conversation is None else (),
        input_field="prompt" if conversation is None else "messages",
        deadline=deadline_for(pipeline.config),
        prompt_name=None,
        add_special_tokens=fields.boolean("add_special_tokens") is not False,
        conversation=conversation,
    )


def to_decode_job(fields: Fields, pipeline: Pipeline) -> DecodeJob:
    """The neutral job for a body of `/decode`."""
    config = pipeline.config
    return DecodeJob(
        sequences=_read_sequences(fields.require("ids"), config.max_client_batch_size),
        input_field="ids",
        deadline=deadline_for(config),
        skip_special_tokens=fields.boolean("skip_special_tokens") is not False,
    )


def to_detokenize_job(fields: Fields, pipeline: Pipeline) -> DecodeJob:
    """The neutral job for a body of `/detokenize`."""
    check_model(fields, pipeline.config)
    return DecodeJob(
        sequences=(read_token_ids(fields.require("tokens"), "tokens"),),
        input_field="tokens",
        deadline=deadline_for(pipeline.config),
        skip_special_tokens=False,
    )


def _read_sequences(value: JsonValue, limit: int) -> tuple[TokenIds, ...]:
    if not isinstance(value, list):
        refuse("ids", "a list of token ids, or a list of such lists", value)
    if not value:
        raise EmptyInput("`ids` cannot be empty", "ids")
    if not isinstance(value[0], list):
        return (read_token_ids(value, "ids"),)
    check_batch_size(len(value), limit)
    return tuple(read_token_ids(item, f"ids[{i}]") for i, item in enumerate(value))
