"""vLLM's score route, also under the names that later clients made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from ivy_gateway.errors import EmptyInput, InvalidField, InvalidValue
from ivy_gateway.jobs import ScoreJob, ScoreResult, TokenIds
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.routes.body import Fields, JsonValue, read_fields, refuse
from ivy_gateway.routes.docs import documented
from ivy_gateway.routes.handling import (
    check_model,
    deadline_for,
    hangup_cancels,
    json_response,
    listing_of,
    pipeline_of,
    result_headers,
)
from ivy_gateway.routes.inputs import (
    check_batch_size,
    read_texts,
    read_token_ids,
    read_truncation,
    side_prompts,
)
from ivy_gateway.routes.pairs import (
    INSTRUCTION_FIELDS,
    LIMIT_FIELDS,
    LOGIT_FIELDS,
    read_instruction,
    refuse_blank,
    wants_logits,
)
from ivy_gateway.routes.render import OpenAiRoute
from ivy_gateway.routes.schema import (
    MODEL,
    TEXT_OBJECT,
    TOKEN_IDS,
    TRUNCATION_FIELDS,
    TRUNCATION_SIDE,
    Schema,
    array,
    body,
    either,
    indexed,
    integer,
    listing,
    number,
    string,
)

router = APIRouter(route_class=OpenAiRoute, tags=["vLLM"])

PAIR_FIELDS = (
    ("query", "documents"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
)
_OTHER_SIDES = {
    name: [other for pair in PAIR_FIELDS if name in pair for other in pair if other != name]
    for name in dict.fromkeys(name for pair in PAIR_FIELDS for name in pair)
}
_QUERY_FIELDS = ("query", "queries")  # the others' two sides are alike
_SIDE = either(string(), array(either(string(), TEXT_OBJECT), minItems=1))
FIELDS: dict[str, Schema] = {
    **{
        name: _SIDE
        | {
            "description": f"one side of the pairs, with `{'` or `'.join(others)}`: one against one,"
            " one against many, or as many against as many"
        }
        for name, others in _OTHER_SIDES.items()
    },
    "input_ids": either(
        array(TOKEN_IDS, minItems=1),
        array(array(TOKEN_IDS, minItems=2, maxItems=2), minItems=1),
        says="instead: ready-joined sequences [[id]], or pairs [[[id], [id]]] without special tokens",
    ),
    "token_type_ids": array(array(integer(minimum=0)), "segment ids of ready-joined sequences"),
    "model": MODEL,
    **LOGIT_FIELDS,
    **TRUNCATION_FIELDS,
    "truncation_side": TRUNCATION_SIDE,
    **LIMIT_FIELDS,
    **INSTRUCTION_FIELDS,
}
NEEDED = (*PAIR_FIELDS, ("input_ids",))
FIRST_SIDES = tuple(dict.fromkeys(names[0] for names in NEEDED))
REPLY = listing(indexed("score", {"score": number()}))
_DOCUMENTATION = documented(
    "Score pairs of texts",
    request={"query": "Which river passes Vienna?", "documents": ["The Danube.", "Bread needs yeast."]},
    takes=body(FIELDS, *NEEDED),
    reply={
        "id": "score-5d8c",
        "object": "list",
        "created": 1790000000,
        "data": [
            {"index": 0, "object": "score", "score": 0.91},
            {"index": 1, "object": "score", "score": 0.02},
        ],
        "model": "demo",
        "usage": {"prompt_tokens": 31, "total_tokens": 31},
    },
    answers=REPLY,
)

Pair = tuple[str | TokenIds, str | TokenIds]


@router.post("/score", **_DOCUMENTATION)
@router.post("/v1/score", **_DOCUMENTATION)
async def score(request: Request) -> Response:
    """One score per pair, in the order of the request."""
    pipeline = pipeline_of(request)
    return await answer(request, await read_fields(request, pipeline.config.max_body_bytes))


async def answer(request: Request, fields: Fields) -> Response:
    """The reply to a body of `/score`."""
    pipeline = pipeline_of(request)
    job = to_job(fields, pipeline)
    async with hangup_cancels(request):
        result = await pipeline.score(job)
    return from_result(result, pipeline)


def to_job(fields: Fields, pipeline: Pipeline) -> ScoreJob:
    """The neutral job for a score body."""
    config = pipeline.config
    check_model(fields, config)
    names, pairs, joined = _read_sequences(fields, config.max_client_batch_size)
    return ScoreJob(
        pairs=pairs,
        joined=joined,
        input_fields=names,
        deadline=deadline_for(config),
        truncation=read_truncation(fields, "truncation_side"),
        raw_scores=wants_logits(fields),
        max_tokens_per_query=fields.integer("max_tokens_per_query", minimum=0) or None,
        max_tokens_per_document=fields.integer("max_tokens_per_doc", minimum=0) or None,
        instruction=read_instruction(fields),
        prompt_names=side_prompts(pipeline.profile) if names[0] in _QUERY_FIELDS else (None, None),
    )


def _read_sequences(
    fields: Fields, limit: int
) -> tuple[tuple[str, str], tuple[Pair, ...], tuple[TokenIds, ...]]:
    """Names of the two sides, pairs, ready-joined sequences; one of the latter two is empty."""
    if "input_ids" in fields:
        pairs, joined = _read_input_ids(fields, limit)
        return ("input_ids", "input_ids"), pairs, joined
    for names in PAIR_FIELDS:
        if names[0] in fields and names[1] in fields:
            return names, _read_pairs(fields, names, limit), ()
    spellings = "; ".join(f"`{left}` and `{right}`" for left, right in PAIR_FIELDS)
    raise InvalidField(f"the two sides to score are missing: give {spellings}; or `input_ids`")


def _read_pairs(fields: Fields, names: tuple[str, str], limit: int) -> tuple[Pair, ...]:
    left, right = (read_texts(fields.get(name), name, limit) for name in names)
    refuse_blank(left, names[0])
    if len(left) == 1:
        return tuple((left[0], text) for text in right)
    if len(left) != len(right):
        raise InvalidValue(
            f"`{names[0]}` has {len(left)} items and `{names[1]}` {len(right)}: give one against any number,"
            " or as many as there are",
            names[1],
        )
    return tuple(zip(left, right, strict=True))


def _read_input_ids(fields: Fields, limit: int) -> tuple[tuple[Pair, ...], tuple[TokenIds, ...]]:
    items = _as_list(fields.get("input_ids"), "input_ids")
    check_batch_size(len(items), limit)
    if isinstance(items[0], list) and items[0] and isinstance(items[0][0], list):
        if "token_type_ids" in fields:
            raise InvalidValue("`token_type_ids` goes with ready-joined sequences only", "token_type_ids")
        return tuple(_read_id_pair(item, f"input_ids[{i}]") for i, item in enumerate(items)), ()
    segments = _read_segments(fields, len(items))
    return (), tuple(read_token_ids(item, f"input_ids[{i}]", segments[i]) for i, item in enumerate(items))


def _read_segments(fields: Fields, count: int) -> Sequence[JsonValue]:
    if "token_type_ids" not in fields:
        return [None] * count
    segments = _as_list(fields.get("token_type_ids"), "token_type_ids")
    if len(segments) != count:
        raise InvalidValue(
            f"`token_type_ids` has {len(segments)} sequences where `input_ids` has {count}", "token_type_ids"
        )
    return segments


def _read_id_pair(item: JsonValue, place: str) -> Pair:
    if not isinstance(item, list) or len(item) != 2:
        raise InvalidField(f"`{place}` must be a pair of lists of token ids", place)
    return read_token_ids(item[0], f"{place}[0]"), read_token_ids(item[1], f"{place}[1]")


def _as_list(value: JsonValue, name: str) -> list[JsonValue]:
    if not isinstance(value, list):
        refuse(name, "a list", value)
    if not value:
        raise EmptyInput(f"`{name}` cannot be empty", name)
    return value


def from_result(result: ScoreResult, pipeline: Pipeline) -> Response:
    """vLLM's list of scores, in input order."""
    data: list[dict[str, Any]] = [
        {"index": i, "object": "score", "score": value} for i, value in enumerate(result.scores.tolist())
    ]
    body = listing_of("score", pipeline.config, data, result.usage)
    return json_response(body, result_headers(pipeline, result.usage))
