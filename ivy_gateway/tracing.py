"""OpenTelemetry spans: one for each request, and within it one for its tokenization and each of its chunks.

Needs the packages of the extra `tracing`; without `--otlp-endpoint` none of them is imported, and a span is
one look at a variable. The trace that a client names is passed on to servers either way.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ivy_gateway import request_context
from ivy_gateway.errors import StartupError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

logger = logging.getLogger(__name__)

_EXPORT_SECONDS = 5.0  # for one message to the collector, and for the last one when the gateway ends
_TRACES_PATH = "/v1/traces"

_NO_SPAN = contextlib.nullcontext()  # one for all: a generator for each would cost more than all else here
_tracer: Tracer | None = None


@contextlib.asynccontextmanager
async def exporting(endpoint: str | None) -> AsyncIterator[None]:
    """Send spans to the collector at `endpoint`, by OTLP over HTTP, for as long as the block lasts.

    Nothing happens where nobody asked.
    """
    if endpoint is None:
        yield
        return
    provider = _provider(endpoint)
    try:
        with recording(provider):
            yield
    finally:
        await _shut_down(provider)


@contextlib.contextmanager
def recording(provider: TracerProvider) -> Iterator[None]:
    """Give all spans of this process to `provider` for as long as the block lasts."""
    global _tracer
    _tracer = provider.get_tracer("ivy_gateway")
    try:
        yield
    finally:
        _tracer = None


def request_span(method: str) -> AbstractContextManager[Span | None]:
    """The span of a whole request, in the trace that its client named, if it did."""
    return _NO_SPAN if _tracer is None else _request_span(_tracer, method)


@contextlib.contextmanager
def _request_span(tracer: Tracer, method: str) -> Iterator[Span]:
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = request_context.current()
    parent = TraceContextTextMapPropagator().extract({"traceparent": context.traceparent})
    attributes = {"http.request.method": method, "request.id": context.request_id}
    with tracer.start_as_current_span(method, parent, SpanKind.SERVER, attributes) as span:
        yield span


def end_request(span: Span | None, method: str, route: str, status: int) -> None:
    """Note on a request's span what became of it."""
    if span is not None:
        from opentelemetry.trace import Status, StatusCode

        span.update_name(f"{method} {route}")
        span.set_attributes({"http.route": route, "http.response.status_code": status})
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))


def chunk_span(num_tokens: int, num_inputs: int) -> AbstractContextManager[Span | None]:
    """The span of one chunk, from when it begins to wait for a server."""
    if _tracer is None:
        return _NO_SPAN
    from opentelemetry.trace import SpanKind

    attributes = {"ivy.tokens": num_tokens, "ivy.inputs": num_inputs}
    return _tracer.start_as_current_span("chunk", kind=SpanKind.CLIENT, attributes=attributes)


def tokenized(began: float, ended: float) -> None:
    """Add the span of a tokenization between two moments on the monotonic clock."""
    if _tracer is not None:
        offset = time.time_ns() - time.monotonic_ns()
        span = _tracer.start_span("tokenize", start_time=offset + round(1e9 * began))
        span.end(offset + round(1e9 * ended))


def traceparent() -> str:
    """What to pass on to a server: the span that this task is in, else what the client sent."""
    if _tracer is None:
        return request_context.current().traceparent
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def check_installed(endpoint: str | None) -> None:
    """Raise `StartupError` where spans are wanted and the packages are missing."""
    needed = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    if endpoint is not None and not all(map(_is_installed, needed)):
        raise StartupError("--otlp-endpoint needs more packages: pip install 'bouquet[tracing]'")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even a parent of it
        return False


def _provider(endpoint: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    url = endpoint if endpoint.endswith(_TRACES_PATH) else endpoint.rstrip("/") + _TRACES_PATH
    provider = TracerProvider(resource=Resource.create({"service.name": "ivy"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=_EXPORT_SECONDS)))
    logger.info("spans go to %s", url)
    return provider


async def _shut_down(provider: TracerProvider) -> None:
    """Send what is left, unless the collector takes too long; a daemon thread holds nobody up at exit."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def shut_down() -> None:
        provider.shutdown()
        with contextlib.suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=shut_down, name="tracing", daemon=True).start()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(done.wait(), _EXPORT_SECONDS)
