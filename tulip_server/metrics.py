"""Every counter and histogram of the server, as functions named for what happened.

Knows nothing of chunks or batches, only of numbers; one registry for the process, on a port of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rose_engine.step_counters import StepCounters

REGISTRY = CollectorRegistry()

_TOKEN_BUCKETS = tuple(2**exponent for exponent in range(4, 18))  # 16 to 131,072 tokens
_SEQUENCE_BUCKETS = tuple(2**exponent for exponent in range(12))  # 1 to 2,048 sequences
_SECOND_BUCKETS = tuple(0.0005 * 2**exponent for exponent in range(16))  # 0.5 ms to 16 s

_batches = Counter("tulip_batches", "Batches dispatched", registry=REGISTRY)
_batch_tokens = Histogram(
    "tulip_batch_tokens", "Tokens of a batch", buckets=_TOKEN_BUCKETS, registry=REGISTRY
)
_batch_sequences = Histogram(
    "tulip_batch_sequences", "Sequences of a batch", buckets=_SEQUENCE_BUCKETS, registry=REGISTRY
)
_waiting_tokens = Gauge("tulip_waiting_tokens", "Tokens accepted, not yet dispatched", registry=REGISTRY)
_waiting_sequences = Gauge(
    "tulip_waiting_sequences", "Sequences accepted, not yet dispatched", registry=REGISTRY
)
_in_flight = Gauge("tulip_batches_in_flight", "Batches dispatched, not yet delivered", registry=REGISTRY)
_chunks = Counter("tulip_chunks", "Chunks answered or dropped, by outcome", ["outcome"], registry=REGISTRY)
_skipped = Counter(
    "tulip_skipped_sequences", "Sequences dropped before dispatch, by reason", ["reason"], registry=REGISTRY
)
_queue_seconds = Histogram(
    "tulip_queue_seconds",
    "From a chunk's arrival to the dispatch of its last sequence",
    buckets=_SECOND_BUCKETS,
    registry=REGISTRY,
)
_compute_seconds = Histogram(
    "tulip_compute_seconds",
    "From that dispatch until the chunk's last row was on the host",
    buckets=_SECOND_BUCKETS,
    registry=REGISTRY,
)


def batch_dispatched(num_sequences: int, num_tokens: int) -> None:
    """A batch went to the engine."""
    _batches.inc()
    _batch_sequences.observe(num_sequences)
    _batch_tokens.observe(num_tokens)


def queue_changed(waiting_sequences: int, waiting_tokens: int) -> None:
    """So much waits now."""
    _waiting_sequences.set(waiting_sequences)
    _waiting_tokens.set(waiting_tokens)


def in_flight_changed(num_batches: int) -> None:
    """So many batches are with the engine now."""
    _in_flight.set(num_batches)


def sequences_skipped(reason: str, num_sequences: int) -> None:
    """Sequences left the queue without being dispatched; `reason` is an error's `outcome`."""
    _skipped.labels(reason).inc(num_sequences)


def chunk_answered(queue_seconds: float, compute_seconds: float) -> None:
    """A chunk has all its rows."""
    _chunks.labels("ok").inc()
    _queue_seconds.observe(queue_seconds)
    _compute_seconds.observe(compute_seconds)


def chunk_failed(outcome: str) -> None:
    """A chunk has no rows; `outcome` is the error's."""
    _chunks.labels(outcome).inc()


class _EngineSteps(Collector):
    """The engine's plain counters, read when somebody asks."""

    def __init__(self, read: Callable[[], StepCounters]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """One counter by outcome, and the bytes that captured graphs hold."""
        outcomes = asdict(self._read())
        held = outcomes.pop("num_bytes")
        steps = CounterMetricFamily("tulip_engine_steps", "Steps and graphs, by outcome", labels=["outcome"])
        for outcome, count in outcomes.items():
            steps.add_metric([outcome], count)
        yield steps
        yield GaugeMetricFamily("tulip_graph_bytes", "Device memory of captured graphs", held)


@contextmanager
def engine_steps(read: Callable[[], StepCounters]) -> Iterator[None]:
    """Export what `read` gives while the context lasts."""
    collector = _EngineSteps(read)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)


@contextmanager
def exposed(host: str, port: int) -> Iterator[int]:
    """Serve the registry over HTTP while the context lasts; gives the bound port (`port` 0: any free one).

    Raises `OSError` when the port cannot be had.
    """
    server, thread = start_http_server(port, host, REGISTRY)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
