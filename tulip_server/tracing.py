"""One OpenTelemetry span for each chunk, a child of the span that sent it; exported from a thread of its own.

Needs the packages of the extra `tracing`; without `--otlp-endpoint` none of them is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from tulip_server.chunk import ChunkResult, PendingChunk
from tulip_server.daemon import on_daemon_thread
from tulip_server.errors import ChunkError, StartupError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

_EXPORT_SECONDS = 5.0  # for one request to the collector, and for the last one when the server ends
_TRACES_PATH = "/v1/traces"


class SpanRecorder:
    """Turns chunks that have ended into spans. `now` is the clock of their times."""

    def __init__(self, provider: TracerProvider, now: Callable[[], float]) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("tulip_server")
        self._propagator = TraceContextTextMapPropagator()
        self._now = now

    def record(
        self, chunk: PendingChunk, request_id: str, traceparent: str, end: ChunkResult | ChunkError
    ) -> None:
        """A chunk has ended: its span, from arrival to now, with the dispatch of its last sequence in it."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        now_ns = time.time_ns()
        arrived_ns = now_ns - round(1e9 * (self._now() - chunk.arrival))
        span = self._tracer.start_span(
            "infer chunk",
            context=self._propagator.extract({"traceparent": traceparent}),
            kind=SpanKind.SERVER,
            attributes={
                "request.id": request_id,
                "tulip.lane": chunk.lane.value,
                "tulip.sequences": len(chunk.sequences),
            },
            start_time=arrived_ns,
        )
        if isinstance(end, ChunkResult):
            dispatched_ns = arrived_ns + round(1e9 * end.queue_seconds)
            span.add_event("dispatched", {"queue_seconds": end.queue_seconds}, dispatched_ns)
            computed_ns = dispatched_ns + round(1e9 * end.compute_seconds)
            span.add_event("computed", {"compute_seconds": end.compute_seconds}, computed_ns)
        else:
            span.set_status(Status(StatusCode.ERROR, end.outcome))
        span.end(now_ns)


@contextlib.asynccontextmanager
async def tracing(endpoint: str | None, now: Callable[[], float]) -> AsyncIterator[SpanRecorder | None]:
    """Export spans to the collector at `endpoint`, by OTLP over HTTP, while the context lasts.

    Gives `None` where nobody asked. Raises `StartupError` where the packages are not installed.
    """
    if endpoint is None:
        yield None
        return
    provider = _provider(endpoint)
    try:
        yield SpanRecorder(provider, now)
    finally:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(on_daemon_thread(provider.shutdown, "tracing"), _EXPORT_SECONDS)


def _provider(endpoint: str) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise StartupError(
            f"--otlp-endpoint needs the packages of the extra 'tracing': {error.name} is not installed"
        ) from error
    url = endpoint if endpoint.endswith(_TRACES_PATH) else endpoint.rstrip("/") + _TRACES_PATH
    provider = TracerProvider(resource=Resource.create({"service.name": "tulip"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=_EXPORT_SECONDS)))
    log.info("spans go to %s", url)
    return provider
