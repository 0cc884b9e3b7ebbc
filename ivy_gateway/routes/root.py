"""`POST /` and `/invocations`: whatever the body asks for, as TEI, the hub's client and SageMaker do."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ivy_gateway.pipeline import Pipeline
from ivy_gateway.routes import classify, rerank, similarity, tei
from ivy_gateway.routes.body import Fields, read_fields
from ivy_gateway.routes.docs import documented
from ivy_gateway.routes.handling import hangup_cancels, pipeline_of
from ivy_gateway.routes.render import TeiRoute

router = APIRouter(route_class=TeiRoute, tags=["TEI"])

_DOCUMENTATION = documented(
    "What the body asks for",
    request={"inputs": "What is a ferry?"},
    reply=[[0.0123, -0.0456]],
    fields={
        "query": "with `texts` or `documents`: as /rerank",
        "inputs": "an object: as /similarity; else as /embed or /predict, by what the model does",
        "parameters": "further fields of the route; where given, /predict always replies with nested lists",
        "options": "ignored",
    },
)


@router.post("/", **_DOCUMENTATION)
@router.post("/invocations", **_DOCUMENTATION)
async def infer(request: Request) -> Response:
    """The reply of `/rerank`, `/similarity`, `/embed` or `/predict`."""
    pipeline = pipeline_of(request)
    fields = await read_fields(request, pipeline.config.max_body_bytes)
    if "query" in fields:
        return await rerank.answer(request, fields.over(fields.object("parameters")))
    if isinstance(fields.get("inputs"), dict):
        return await similarity.answer(request, fields)
    if pipeline.embeds:
        return await _embed(request, fields.over(fields.object("parameters")), pipeline)
    with_parameters = fields.over(fields.object("parameters"))
    return await classify.answer(request, with_parameters, nested="parameters" in fields)


async def _embed(request: Request, fields: Fields, pipeline: Pipeline) -> Response:
    job = tei.to_job(fields, pipeline)
    async with hangup_cancels(request):
        result = await pipeline.embed(job)
    return tei.from_result(result, pipeline)
