"""Scores of every label: TEI's `/predict` of texts and pairs, vLLM's `/classify` of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from ivy_gateway.errors import EmptyInput, InvalidField, InvalidValue
from ivy_gateway.jobs import ClassifyJob, ClassifyResult, TokenIds
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.routes.body import Fields, JsonValue, read_fields, refuse
from ivy_gateway.routes.conversation import read_conversation
from ivy_gateway.routes.docs import documented
from ivy_gateway.routes.handling import (
    check_model,
    deadline_for,
    hangup_cancels,
    json_response,
    listing_of,
    pipeline_of,
    result_headers,
    timing_headers,
)
from ivy_gateway.routes.inputs import check_batch_size, read_inputs, read_truncation
from ivy_gateway.routes.pairs import INSTRUCTION_FIELDS, LOGIT_FIELDS, read_instruction, wants_logits
from ivy_gateway.routes.render import OpenAiRoute, TeiRoute
from ivy_gateway.routes.schema import (
    CHAT_FIELDS,
    COUNT,
    MODEL,
    TEXT,
    TEXT_OBJECT,
    TOKEN_IDS,
    TRUNCATION_FIELDS,
    TRUNCATION_SIDE,
    Schema,
    array,
    body,
    boolean,
    either,
    integer,
    listing,
    number,
    record,
    string,
)

router = APIRouter(route_class=TeiRoute, tags=["TEI"])
vllm_router = APIRouter(route_class=OpenAiRoute, tags=["vLLM"])

TextOrPair = str | tuple[str, str]

_LABEL = record({"score": number(), "label": string()})
_ITEM = array(TEXT, minItems=1, maxItems=2)
PREDICT_FIELDS: dict[str, Schema] = {
    "inputs": either(
        TEXT,
        _ITEM,
        array(_ITEM, minItems=1),
        says="a text; a pair of texts [a, b]; or a batch, each item in a list of its own: [[a], [b, c]]."
        " A flat list of two texts is a pair, not a batch",
    ),
    "raw_scores": boolean("true: logits"),
    "function_to_apply": string("none: logits; or the model's own function (the hub's word for raw_scores)"),
    "top_k": integer("how many of the best labels to return; default: all", minimum=1),
    **TRUNCATION_FIELDS,
    "truncation_direction": TRUNCATION_SIDE,
    **INSTRUCTION_FIELDS,
}
CLASSIFY_FIELDS: dict[str, Schema] = {
    "input": either(
        TEXT,
        TOKEN_IDS,
        array(either(TEXT, TEXT_OBJECT, TOKEN_IDS), minItems=1),
        says="a text, a list of texts, or token ids of the model, flat or nested",
    ),
    **CHAT_FIELDS,
    "add_special_tokens": boolean("default: true, which texts need; false with messages"),
    "model": MODEL,
    **LOGIT_FIELDS,
    **TRUNCATION_FIELDS,
    "truncation_side": TRUNCATION_SIDE,
}


_LABELLED = (array(_LABEL), array(array(_LABEL)))
_CLASSIFIED = listing(
    record(
        {
            "index": COUNT,
            "label": string(),
            "probs": array(number()),
            "num_classes": integer(minimum=1),
        }
    )
)
REPLY_SCHEMAS = (*_LABELLED, _CLASSIFIED)


@router.post(
    "/predict",
    **documented(
        "Classify texts or pairs of texts",
        request={"inputs": [["I like it."], ["I like it.", "It is liked."]]},
        takes=body(PREDICT_FIELDS, ("inputs",)),
        reply=[
            [{"score": 0.9, "label": "yes"}, {"score": 0.1, "label": "no"}],
            [{"score": 0.8, "label": "yes"}, {"score": 0.2, "label": "no"}],
        ],
        answers=either(*_LABELLED),
    ),
)
async def predict(request: Request) -> Response:
    """Labels by falling score: one list for a text or a pair, a list of such lists for a batch."""
    pipeline = pipeline_of(request)
    return await answer(request, await read_fields(request, pipeline.config.max_body_bytes))


async def answer(request: Request, fields: Fields, *, nested: bool = False) -> Response:
    """The reply to a body of `/predict`; `nested`: a list of lists also for a lone input."""
    pipeline = pipeline_of(request)
    job = to_job(fields, pipeline)
    top_k = fields.integer("top_k", minimum=1)
    async with hangup_cancels(request):
        result = await pipeline.classify(job)
    rows = [row[:top_k] for row in label_scores(result, label_names(pipeline, result))]
    headers = result_headers(pipeline, result.usage)
    headers |= timing_headers(pipeline, result.usage, result.timings)
    return json_response(rows if nested or is_batch(fields.get("inputs")) else rows[0], headers)


@vllm_router.post(
    "/classify",
    **documented(
        "Classify texts, as vLLM does",
        request={"input": ["I like it.", "I do not."]},
        reply={
            "id": "classify-5d8c",
            "object": "list",
            "created": 1790000000,
            "model": "demo",
            "data": [{"index": 0, "label": "yes", "probs": [0.1, 0.9], "num_classes": 2}],
            "usage": {"prompt_tokens": 5, "total_tokens": 5},
        },
        takes=body(CLASSIFY_FIELDS, ("input",), ("messages",)),
        answers=_CLASSIFIED,
    ),
)
async def classify(request: Request) -> Response:
    """Scores of every label, in the model's own order, and the name of the best."""
    pipeline = pipeline_of(request)
    return await answer_vllm(request, await read_fields(request, pipeline.config.max_body_bytes))


async def answer_vllm(request: Request, fields: Fields) -> Response:
    """The reply to a body of `/classify`."""
    pipeline = pipeline_of(request)
    job = to_vllm_job(fields, pipeline)
    async with hangup_cancels(request):
        result = await pipeline.classify(job)
    body = listing_of("classify", pipeline.config, _vllm_rows(result, pipeline), result.usage)
    return json_response(body, result_headers(pipeline, result.usage))


def to_job(fields: Fields, pipeline: Pipeline) -> ClassifyJob:
    """The neutral job for a body of `/predict`."""
    config, activation = pipeline.config, pipeline.profile.score_activation
    function = fields.choice("function_to_apply", ("none", activation))  # the hub's word for it
    return ClassifyJob(
        inputs=read_texts_and_pairs(fields.require("inputs"), config.max_client_batch_size),
        input_field="inputs",
        deadline=deadline_for(config),
        truncation=read_truncation(fields, "truncation_direction"),
        raw_scores=fields.boolean("raw_scores") is True or function == "none",
        instruction=read_instruction(fields),
    )


def to_vllm_job(fields: Fields, pipeline: Pipeline) -> ClassifyJob:
    """The neutral job for a body of `/classify`."""
    config = pipeline.config
    check_model(fields, config)
    conversation = read_conversation(fields, "input")
    inputs: tuple[str | TokenIds, ...] = ()
    if conversation is None:
        if fields.boolean("add_special_tokens") is False:
            raise InvalidValue("`add_special_tokens` must be true or absent", "add_special_tokens")
        inputs = read_inputs(fields.require("input"), "input", config.max_client_batch_size, objects=True)
    return ClassifyJob(
        inputs=inputs,
        input_field="input" if conversation is None else "messages",
        deadline=deadline_for(config),
        truncation=read_truncation(fields, "truncation_side"),
        raw_scores=wants_logits(fields),
        conversation=conversation,
    )


def is_batch(value: JsonValue) -> bool:
    """Whether `inputs` holds lists; a flat list of two strings is one pair."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


def read_texts_and_pairs(value: JsonValue, limit: int) -> tuple[TextOrPair, ...]:
    """A text, a pair or a batch of both. Raises `EmptyInput` naming every item without any text."""
    if value == []:
        raise EmptyInput("`inputs` cannot be empty", "inputs")
    batch = value if isinstance(value, list) and is_batch(value) else None
    if batch is None:
        items = [_read_text_or_pair(value, "inputs")]
    else:
        check_batch_size(len(batch), limit)
        items = [_read_text_or_pair(item, f"inputs[{i}]") for i, item in enumerate(batch)]
    empty = [i for i, item in enumerate(items) if item in ("", ("", ""))]
    if empty:
        places = ", ".join("inputs" if batch is None else f"inputs[{i}]" for i in empty)
        raise EmptyInput(f"`inputs` cannot hold empty texts: {places}", "inputs")
    return tuple(items)


def _read_text_or_pair(value: JsonValue, place: str) -> TextOrPair:
    texts = value if isinstance(value, list) else [value]
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            refuse(f"{place}[{i}]" if isinstance(value, list) else place, "a string", text)
    match [str(text) for text in texts]:
        case [text]:
            return text
        case [first, second]:
            return first, second
    raise InvalidField(
        f"`{place}` must be one text or a pair, got a list of {len(texts)}: each item of a batch is a list"
        " of its own, [[a], [b], [c, d]]",
        place,
    )


def label_names(pipeline: Pipeline, result: ClassifyResult) -> tuple[str, ...]:
    """Names by position; numbered where the model's files do not name what the server gives."""
    labels, count = pipeline.profile.labels, result.logits.shape[1]
    return labels if len(labels) == count else tuple(f"LABEL_{i}" for i in range(count))


def label_scores(result: ClassifyResult, names: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Every input's labels with their scores, by falling logit."""
    orders = np.argsort(-result.logits, axis=1, kind="stable").tolist()
    return [
        [{"score": scores[at], "label": names[at]} for at in order]
        for scores, order in zip(result.scores.tolist(), orders, strict=True)
    ]


def _vllm_rows(result: ClassifyResult, pipeline: Pipeline) -> list[dict[str, Any]]:
    names = label_names(pipeline, result)
    best = result.logits.argmax(axis=1).tolist()
    return [
        {"index": i, "label": names[at], "probs": probs, "num_classes": len(names)}
        for i, (at, probs) in enumerate(zip(best, result.scores.tolist(), strict=True))
    ]
