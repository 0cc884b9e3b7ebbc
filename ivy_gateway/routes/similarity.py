"""TEI's `/similarity`: the cosine of one sentence with each of several."""

from __future__ import annotations

import numpy as np
from fastapi import APIRouter, Request, Response

from ivy_gateway import scoring
from ivy_gateway.errors import InvalidField
from ivy_gateway.jobs import EmbedJob
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.routes.body import Fields, read_fields
from ivy_gateway.routes.docs import documented
from ivy_gateway.routes.handling import (
    deadline_for,
    hangup_cancels,
    json_response,
    pipeline_of,
    result_headers,
    timing_headers,
)
from ivy_gateway.routes.inputs import check_batch_size, read_nonempty_texts, read_prompt_name, read_truncation
from ivy_gateway.routes.render import TeiRoute
from ivy_gateway.routes.schema import TEXT, Schema, array, body, number
from ivy_gateway.routes.tei import EMBED_FIELDS

router = APIRouter(route_class=TeiRoute, tags=["TEI"])

REPLY = array(number())
_COMPARED = {"source_sentence": TEXT, "sentences": array(TEXT, minItems=1)}
_PARAMETERS = {
    name: EMBED_FIELDS[name]
    for name in ("truncate", "truncate_prompt_tokens", "truncation_direction", "prompt_name", "input_type")
}
FIELDS: dict[str, Schema] = {
    "inputs": body(
        _COMPARED,
        ("source_sentence", "sentences"),
        says="`source_sentence`, and `sentences` to compare it with",
    ),
    "parameters": body(_PARAMETERS, says="as on /embed"),
}


@router.post(
    "/similarity",
    **documented(
        "Compare a sentence with others",
        request={"inputs": {"source_sentence": "A ferry.", "sentences": ["A ship.", "Bread needs yeast."]}},
        takes=body(FIELDS, ("inputs",)),
        reply=[0.71, 0.05],
        answers=REPLY,
    ),
)
async def similarity(request: Request) -> Response:
    """One cosine per sentence, in order."""
    pipeline = pipeline_of(request)
    return await answer(request, await read_fields(request, pipeline.config.max_body_bytes))


async def answer(request: Request, fields: Fields) -> Response:
    """The reply to a body of `/similarity`."""
    pipeline = pipeline_of(request)
    job = to_job(fields, pipeline)
    async with hangup_cancels(request):
        result = await pipeline.embed(job)
    source_1D, others_ND = result.vectors[:1], result.vectors[1:]
    cosines_N = scoring.cosine(np.broadcast_to(source_1D, others_ND.shape), others_ND)
    headers = result_headers(pipeline, result.usage)
    headers |= timing_headers(pipeline, result.usage, result.timings)
    return json_response(cosines_N, headers)


def to_job(fields: Fields, pipeline: Pipeline) -> EmbedJob:
    """The neutral job for a body of `/similarity`: the source sentence, then the others."""
    config = pipeline.config
    fields.require("inputs")
    inputs, parameters = fields.object("inputs"), fields.object("parameters")
    source = inputs.text("source_sentence")
    if source is None:
        raise InvalidField("`inputs.source_sentence` is required", "inputs.source_sentence")
    if not isinstance(inputs.get("sentences"), list):
        raise InvalidField("`inputs.sentences` must be a list of strings", "inputs.sentences")
    (source,) = read_nonempty_texts(source, "inputs.source_sentence", 1)
    sentences = read_nonempty_texts(inputs.get("sentences"), "inputs.sentences", config.max_client_batch_size)
    check_batch_size(1 + len(sentences), config.max_client_batch_size)
    return EmbedJob(
        inputs=(source, *sentences),
        input_field="inputs",
        deadline=deadline_for(config),
        truncation=read_truncation(parameters, "truncation_direction"),
        prompt_name=read_prompt_name(parameters, pipeline.profile, "input_type"),
    )
