"""Every counter and histogram of the gateway, as named functions, plus the names that TEI dashboards read.

Labels are bounded: route templates, status codes, error kinds, replica addresses from the configuration.
Knows nothing of requests or replicas. With several worker processes the values live in the folder that
`PROMETHEUS_MULTIPROC_DIR` names, and `exposition()` adds them up.

What every request counts is noted in plain numbers, which `fold` hands to the library, whose own counting
costs ten times as much: before each exposition, and ten times a second for those of other processes. Jobs
that succeed are noted as they are and counted some at a time, so that few replies wait for that.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_left
from collections import defaultdict
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

from ivy_gateway.jobs import PhaseTimings, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TEI_SECONDS = tuple(1.5e-5 * 1.5**n for n in range(35))  # TEI's own buckets
_TEI_LENGTHS = tuple(float(2**n) for n in range(17))

_REGISTRY = CollectorRegistry()
_added: defaultdict[Counter | Gauge, float] = defaultdict(float)  # since the last fold
_latest: dict[Gauge, float] = {}  # set since the last fold
_tallies: list[_Tally] = []
_succeeded: list[tuple[int, Usage, PhaseTimings]] = []  # jobs that are not counted yet: no more than
_MOST_SUCCEEDED = 32  # because counting so many at once, 0.1 ms, holds nobody up


class _Tally(Histogram):
    """A histogram that notes in plain numbers what `fold` adds to the library's."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._counts = [0] * len(self._upper_bounds)
        self._total = 0.0
        _tallies.append(self)

    def observe(self, amount: float, exemplar: Any = None) -> None:  # noqa: ANN401, ARG002 - the library's
        """Note one value."""
        self._counts[bisect_left(self._upper_bounds, amount)] += 1
        self._total += amount

    def fold(self) -> None:
        """Add what was noted to the library's values."""
        if not any(self._counts):
            return
        for bucket, count in zip(self._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(self._total)
        self._counts = [0] * len(self._counts)
        self._total = 0.0


_requests = Counter(
    "ivy_requests",
    "Answered requests by route template and HTTP status.",
    ("route", "status"),
    registry=_REGISTRY,
)
_errors = Counter("ivy_errors", "Refused or failed requests by kind.", ("kind",), registry=_REGISTRY)
_request_seconds = _Tally(
    "ivy_request_seconds",
    "Whole requests, by route template.",
    ("route",),
    buckets=_SECONDS,
    registry=_REGISTRY,
)
_phase_seconds = _Tally(
    "ivy_phase_seconds",
    "Where requests spent their time; queue and inference as the servers say, wire: all the rest of a chunk.",
    ("phase",),
    buckets=_SECONDS,
    registry=_REGISTRY,
)
_tokens = Counter("ivy_tokens", "Tokens computed, special tokens included.", registry=_REGISTRY)
_inputs = Counter("ivy_inputs", "Inputs (texts or pairs) computed.", registry=_REGISTRY)
_truncated = Counter("ivy_truncated_inputs", "Inputs that were cut to the limit.", registry=_REGISTRY)
_chunks = Counter("ivy_chunks", "Chunks sent to replicas.", registry=_REGISTRY)
_retries = Counter(
    "ivy_chunk_retries",
    "Chunks sent a second time, by the error that ended the first.",
    ("reason",),
    registry=_REGISTRY,
)
_non_finite = Counter("ivy_non_finite_rows", "Rows holding NaN or infinity, refused.", registry=_REGISTRY)
_in_flight = Gauge(
    "ivy_requests_in_flight", "HTTP requests.", registry=_REGISTRY, multiprocess_mode="livesum"
)
_connections = Gauge(
    "ivy_connections", "Open HTTP connections.", registry=_REGISTRY, multiprocess_mode="livesum"
)
_ended_connections = Counter(
    "ivy_connections_ended",
    "Connections ended or refused: headers (large or late), body (late), reader (slow), limit (too many).",
    ("reason",),
    registry=_REGISTRY,
)
_queue_tokens = Gauge(
    "ivy_queue_tokens",
    "Tokens of the admitted requests, waiting or computed, by lane.",
    ("lane",),
    registry=_REGISTRY,
    multiprocess_mode="livesum",
)
_refusals = Counter(
    "ivy_overload_refusals",
    "Requests refused for the work that waits already, by lane and by the bound: tokens or seconds.",
    ("lane", "bound"),
    registry=_REGISTRY,
)
_retry_after = Histogram(
    "ivy_retry_after_seconds",
    "What refused requests were told to wait.",
    buckets=(1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
    registry=_REGISTRY,
)
_outstanding = Gauge(
    "ivy_replica_outstanding_tokens",
    "Tokens sent to a replica and not yet answered.",
    ("replica",),
    registry=_REGISTRY,
    multiprocess_mode="livesum",
)
_ready = Gauge(
    "ivy_replica_ready",
    "1 while the replica serves.",
    ("replica",),
    registry=_REGISTRY,
    multiprocess_mode="livemin",
)
_state = Gauge(
    "ivy_replica_state",
    "1 for the state that the replica is in, 0 for those it was in before.",
    ("replica", "state"),
    registry=_REGISTRY,
    multiprocess_mode="livesum",
)
_states: dict[str, str] = {}  # of each replica, the state last set
_ejections = Counter(
    "ivy_replica_ejections",
    "Replicas taken out of rotation: stalled (silent), wedged (no step ends), ejected (failures in a row).",
    ("reason",),
    registry=_REGISTRY,
)
_recoveries = Counter(
    "ivy_replica_recoveries", "Replicas back in rotation after an ejection.", registry=_REGISTRY
)

# A series that is born at 1 has no rate: those that alerts read are there, at 0, from the start.
for _values in product(("interactive", "bulk"), ("tokens", "seconds")):
    _refusals.labels(*_values)
for _counter, _reasons in (
    (_ejections, ("stalled", "wedged", "ejected")),
    (_retries, ("Unavailable", "InferenceFailed", "Overloaded")),
    (_ended_connections, ("headers", "body", "reader", "limit")),
):
    for _reason in _reasons:
        _counter.labels(_reason)

# TEI's counters carry no `_total`, which this library would append to a Counter: hence gauges that only rise.
_te_count = Gauge("te_request_count", "Requests.", ("method",), registry=_REGISTRY, multiprocess_mode="sum")
_te_success = Gauge(
    "te_request_success", "Successful requests.", ("method",), registry=_REGISTRY, multiprocess_mode="sum"
)
_te_failure = Gauge(
    "te_request_failure", "Failed requests.", ("err",), registry=_REGISTRY, multiprocess_mode="sum"
)
_te_queue_size = Gauge("te_queue_size", "Inputs in flight.", registry=_REGISTRY, multiprocess_mode="livesum")


def _te_histogram(name: str, buckets: tuple[float, ...]) -> Histogram:
    return _Tally(name, "As in TEI.", buckets=buckets, registry=_REGISTRY)


_te_duration = _te_histogram("te_request_duration", _TEI_SECONDS)
_te_tokenization = _te_histogram("te_request_tokenization_duration", _TEI_SECONDS)
_te_queue = _te_histogram("te_request_queue_duration", _TEI_SECONDS)
_te_inference = _te_histogram("te_request_inference_duration", _TEI_SECONDS)
_te_input_length = _te_histogram("te_request_input_length", _TEI_LENGTHS)

# Our error kinds in TEI's words; kinds that TEI counts nowhere are left out.
_TE_FAILURES = {
    "TooManyInputs": "batch_size",
    "EmptyInput": "validation",
    "InvalidHeader": "validation",
    "InvalidField": "validation",
    "InvalidValue": "validation",
    "TooLong": "validation",
    "InferenceFailed": "inference",
    "Unavailable": "inference",
    "UnsupportedTask": "model_type",
    "Overloaded": "overloaded",
    "DeadlineExceeded": "dropped",
}


@functools.cache
def _of(metric: Counter | Gauge | Histogram, *labels: str) -> Any:  # noqa: ANN401 - a metric of the same kind
    """`metric.labels(*labels)`, which costs several times what counting does, remembered for hot paths."""
    return metric.labels(*labels)


def request_finished(route: str, status: int, seconds: float) -> None:
    """Count one answered HTTP request; `route` is a template from the route table, never a path."""
    _added[_of(_requests, route, str(status))] += 1
    _of(_request_seconds, route).observe(seconds)


def error_raised(kind: str) -> None:
    """Count one error by the name of its class."""
    _errors.labels(kind).inc()
    if kind in _TE_FAILURES:
        _te_failure.labels(_TE_FAILURES[kind]).inc()


def job_started(num_inputs: int) -> None:
    """Count one job of `num_inputs` inputs as begun and in flight."""
    _added[_of(_te_count, _method(num_inputs))] += 1
    _added[_te_queue_size] += num_inputs


def job_ended(num_inputs: int) -> None:
    """Take the inputs of one job, successful or not, out of flight."""
    _added[_te_queue_size] -= num_inputs


def job_succeeded(num_inputs: int, usage: Usage, timings: PhaseTimings) -> None:
    """Count what one successful job cost and where its time went."""
    _succeeded.append((num_inputs, usage, timings))
    if len(_succeeded) >= _MOST_SUCCEEDED:
        _count_succeeded()


def _count_succeeded() -> None:
    for num_inputs, usage, timings in _succeeded:
        _added[_tokens] += usage.num_tokens
        _added[_inputs] += num_inputs
        _added[_truncated] += usage.num_truncated
        for phase in ("tokenize", "queue", "inference", "total"):
            _of(_phase_seconds, phase).observe(getattr(timings, phase))
        _added[_of(_te_success, _method(num_inputs))] += 1
        _te_duration.observe(timings.total)
        _te_tokenization.observe(timings.tokenize)
        _te_queue.observe(timings.queue)
        _te_inference.observe(timings.inference)
        _te_input_length.observe(usage.num_tokens / max(1, num_inputs))
    _succeeded.clear()


def phase_ended(phase: str, seconds: float) -> None:
    """Note how long one phase of a request took: parse, wire or encode; `job_succeeded` notes the others."""
    _of(_phase_seconds, phase).observe(seconds)


def requests_in_flight(change: int) -> None:
    """Add `change` to the HTTP requests that are being answered."""
    _added[_in_flight] += change


def connections_open(change: int) -> None:
    """Add `change` to the open HTTP connections."""
    _connections.inc(change)


def connection_ended(reason: str) -> None:
    """Count one connection that was ended, or refused, for one of a few reasons."""
    _ended_connections.labels(reason).inc()


def queue_changed(lane: str, tokens: int) -> None:
    """Set the tokens of the admitted requests in `lane`."""
    _latest[_of(_queue_tokens, lane)] = tokens


def request_refused(lane: str, bound: str, retry_after: float) -> None:
    """Count one request refused for `bound`, and the seconds after which it was told to come back."""
    _refusals.labels(lane, bound).inc()
    _retry_after.observe(retry_after)


def chunk_sent() -> None:
    """Count one chunk on its way to a replica."""
    _added[_chunks] += 1


def chunk_retried(reason: str) -> None:
    """Count one chunk that is tried a second time; `reason` is the error's class."""
    _retries.labels(reason).inc()


def non_finite_rows(count: int) -> None:
    """Count rows that hold NaN or infinity."""
    _non_finite.inc(count)


def replica_outstanding(replica: str, tokens: int) -> None:
    """Set the tokens that `replica` owes."""
    _latest[_of(_outstanding, replica)] = tokens


def replica_state(replica: str, state: str) -> None:
    """Set where `replica` stands: one of the states of `ReplicaState`."""
    if (before := _states.get(replica)) is not None:
        _state.labels(replica, before).set(0)
    _states[replica] = state
    _state.labels(replica, state).set(1)
    _ready.labels(replica).set(state == "ready")


def replica_ejected(reason: str) -> None:
    """Count one replica that is taken out of rotation because of how it behaves."""
    _ejections.labels(reason).inc()


def replica_recovered() -> None:
    """Count one replica that is back in rotation."""
    _recoveries.inc()


def replica_gone(replica: str) -> None:
    """Forget a replica that left, so that addresses that come and go leave no series behind."""
    state = _states.pop(replica, None)
    fold()
    _of.cache_clear()
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # there the library cannot remove, only zero
        _ready.labels(replica).set(0)
        if state is not None:
            _state.labels(replica, state).set(0)
        return
    for gauge in (_ready, _outstanding):
        gauge.remove_by_labels({"replica": replica})
    _state.remove_by_labels({"replica": replica})


def fold() -> None:
    """Hand everything that this process has noted to the library."""
    _count_succeeded()
    for metric, amount in _added.items():
        metric.inc(amount)
    _added.clear()
    for gauge, value in _latest.items():
        gauge.set(value)
    _latest.clear()
    for tally in _tallies:
        tally.fold()


def exposition() -> bytes:
    """All values in Prometheus' text format, over all worker processes."""
    fold()
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return generate_latest(_REGISTRY)
    merged = CollectorRegistry()
    multiprocess.MultiProcessCollector(merged)  # type: ignore[no-untyped-call]
    return generate_latest(merged)


def _method(num_inputs: int) -> str:
    return "single" if num_inputs == 1 else "batch"
