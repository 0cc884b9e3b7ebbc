"""Every counter and histogram of the server, as functions named for what happened.

Knows nothing of chunks or batches, only of numbers; one registry for the process, on a port of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, start_http_server
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
_chunks = Counter("tulip_chunks", "Chunks answered or dropped, by outcome", ["outcome"], registry=REGISTRY)
_skipped = Counter(
    "tulip_skipped_sequences", "Sequences dropped before dispatch, by reason", ["reason"], registry=REGISTRY
)
_refused = Counter(
    "tulip_refused_chunks", "Chunks refused at the door, by reason", ["reason", "lane"], registry=REGISTRY
)
_heartbeats = Counter("tulip_heartbeats", "Heartbeats handed to streams", registry=REGISTRY)
_queue_seconds = Histogram(
    "tulip_queue_seconds",
    "From a chunk's arrival to the dispatch of its last sequence",
    ["lane"],
    buckets=_SECOND_BUCKETS,
    registry=REGISTRY,
)
_compute_seconds = Histogram(
    "tulip_compute_seconds",
    "From that dispatch until the chunk's last row was on the host",
    buckets=_SECOND_BUCKETS,
    registry=REGISTRY,
)
_step_seconds = Histogram(
    "tulip_step_seconds",
    "From when the engine could begin with a batch until its rows were on the host; cold: with compiling",
    ["kind"],
    buckets=_SECOND_BUCKETS,
    registry=REGISTRY,
)

# A series that is born at 1 has no rate: those that alerts read are there, at 0, from the start.
for _reason in ("expired", "cancelled"):
    _skipped.labels(_reason)
for _values in product(("overloaded", "wedged", "shutting_down"), ("interactive", "bulk")):
    _refused.labels(*_values)

# `labels` takes a lock and a microsecond; what a chunk or a step needs is looked up once.
_answered = _chunks.labels("ok")
_queue_seconds_of = cache(_queue_seconds.labels)
_hot_step_seconds, _cold_step_seconds = _step_seconds.labels("hot"), _step_seconds.labels("cold")


def batch_dispatched(num_sequences: int, num_tokens: int) -> None:
    """A batch went to the engine."""
    _batches.inc()
    _batch_sequences.observe(num_sequences)
    _batch_tokens.observe(num_tokens)


def step_finished(seconds: float, *, cold: bool) -> None:
    """A batch came back from the engine."""
    (_cold_step_seconds if cold else _hot_step_seconds).observe(seconds)


def sequences_skipped(reason: str, num_sequences: int) -> None:
    """Sequences left the queue without being dispatched; `reason` is an error's `outcome`."""
    _skipped.labels(reason).inc(num_sequences)


def chunk_answered(lane: str, queue_seconds: float, compute_seconds: float) -> None:
    """A chunk has all its rows."""
    _answered.inc()
    _queue_seconds_of(lane).observe(queue_seconds)
    _compute_seconds.observe(compute_seconds)


def chunk_failed(outcome: str) -> None:
    """A chunk has no rows; `outcome` is the error's."""
    _chunks.labels(outcome).inc()


def chunk_refused(outcome: str, lane: str) -> None:
    """A chunk was not taken in; `outcome` is the error's."""
    _refused.labels(outcome, lane).inc()


def heartbeats_sent(num_streams: int) -> None:
    """A heartbeat was handed to each of so many streams."""
    _heartbeats.inc(num_streams)


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server at one moment, as its gauges show it."""

    waiting_tokens: Mapping[str, int]  # by lane
    waiting_sequences: Mapping[str, int]  # by lane
    batches_in_flight: int
    oldest_step_seconds: float
    wedged: bool
    draining: bool
    streams: int


class _ServerGauges(Collector):
    """A server's state, read when somebody asks: nothing on the way of a chunk keeps gauges."""

    def __init__(self, read: Callable[[], ServerState]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """One gauge for each fact, two of them by lane."""
        state = self._read()
        yield _by_lane("tulip_waiting_tokens", "Tokens accepted, not yet dispatched", state.waiting_tokens)
        yield _by_lane(
            "tulip_waiting_sequences", "Sequences accepted, not yet dispatched", state.waiting_sequences
        )
        yield GaugeMetricFamily(
            "tulip_batches_in_flight", "Batches dispatched, not yet delivered", state.batches_in_flight
        )
        yield GaugeMetricFamily(
            "tulip_oldest_step_seconds", "Age of the oldest step with the engine", state.oldest_step_seconds
        )
        yield GaugeMetricFamily("tulip_wedged", "1 while the device does not answer", state.wedged)
        yield GaugeMetricFamily("tulip_draining", "1 while the server ends", state.draining)
        yield GaugeMetricFamily("tulip_streams", "Streams open", state.streams)


def _by_lane(name: str, meaning: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=["lane"])
    for lane, value in values.items():
        family.add_metric([lane], value)
    return family


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
def observed(state: Callable[[], ServerState], steps: Callable[[], StepCounters]) -> Iterator[None]:
    """Export what `state` and `steps` give while the context lasts."""
    collectors = (_ServerGauges(state), _EngineSteps(steps))
    for collector in collectors:
        REGISTRY.register(collector)
    try:
        yield
    finally:
        for collector in collectors:
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
