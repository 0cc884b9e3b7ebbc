"""Spans of chunks, as a collector receives them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest

from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1.inference_pb2_grpc import InferenceStub
from rose_engine.fake import FakeEngine
from tests.tulip_server.conftest import infer_request
from tests.tulip_server.test_service import A, B
from tulip_server.config import ServerConfig
from tulip_server.errors import StartupError
from tulip_server.listener import Listener
from tulip_server.server import Server
from tulip_server.tracing import tracing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """A collector's address, and the bodies that it got."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies
        finally:
            server.shutdown()
            thread.join()


async def spans_of(*requests: pb.InferRequest) -> list:
    """What a collector gets for these chunks, one after the other; failing ones included."""
    messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with collector() as (endpoint, bodies):
        async with tracing(endpoint, time.monotonic) as tracer:
            listener = Listener.bind("127.0.0.1", 0)
            await listener.open()
            engine = FakeEngine()
            server = Server(engine, ServerConfig(model=Path("fake")), listener, None, tracer)
            await server.start()
            async with grpc.aio.insecure_channel(listener.address) as channel:
                calls = [InferenceStub(channel).Infer(request) for request in requests]
                await asyncio.gather(*calls, return_exceptions=True)
            await server.drain()
        exports = [messages.ExportTraceServiceRequest.FromString(body) for body in bodies]
    resources = [resource for export in exports for resource in export.resource_spans]
    for resource in resources:
        names = {item.key: item.value.string_value for item in resource.resource.attributes}
        assert names["service.name"] == "tulip"
    return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]


async def test_a_chunk_is_a_span_under_the_one_that_sent_it():
    request = infer_request(A, B)
    request.traceparent, request.request_id = f"00-{TRACE}-{PARENT}-01", "request-1"
    (span,) = await spans_of(request)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    attributes = {item.key: item.value for item in span.attributes}
    assert attributes["request.id"].string_value == "request-1"
    assert attributes["tulip.lane"].string_value == "interactive"
    assert attributes["tulip.sequences"].int_value == 2
    assert [event.name for event in span.events] == ["dispatched", "computed"]
    times = [span.start_time_unix_nano, *(event.time_unix_nano for event in span.events)]
    assert times == sorted(times)
    assert span.start_time_unix_nano < span.end_time_unix_nano


async def test_what_the_client_does_not_sample_is_not_recorded():
    request = infer_request(A)
    request.traceparent = f"00-{TRACE}-{PARENT}-00"
    assert await spans_of(request) == []


async def test_a_chunk_of_nobody_s_trace_begins_one():
    (span,) = await spans_of(infer_request(A))
    assert not span.parent_span_id


async def test_a_chunk_that_expires_is_an_error():
    request = infer_request(A, timeout_us=1)
    (span,) = await spans_of(request)
    assert (span.status.code, span.status.message) == (2, "expired")


async def test_nobody_asked_is_no_tracer():
    async with tracing(None, time.monotonic) as tracer:
        assert tracer is None


async def test_without_the_packages_the_flag_is_refused(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(StartupError, match="--otlp-endpoint needs the packages of the extra 'tracing'"):
        async with tracing("http://127.0.0.1:1", time.monotonic):
            pass
