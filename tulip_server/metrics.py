"""Every counter and histogram of the server, as functions named for what happened.

Knows nothing of chunks or batches, only of numbers; one registry for the process, on a port of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rose_engine.step_counters import StepCounters
from tulip_server.meters import DistributionFamily, TallyFamily

REGISTRY = CollectorRegistry()

_TOKEN_BUCKETS = tuple(2**exponent for exponent in range(4, 18))  # 16 to 131,072 tokens
_SEQUENCE_BUCKETS = tuple(2**exponent for exponent in range(12))  # 1 to 2,048 sequences
_SECOND_BUCKETS = tuple(0.0005 * 2**exponent for exponent in range(16))  # 0.5 ms to 16 s
_LANES = ("interactive", "bulk")

_batches = TallyFamily("tulip_batches", "Batches dispatched", REGISTRY)
_batch_tokens = DistributionFamily("tulip_batch_tokens", "Tokens of a batch", _TOKEN_BUCKETS, REGISTRY)
_batch_sequences = DistributionFamily(
    "tulip_batch_sequences", "Sequences of a batch", _SEQUENCE_BUCKETS, REGISTRY
)
_chunks = TallyFamily(
    "tulip_chunks", "Chunks answered or dropped, by outcome", REGISTRY, "outcome", values=("ok",)
)
_skipped = Counter(
    "tulip_skipped_sequences", "Sequences dropped before dispatch, by reason", ["reason"], registry=REGISTRY
)
_refused = Counter(
    "tulip_refused_chunks", "Chunks refused at the door, by reason", ["reason", "lane"], registry=REGISTRY
)
_heartbeats = Counter("tulip_heartbeats", "Heartbeats handed to streams", registry=REGISTRY)
_queue_seconds = DistributionFamily(
    "tulip_queue_seconds",
    "From a chunk's arrival to the dispatch of its last sequence",
    _SECOND_BUCKETS,
    REGISTRY,
    "lane",
    values=_LANES,
)
_compute_seconds = DistributionFamily(
    "tulip_compute_seconds",
    "From that dispatch until the chunk's last row was on the host",
    _SECOND_BUCKETS,
    REGISTRY,
)
_step_seconds = DistributionFamily(
    "tulip_step_seconds",
    "From when the engine could begin with a batch until its rows were on the host; cold: with compiling",
    _SECOND_BUCKETS,
    REGISTRY,
    "kind",
    values=("hot", "cold"),
)

# A series that is born at 1 has no rate: those that alerts read are there, at 0, from the start.
for _reason in ("expired", "cancelled"):
    _skipped.labels(_reason)
for _values in product(("overloaded", "wedged", "shutting_down"), _LANES):
    _refused.labels(*_values)


def batch_dispatched(num_sequences: int, num_tokens: int) -> None:
    """A batch went to the engine."""
    _batches.of[""].add()
    _batch_sequences.of[""].observe(num_sequences)
    _batch_tokens.of[""].observe(num_tokens)


def step_finished(seconds: float, *, cold: bool) -> None:
    """A batch came back from the engine."""
    _step_seconds.of["cold" if cold else "hot"].observe(seconds)


def sequences_skipped(reason: str, num_sequences: int) -> None:
    """Sequences left the queue without being dispatched; `reason` is an error's `outcome`."""
    _skipped.labels(reason).inc(num_sequences)


def chunk_answered(lane: str, queue_seconds: float, compute_seconds: float) -> None:
    """A chunk has all its rows."""
    _chunks.of["ok"].add()
    _queue_seconds.of[lane].observe(queue_seconds)
    _compute_seconds.of[""].observe(compute_seconds)


def chunk_failed(outcome: str) -> None:
    """A chunk has no rows; `outcome` is the error's."""
    _chunks.of[outcome].add()


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
