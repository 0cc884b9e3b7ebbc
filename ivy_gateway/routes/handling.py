"""What handlers of every dialect share: the pipeline, the deadline, hang-ups, model names, reply headers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import orjson
from fastapi import Request, Response

from ivy_gateway import metrics
from ivy_gateway.config import GatewayConfig
from ivy_gateway.errors import UnknownModel
from ivy_gateway.jobs import PhaseTimings, Usage
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.routes.body import Fields
from ivy_gateway.routes.render import JSON, ClientGone

_WATCH_AFTER_SECONDS = 0.01


def pipeline_of(request: Request) -> Pipeline:
    """The pipeline that the application was started with."""
    pipeline: Pipeline = request.app.state.pipeline
    return pipeline


def deadline_for(config: GatewayConfig) -> float:
    """When a request that arrives now is given up, on the event loop's clock."""
    return asyncio.get_running_loop().time() + config.request_timeout


class hangup_cancels:  # noqa: N801 - used as a function
    """Cancel the block when the client hangs up; it ends with `ClientGone` then.

    The connection is looked at from a while after the start on: most requests are done before, and need no
    task for it.
    """

    __slots__ = ("_request", "_starter", "_task", "_watcher")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._starter = task.get_loop().call_later(_WATCH_AFTER_SECONDS, self._watch)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._starter.cancel()
        watcher = self._watcher
        if watcher is None:
            return
        hung_up = watcher.done() and not watcher.cancelled()
        watcher.cancel()
        if kind is asyncio.CancelledError and hung_up and self._task.uncancel() == 0:
            raise ClientGone from None

    def _watch(self) -> None:
        self._watcher = asyncio.create_task(self._cancel_at_hangup())

    async def _cancel_at_hangup(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._task.cancel()


def check_model(fields: Fields, config: GatewayConfig) -> None:
    """Raise `UnknownModel` for a model name that is not served; absent is fine."""
    model = fields.text("model")
    if model is not None and model not in config.model_names:
        served = ", ".join(config.model_names)
        raise UnknownModel(f"the model {model[:200]!r} is not served here; served: {served}", "model")


def result_headers(pipeline: Pipeline, usage: Usage) -> dict[str, str]:
    """Headers of every inference reply: what was cut, and in which space the vectors lie."""
    return {
        "x-truncated-inputs": str(usage.num_truncated),
        "x-embedding-space": pipeline.embedding_space,
    }


def timing_headers(pipeline: Pipeline, usage: Usage, timings: PhaseTimings) -> dict[str, str]:
    """Milliseconds and counts, all integers, under TEI's names."""
    on_gpu = pipeline.pool.description.device.startswith("cuda")
    return {
        "x-compute-type": "gpu+optimized" if on_gpu else "cpu",
        "x-compute-time": _milliseconds(timings.total),
        "x-compute-characters": str(usage.num_characters),
        "x-compute-tokens": str(usage.num_tokens),
        "x-total-time": _milliseconds(timings.total),
        "x-tokenization-time": _milliseconds(timings.tokenize),
        "x-queue-time": _milliseconds(timings.queue),
        "x-inference-time": _milliseconds(timings.inference),
    }


def _milliseconds(seconds: float) -> str:
    return str(int(1000 * seconds))


def listing_of(kind: str, config: GatewayConfig, data: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    """The envelope that OpenAI's and vLLM's list replies share; `kind` prefixes the id."""
    return {
        "id": f"{kind}-{os.urandom(12).hex()}",
        "object": "list",
        "created": int(time.time()),
        "model": config.served_model_name,
        "data": data,
        "usage": {"prompt_tokens": usage.num_tokens, "total_tokens": usage.num_tokens},
    }


def json_response(content: object, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
    """`content`, numpy arrays included, as JSON."""
    began = time.perf_counter()
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    metrics.phase_ended("encode", time.perf_counter() - began)
    return _JsonResponse(body, headers)


class _JsonResponse(Response):
    """JSON that is written already, under `headers` that say nothing of the body itself.

    The framework's own looks for that among them, which takes longer than all else here.
    """

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        self.status_code, self.background, self.body = 200, None, body
        self.raw_headers = [
            *((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()),
            (b"content-length", b"%d" % len(body)),
            (b"content-type", JSON.encode("latin-1")),
        ]
