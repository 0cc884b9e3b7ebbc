"""The rerank routes: TEI's list for `texts`; for `documents` the object of vLLM, Jina and Cohere.

Rows come back best first: by logit, equal ones in the order of the request (policy P6).
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from ivy_gateway.errors import InvalidField, InvalidValue
from ivy_gateway.jobs import Float32Array, ScoreJob, ScoreResult
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.routes.body import Fields, read_fields
from ivy_gateway.routes.docs import EITHER_PROBLEM, documented
from ivy_gateway.routes.handling import (
    check_model,
    deadline_for,
    hangup_cancels,
    json_response,
    pipeline_of,
    result_headers,
    timing_headers,
)
from ivy_gateway.routes.inputs import read_truncation, side_prompts
from ivy_gateway.routes.pairs import (
    INSTRUCTION_FIELDS,
    LIMIT_FIELDS,
    LOGIT_FIELDS,
    read_documents,
    read_instruction,
    read_query,
    wants_logits,
)
from ivy_gateway.routes.render import Family, OpenAiRoute, TeiRoute
from ivy_gateway.routes.schema import (
    COUNT,
    MODEL,
    SIDES,
    TEXT_OBJECT,
    TEXT_PART,
    TRUNCATION_FIELDS,
    TRUNCATION_SIDE,
    USAGE,
    Schema,
    array,
    body,
    boolean,
    choice,
    either,
    integer,
    mapping,
    number,
    record,
    string,
)

router = APIRouter(route_class=TeiRoute, tags=["Rerank"])
versioned_router = APIRouter(route_class=OpenAiRoute, tags=["Rerank"])

_SPELLINGS = ("documents", "texts")
_ECHO_FIELDS = ("return_documents", "return_text")
_QUESTION = {"query": "Which river passes Vienna?"}
_TEXTS = ["Bread needs yeast.", "The Danube."]
_OBJECT = {
    "id": "rerank-5d8c",
    "object": "rerank",
    "model": "demo",
    "created": 1790000000,
    "results": [
        {"index": 1, "relevance_score": 0.91, "document": {"text": "The Danube."}},
        {"index": 0, "relevance_score": 0.02, "document": {"text": "Bread needs yeast."}},
    ],
    "usage": {"prompt_tokens": 31, "total_tokens": 31},
    "meta": {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": 31, "output_tokens": 0},
    },
}
_DOCUMENT = either(
    string(),
    body({"text": string(), "content": array(TEXT_PART)}),
)
FIELDS: dict[str, Schema] = {
    "query": either(
        string(),
        TEXT_OBJECT,
        says="what to look for; a model that embeds has its own prompts put before query and documents",
    ),
    "documents": either(
        _DOCUMENT,
        array(_DOCUMENT, minItems=1),
        says="texts, objects with `text`, or with `content` as a list of text parts",
    ),
    "texts": either(_DOCUMENT, array(_DOCUMENT, minItems=1), says="the same, in TEI's word"),
    "model": MODEL,
    "top_n": integer("how many of the best to return; absent or 0: all", minimum=0),
    "return_documents": boolean("repeat the documents; default: see the route"),
    "return_text": boolean("the same, in TEI's word"),
    **LOGIT_FIELDS,
    **LIMIT_FIELDS,
    **TRUNCATION_FIELDS,
    "truncation_side": TRUNCATION_SIDE,
    "truncation_direction": choice("the same, in TEI's word", *SIDES),
    **INSTRUCTION_FIELDS,
    "rank_fields": array(string(), "fields of document objects to read instead of `text`"),
    "relevant_spans": mapping({}, "not supported"),
}
NEEDED = (("query", "documents"), ("query", "texts"))
_LIST = array(record({"index": COUNT, "score": number()}, optional={"text": string()}))
_RANKED = record(
    {"index": COUNT, "relevance_score": number()}, optional={"document": record({"text": string()})}
)
_META = record(
    {
        "api_version": record({"version": string()}),
        "billed_units": record({"search_units": COUNT}),
        "tokens": record({"input_tokens": COUNT, "output_tokens": COUNT}),
    }
)
_RERANKED = record(
    {
        "id": string(),
        "object": choice("", "rerank"),
        "model": string(),
        "created": integer(),
        "results": array(_RANKED),
        "usage": USAGE,
        "meta": _META,
    }
)


REPLY_SCHEMAS = (_LIST, _RERANKED)


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """A rerank body: what to score, and what its reply shows."""

    job: ScoreJob
    documents: tuple[str, ...]
    top_n: int | None  # `None`: all
    echo: bool  # repeat the documents in the reply

    @classmethod
    def read(cls, fields: Fields, pipeline: Pipeline, *, echo: bool) -> RerankRequest:
        """Read a body of any dialect; `echo` is the route's default."""
        if "relevant_spans" in fields:
            raise InvalidValue("`relevant_spans` is not supported", "relevant_spans")
        job, documents = _read_job(fields, pipeline)
        shown = [value for name in _ECHO_FIELDS if (value := fields.boolean(name)) is not None]
        return cls(
            job=job,
            documents=documents,
            top_n=fields.integer("top_n", minimum=0) or None,
            echo=shown[0] if shown else echo,
        )


@router.post(
    "/rerank",
    **documented(
        "Sort texts by relevance",
        request=_QUESTION | {"texts": _TEXTS, "return_text": True},
        takes=body(FIELDS, *NEEDED, says="with `texts` the reply is a list; with `documents` an object"),
        reply=[
            {"index": 1, "score": 0.91, "text": "The Danube."},
            {"index": 0, "score": 0.02, "text": "Bread needs yeast."},
        ],
        answers=either(*REPLY_SCHEMAS),
        problem=EITHER_PROBLEM,
    ),
)
async def rerank(request: Request) -> Response:
    """A list of index and score for `texts`, which are repeated on request; an object for `documents`."""
    pipeline = pipeline_of(request)
    return await answer(request, await read_fields(request, pipeline.config.max_body_bytes))


@versioned_router.post(
    "/v1/rerank",
    **documented(
        "Sort documents by relevance",
        request=_QUESTION | {"documents": _TEXTS, "top_n": 2},
        takes=body(FIELDS, *NEEDED),
        reply=_OBJECT,
        answers=_RERANKED,
    ),
)
async def rerank_v1(request: Request) -> Response:
    """Documents are repeated unless `return_documents` is false. `texts` is `documents` too."""
    pipeline = pipeline_of(request)
    fields = await read_fields(request, pipeline.config.max_body_bytes)
    return await _answer_object(request, fields, echo=True)


@versioned_router.post(
    "/v2/rerank",
    **documented(
        "Sort documents by relevance, as Cohere's v2 does",
        request=_QUESTION | {"documents": _TEXTS, "top_n": 2, "return_documents": True},
        takes=body(FIELDS, *NEEDED),
        reply=_OBJECT,
        answers=_RERANKED,
    ),
)
async def rerank_v2(request: Request) -> Response:
    """Documents are repeated only where `return_documents` is true."""
    pipeline = pipeline_of(request)
    fields = await read_fields(request, pipeline.config.max_body_bytes)
    return await _answer_object(request, fields, echo=False)


async def answer(request: Request, fields: Fields) -> Response:
    """The reply to a body of `/rerank`, in the dialect of its keys."""
    if "documents" in fields:
        request.state.family = Family.O
        return await _answer_object(request, fields, echo=True)
    return await _answer_list(request, fields)


async def _answer_list(request: Request, fields: Fields) -> Response:
    pipeline = pipeline_of(request)
    asked = RerankRequest.read(fields, pipeline, echo=False)
    async with hangup_cancels(request):
        result = await pipeline.score(asked.job)
    return json_response(
        [
            {"index": row, "score": score} | ({"text": asked.documents[row]} if asked.echo else {})
            for row, score in best(result, asked.top_n)
        ],
        result_headers(pipeline, result.usage) | timing_headers(pipeline, result.usage, result.timings),
    )


async def _answer_object(request: Request, fields: Fields, *, echo: bool) -> Response:
    pipeline = pipeline_of(request)
    check_model(fields, pipeline.config)
    asked = RerankRequest.read(fields, pipeline, echo=echo)
    async with hangup_cancels(request):
        result = await pipeline.score(asked.job)
    return json_response(_rerank_object(asked, result, pipeline), result_headers(pipeline, result.usage))


def best(result: ScoreResult, top_n: int | None) -> list[tuple[int, float]]:
    """Index and shown score of the best rows, best first; all of them when `top_n` is `None`."""
    rows = ranking(result.logits)[:top_n]
    return list(zip(rows, result.scores[rows].tolist(), strict=True))


def ranking(logits: Float32Array) -> list[int]:
    """Indexes by falling logit, equal ones in order."""
    rows: list[int] = np.argsort(-logits, kind="stable").tolist()
    return rows


def _read_job(fields: Fields, pipeline: Pipeline) -> tuple[ScoreJob, tuple[str, ...]]:
    config, query = pipeline.config, read_query(fields)
    name = _documents_field(fields)
    documents = read_documents(fields, name, config.max_client_batch_size)
    side_field = fields.one_of("truncation_side", "truncation_direction") or "truncation_side"
    job = ScoreJob(
        pairs=tuple((query, document) for document in documents),
        joined=(),
        input_fields=("query", name),
        deadline=deadline_for(config),
        truncation=read_truncation(fields, side_field),
        raw_scores=wants_logits(fields),
        max_tokens_per_query=fields.integer("max_tokens_per_query", minimum=0) or None,
        max_tokens_per_document=fields.integer("max_tokens_per_doc", minimum=0) or None,
        instruction=read_instruction(fields),
        prompt_names=side_prompts(pipeline.profile),
    )
    return job, documents


def _documents_field(fields: Fields) -> str:
    given = [name for name in _SPELLINGS if name in fields]
    if not given:
        raise InvalidField("`documents` is required (or `texts`)", "documents")
    if len(given) > 1:
        raise InvalidValue("`documents` and `texts` mean the same: give one of them", "texts")
    return given[0]


def _rerank_object(asked: RerankRequest, result: ScoreResult, pipeline: Pipeline) -> dict[str, Any]:
    num_tokens = result.usage.num_tokens
    return {
        "id": f"rerank-{secrets.token_hex(12)}",
        "object": "rerank",
        "model": pipeline.config.served_model_name,
        "created": int(time.time()),
        "results": [
            {"index": row, "relevance_score": score}
            | ({"document": {"text": asked.documents[row]}} if asked.echo else {})
            for row, score in best(result, asked.top_n)
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": num_tokens, "output_tokens": 0},
        },
    }
