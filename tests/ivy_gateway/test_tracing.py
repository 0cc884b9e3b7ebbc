"""Spans of a request, and the trace that goes on to the servers."""

from __future__ import annotations

import sys

import pytest

from ivy_gateway import tracing
from ivy_gateway.errors import StartupError

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans():
    """Every span that ends during the test."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    with tracing.recording(provider):
        yield exporter
    provider.shutdown()


async def test_a_request_its_tokenization_and_its_chunk_are_one_trace(start_gateway, spans):
    async with start_gateway() as gateway:
        headers = {"traceparent": CLIENT, "x-request-id": "r-9"}
        reply = await gateway.client.post("/embed", json={"inputs": ["a", "b"]}, headers=headers)
        assert reply.status_code == 200
        sent = gateway.tulips[0].requests[0]
    by_name = {span.name: span for span in spans.get_finished_spans()}
    assert set(by_name) == {"POST /embed", "tokenize", "chunk"}
    request = by_name["POST /embed"]
    assert f"{request.context.trace_id:032x}" == CLIENT.split("-")[1]
    assert f"{request.parent.span_id:016x}" == CLIENT.split("-")[2]
    assert request.attributes["request.id"] == "r-9"
    assert request.attributes["http.response.status_code"] == 200
    for child in (by_name["tokenize"], by_name["chunk"]):
        assert child.parent.span_id == request.context.span_id
        assert request.start_time - 5e6 <= child.start_time <= child.end_time <= request.end_time
    assert by_name["chunk"].attributes["ivy.inputs"] == 2
    trace_id, span_id = by_name["chunk"].context.trace_id, by_name["chunk"].context.span_id
    assert sent.traceparent == f"00-{trace_id:032x}-{span_id:016x}-01"
    assert sent.request_id == "r-9"


async def test_without_tracing_the_clients_trace_goes_on_and_nothing_is_imported(start_gateway):
    async with start_gateway() as gateway:
        await gateway.client.post("/embed", json={"inputs": "a"}, headers={"traceparent": CLIENT})
        await gateway.client.post("/embed", json={"inputs": "a"}, headers={"traceparent": "nonsense"})
        assert [request.traceparent for request in gateway.tulips[0].requests] == [CLIENT, ""]


def test_missing_packages_stop_the_start(monkeypatch):
    tracing.check_installed(None)
    monkeypatch.setattr(tracing, "_is_installed", lambda name: False)
    with pytest.raises(StartupError, match=r"bouquet\[tracing\]"):
        tracing.check_installed("http://127.0.0.1:4318")


async def test_a_collector_that_is_not_there_holds_nobody_up():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    assert "opentelemetry" in sys.modules
    async with tracing.exporting("http://127.0.0.1:9"):
        assert tracing.traceparent() == ""
    assert tracing._tracer is None
