"""Perplexity's routes, under a base path of their own: there the default encoding is codes, not floats."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ivy_gateway.routes import encodings, openai
from ivy_gateway.routes.body import Fields, read_fields
from ivy_gateway.routes.docs import documented
from ivy_gateway.routes.encodings import Listed
from ivy_gateway.routes.handling import hangup_cancels, pipeline_of
from ivy_gateway.routes.render import OpenAiRoute
from ivy_gateway.routes.schema import body, choice, string

router = APIRouter(route_class=OpenAiRoute, tags=["Perplexity"])

_ENCODINGS = {"base64_int8": encodings.BASE64_INT8, "base64_binary": encodings.BASE64_BINARY}


@router.post(
    "/perplexity/v1/embeddings",
    **documented(
        "Embed texts, as Perplexity does",
        request={"input": ["What is a ferry?"], "encoding_format": "base64_binary"},
        takes=body(
            openai.FIELDS
            | {
                "model": string(
                    "absent, or a served name: Perplexity's own client sends names like pplx-embed-v1-0.6b,"
                    " which the server must have as aliases"
                ),
                "encoding_format": choice(
                    "base64_int8 (default; of models that quantise): a signed byte per dimension;"
                    " base64_binary: signs, the first dimension in the least significant bit",
                    *_ENCODINGS,
                ),
            },
            ("input",),
            ("messages",),
        ),
        reply={
            "id": "embd-5d8c",
            "object": "list",
            "created": 1790000000,
            "data": [{"object": "embedding", "index": 0, "embedding": "pQ=="}],
            "model": "demo",
            "usage": {"prompt_tokens": 7, "total_tokens": 7},
        },
        answers=openai.REPLY,
    ),
)
async def embeddings(request: Request) -> Response:
    """One vector per input, as base64 of codes or of signs; never scaled to length 1."""
    pipeline = pipeline_of(request)
    fields = await read_fields(request, pipeline.config.max_body_bytes)
    wanted = read_encoding(fields)
    job = openai.to_job(fields, pipeline)
    async with hangup_cancels(request):
        results = await pipeline.embed_as(job, wanted.outputs)
    return openai.from_results(results, wanted, pipeline)


def read_encoding(fields: Fields) -> Listed:
    """How vectors are to be written: one of the two ways, and codes by default."""
    name = fields.choice("encoding_format", tuple(_ENCODINGS)) or "base64_int8"
    return Listed({name: _ENCODINGS[name]})
