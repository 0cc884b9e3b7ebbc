"""`POST /` and `/invocations`: whatever the body asks for, as TEI, vLLM and the hub's client have it."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ivy_gateway.pipeline import Pipeline
from ivy_gateway.routes import classify, openai, pooling, rerank, similarity, tei, vllm
from ivy_gateway.routes.body import Fields, read_fields
from ivy_gateway.routes.docs import EITHER_PROBLEM, documented
from ivy_gateway.routes.handling import hangup_cancels, pipeline_of
from ivy_gateway.routes.pairs import INSTRUCTION_FIELDS
from ivy_gateway.routes.render import Family, TeiRoute
from ivy_gateway.routes.schema import VECTOR, Schema, array, body, either, mapping

router = APIRouter(route_class=TeiRoute, tags=["TEI", "vLLM"])

_OPENAI_FIELDS = ("input", "messages")
_FIELDS: dict[str, Schema] = (
    pooling.FIELDS
    | vllm.FIELDS
    | classify.PREDICT_FIELDS
    | rerank.FIELDS
    | openai.FIELDS
    | tei.EMBED_FIELDS
    | {
        "inputs": either(
            *tei.EMBED_FIELDS["inputs"]["anyOf"],
            *classify.PREDICT_FIELDS["inputs"]["anyOf"],
            similarity.FIELDS["inputs"],
            says="TEI's word. An object: as /similarity; else as /embed or /predict, by what the model does",
        ),
        "input": openai.FIELDS["input"]
        | {"description": "OpenAI's word: as /v1/embeddings, /classify, or, with `task`, /pooling"},
        "query": rerank.FIELDS["query"] | {"description": "with `texts` or `documents`: as /rerank"},
        "task": pooling.FIELDS["task"]
        | {"description": "with `input`: as /pooling, where it is one of its own"},
        "parameters": body(
            tei.EMBED_FIELDS | classify.PREDICT_FIELDS,
            says="further fields of TEI's routes; where given, /predict always replies with nested lists",
        ),
        "chat_template_kwargs": INSTRUCTION_FIELDS["chat_template_kwargs"],
        "options": mapping({}, "ignored"),
    }
)
_DOCUMENTATION = documented(
    "What the body asks for",
    request={"inputs": "What is a ferry?"},
    takes=body(_FIELDS, ("inputs",), *((name,) for name in _OPENAI_FIELDS), *rerank.NEEDED, *vllm.NEEDED),
    reply=[[0.0123, -0.0456]],
    answers=either(
        array(VECTOR),
        similarity.REPLY,
        *classify.REPLY_SCHEMAS,
        *rerank.REPLY_SCHEMAS,
        openai.REPLY,
        pooling.REPLY,
        vllm.REPLY,
    ),
    octets=True,
    problem=EITHER_PROBLEM,
)


@router.post("/", **_DOCUMENTATION)
@router.post("/invocations", **_DOCUMENTATION)
async def infer(request: Request) -> Response:
    """The reply of `/rerank`, `/score`, `/similarity`, `/embed`, `/predict`, or of a route for `input`."""
    pipeline = pipeline_of(request)
    fields = await read_fields(request, pipeline.config.max_body_bytes)
    if "query" in fields:
        return await rerank.answer(request, fields.over(fields.object("parameters")))
    if "inputs" not in fields and _speaks_vllm(fields):
        request.state.family = Family.O
        return await _answer_vllm(request, fields, pipeline)
    return await _answer_tei(request, fields, pipeline)


def _speaks_vllm(fields: Fields) -> bool:
    return fields.one_of(*_OPENAI_FIELDS, *vllm.FIRST_SIDES) is not None


async def _answer_vllm(request: Request, fields: Fields, pipeline: Pipeline) -> Response:
    """In vLLM's order: embeddings or classes for `input`, then scores; pooling where its `task` says so."""
    if fields.one_of(*_OPENAI_FIELDS) is None:
        return await vllm.answer(request, fields)
    if fields.get("task") in pooling.TASKS:
        return await pooling.answer(request, fields)
    return await (openai.answer if pipeline.embeds else classify.answer_vllm)(request, fields)


async def _answer_tei(request: Request, fields: Fields, pipeline: Pipeline) -> Response:
    if isinstance(fields.get("inputs"), dict):
        return await similarity.answer(request, fields)
    with_parameters = fields.over(fields.object("parameters"))
    if pipeline.embeds:
        return await _embed(request, with_parameters, pipeline)
    return await classify.answer(request, with_parameters, nested="parameters" in fields)


async def _embed(request: Request, fields: Fields, pipeline: Pipeline) -> Response:
    job = tei.to_job(fields, pipeline)
    async with hangup_cancels(request):
        result = await pipeline.embed(job)
    return tei.from_result(result, pipeline)
