"""What operators and clients ask about the server itself: health, model, metrics, documentation."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

from ivy_gateway import metrics
from ivy_gateway.errors import Unavailable
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.replica import ReplicaStatus
from ivy_gateway.routes import docs
from ivy_gateway.routes.docs import answered
from ivy_gateway.routes.handling import json_response, pipeline_of
from ivy_gateway.routes.render import OpenAiRoute, TeiRoute
from ivy_gateway.routes.schema import (
    COUNT,
    Schema,
    array,
    boolean,
    choice,
    either,
    integer,
    mapping,
    nullable,
    number,
    record,
    string,
)
from protos.tulip.v1 import inference_pb2 as pb

router = APIRouter(route_class=TeiRoute, tags=["Server"])
models_router = APIRouter(route_class=OpenAiRoute, tags=["Server"])

_STARTED = int(time.time())
_OUTPUT_NAMES = {
    pb.OUTPUT_OWN: "own",
    pb.OUTPUT_INT8: "int8",
    pb.OUTPUT_BITS: "bits",
    pb.OUTPUT_TOKENS: "tokens",
}
_TEI_POOLINGS = {"lasttoken": "last_token"}
_LABELS = record({"id2label": mapping(string()), "label2id": mapping(integer())})
_TEI_INFO: dict[str, Schema] = {
    "model_id": string(),
    "model_sha": nullable(string()),
    "model_dtype": string(),
    "served_model_name": string(),
    "model_type": either(
        record({"embedding": record({"pooling": string()})}),
        record({"reranker": _LABELS}),
        record({"classifier": _LABELS}),
    ),
    "max_concurrent_requests": COUNT,
    "max_input_length": COUNT,
    "max_batch_tokens": COUNT,
    "max_batch_requests": nullable(COUNT),
    "max_client_batch_size": COUNT,
    "auto_truncate": boolean(),
    "tokenization_workers": COUNT,
    "version": string(),
    "sha": nullable(string()),
    "docker_label": nullable(string()),
}
_OWN_INFO: dict[str, Schema] = {
    "embedding_space": string("moves exactly when vectors or scores may"),
    "dimensions": COUNT,
    "outputs": nullable(array(string())),
    "reference_cosine": nullable(number("of the server's self-test, where the model has one")),
    "pooling": nullable(string()),
    "pooling_source": nullable(string()),
    "normalize_default": nullable(boolean()),
    "score_kind": string("cosine, or the activation that scores are shown through"),
    "prompts": array(string()),
    "default_prompt_name": nullable(string()),
    "token_ids": string("the policy for token ids on /v1/embeddings"),
    "max_body_bytes": COUNT,
    "max_waiting_tokens": COUNT,
    "device": string(),
    "attention_backend": string(),
    "replicas": array(
        record(
            {
                "address": string(),
                "state": string(),
                "reason": nullable(string()),
                "outstanding_tokens": integer(),
            }
        )
    ),
}
_INFO = record(_TEI_INFO | _OWN_INFO)
_MODELS = record(
    {
        "object": choice("", "list"),
        "data": array(
            record(
                {
                    "id": string(),
                    "object": choice("", "model"),
                    "created": integer(),
                    "owned_by": string(),
                    "max_model_len": COUNT,
                }
            )
        ),
    }
)


@router.get("/", summary="Ready to serve", response_class=Response)
@router.get("/health", summary="Ready to serve", response_class=Response)
@router.get("/ping", summary="Ready to serve", response_class=Response)
@router.post("/ping", summary="Ready to serve", response_class=Response)
async def health(request: Request) -> Response:
    """200 while at least one replica makes progress, or could; 503 otherwise."""
    if request.app.state.drain.begun:
        raise Unavailable("unhealthy: the gateway is being stopped", retry_after=2.0)
    if not pipeline_of(request).pool.healthy:
        raise Unavailable("unhealthy: no inference server is ready", retry_after=2.0)
    return Response()


@router.get("/live", summary="The process lives", response_class=Response)
async def live(request: Request) -> Response:  # noqa: ARG001 - handlers take the request
    """200 as long as the process answers."""
    return Response()


@router.get("/info", **answered("What is served", _INFO))
async def info(request: Request) -> Response:
    """TEI's keys, and ours: pooling and its source, embedding space, replicas."""
    return json_response(describe(pipeline_of(request), request.app.version))


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def prometheus(request: Request) -> Response:  # noqa: ARG001 - handlers take the request
    """Counters and histograms in Prometheus' text format."""
    return Response(metrics.exposition(), media_type=metrics.CONTENT_TYPE)


@router.get("/version", **answered("Version of the gateway", record({"version": string()})))
async def version(request: Request) -> Response:
    """`{"version": string}`."""
    return json_response({"version": request.app.version})


@router.get("/api-doc/openapi.json", **answered("Every route, for programs", mapping({})))
async def openapi(request: Request) -> Response:
    """What `/openapi.json` says too, at TEI's address."""
    return json_response(request.app.openapi())


@router.get("/docs", summary="This page", response_class=HTMLResponse)
async def documentation(request: Request) -> Response:
    """Every route with an example."""
    return HTMLResponse(docs.page(request.app.openapi()))


@models_router.get("/v1/models", **answered("Served model names", _MODELS))
@models_router.get("/models", **answered("Served model names", _MODELS))
async def models(request: Request) -> Response:
    """The served name and its aliases."""
    pipeline = pipeline_of(request)
    data = [
        {
            "id": name,
            "object": "model",
            "created": _STARTED,
            "owned_by": "bouquet",
            "max_model_len": pipeline.profile.max_length,
        }
        for name in pipeline.config.model_names
    ]
    return json_response({"object": "list", "data": data})


def describe(pipeline: Pipeline, gateway_version: str) -> dict[str, Any]:
    """The body of `/info`. Raises `Unavailable` before the first replica has said what it serves."""
    served, config = pipeline.pool.description, pipeline.config
    limits = [pipeline.profile.max_length, *([served.max_length] if served.max_length else [])]
    tei = {
        "model_id": config.served_model_name,
        "model_sha": None,
        "model_dtype": served.dtype,
        "served_model_name": config.served_model_name,
        "model_type": _model_type(pipeline),
        "max_concurrent_requests": config.max_waiting_tokens,
        "max_input_length": min(limits),
        "max_batch_tokens": served.max_batch_tokens,
        "max_batch_requests": served.max_batch_sequences or None,
        "max_client_batch_size": config.max_client_batch_size,
        "auto_truncate": config.auto_truncate,
        "tokenization_workers": config.tokenizer_workers,
        "version": gateway_version,
        "sha": None,
        "docker_label": None,
    }
    return tei | _extras(pipeline)


def _model_type(pipeline: Pipeline) -> dict[str, Any]:
    served = pipeline.pool.description
    if served.task == pb.TASK_EMBED:
        return {"embedding": {"pooling": _TEI_POOLINGS.get(served.pooling, served.pooling)}}
    labels = pipeline.profile.labels or ("LABEL_0",)
    mapping = {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }
    return {"reranker" if served.dimensions == 1 else "classifier": mapping}


def _extras(pipeline: Pipeline) -> dict[str, Any]:
    served, profile, config = pipeline.pool.description, pipeline.profile, pipeline.config
    embeds = served.task == pb.TASK_EMBED
    return {
        "embedding_space": pipeline.embedding_space,
        "dimensions": served.dimensions,
        "outputs": [_OUTPUT_NAMES[output] for output in served.outputs] if embeds else None,
        "reference_cosine": served.reference_cosine if served.HasField("reference_cosine") else None,
        "pooling": served.pooling if embeds else None,
        "pooling_source": "the model's own files, read by the inference server" if embeds else None,
        "normalize_default": True if embeds else None,
        "score_kind": "cosine" if embeds else profile.score_activation,
        "prompts": sorted(profile.prompts),
        "default_prompt_name": profile.default_prompt_name,
        "token_ids": config.token_ids,
        "max_body_bytes": config.max_body_bytes,
        "max_waiting_tokens": config.max_waiting_tokens,
        "device": served.device,
        "attention_backend": served.attention_backend,
        "replicas": [_replica(status) for status in pipeline.pool.statuses()],
    }


def _replica(status: ReplicaStatus) -> dict[str, Any]:
    return {
        "address": status.address,
        "state": status.state.value,
        "reason": status.reason or None,
        "outstanding_tokens": status.outstanding_tokens,
    }
