"""Every counter and histogram of the gateway, as named functions, plus the names that TEI dashboards read.

Labels are bounded: route templates, status codes, error kinds, replica addresses from the configuration.
Knows nothing of requests or replicas. With several worker processes the values live in the folder that
`PROMETHEUS_MULTIPROC_DIR` names, and `exposition()` adds them up.
"""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

from ivy_gateway.jobs import PhaseTimings, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TEI_SECONDS = tuple(1.5e-5 * 1.5**n for n in range(35))  # TEI's own buckets
_TEI_LENGTHS = tuple(float(2**n) for n in range(17))

_REGISTRY = CollectorRegistry()

_requests = Counter(
    "ivy_requests",
    "Answered requests by route template and HTTP status.",
    ("route", "status"),
    registry=_REGISTRY,
)
_errors = Counter("ivy_errors", "Refused or failed requests by kind.", ("kind",), registry=_REGISTRY)
_request_seconds = Histogram(
    "ivy_request_seconds",
    "Whole requests, by route template.",
    ("route",),
    buckets=_SECONDS,
    registry=_REGISTRY,
)
_phase_seconds = Histogram(
    "ivy_phase_seconds",
    "Where successful jobs spent their time.",
    ("phase",),
    buckets=_SECONDS,
    registry=_REGISTRY,
)
_tokens = Counter("ivy_tokens", "Tokens computed, special tokens included.", registry=_REGISTRY)
_inputs = Counter("ivy_inputs", "Inputs (texts or pairs) computed.", registry=_REGISTRY)
_truncated = Counter("ivy_truncated_inputs", "Inputs that were cut to the limit.", registry=_REGISTRY)
_chunks = Counter("ivy_chunks", "Chunks sent to replicas.", registry=_REGISTRY)
_retries = Counter("ivy_chunk_retries", "Chunks sent a second time.", registry=_REGISTRY)
_non_finite = Counter("ivy_non_finite_rows", "Rows holding NaN or infinity, refused.", registry=_REGISTRY)
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
    return Histogram(name, "As in TEI.", buckets=buckets, registry=_REGISTRY)


_te_duration = _te_histogram("te_request_duration", _TEI_SECONDS)
_te_tokenization = _te_histogram("te_request_tokenization_duration", _TEI_SECONDS)
_te_queue = _te_histogram("te_request_queue_duration", _TEI_SECONDS)
_te_inference = _te_histogram("te_request_inference_duration", _TEI_SECONDS)
_te_input_length = _te_histogram("te_request_input_length", _TEI_LENGTHS)

# Our error kinds in TEI's words; kinds that TEI counts nowhere are left out.
_TE_FAILURES = {
    "TooManyInputs": "batch_size",
    "EmptyInput": "validation",
    "InvalidField": "validation",
    "InvalidValue": "validation",
    "TooLong": "validation",
    "InferenceFailed": "inference",
    "Unavailable": "inference",
    "UnsupportedTask": "model_type",
    "Overloaded": "overloaded",
    "DeadlineExceeded": "dropped",
}


def request_finished(route: str, status: int, seconds: float) -> None:
    """Count one answered HTTP request; `route` is a template from the route table, never a path."""
    _requests.labels(route, str(status)).inc()
    _request_seconds.labels(route).observe(seconds)


def error_raised(kind: str) -> None:
    """Count one error by the name of its class."""
    _errors.labels(kind).inc()
    if kind in _TE_FAILURES:
        _te_failure.labels(_TE_FAILURES[kind]).inc()


def job_started(num_inputs: int) -> None:
    """Count one job of `num_inputs` inputs as begun and in flight."""
    _te_count.labels(_method(num_inputs)).inc()
    _te_queue_size.inc(num_inputs)


def job_ended(num_inputs: int) -> None:
    """Take the inputs of one job, successful or not, out of flight."""
    _te_queue_size.dec(num_inputs)


def job_succeeded(num_inputs: int, usage: Usage, timings: PhaseTimings) -> None:
    """Count what one successful job cost and where its time went."""
    _tokens.inc(usage.num_tokens)
    _inputs.inc(num_inputs)
    _truncated.inc(usage.num_truncated)
    for phase in ("tokenize", "queue", "inference", "total"):
        _phase_seconds.labels(phase).observe(getattr(timings, phase))
    _te_success.labels(_method(num_inputs)).inc()
    _te_duration.observe(timings.total)
    _te_tokenization.observe(timings.tokenize)
    _te_queue.observe(timings.queue)
    _te_inference.observe(timings.inference)
    _te_input_length.observe(usage.num_tokens / max(1, num_inputs))


def chunk_sent() -> None:
    """Count one chunk on its way to a replica."""
    _chunks.inc()


def chunk_retried() -> None:
    """Count one chunk that is tried a second time."""
    _retries.inc()


def non_finite_rows(count: int) -> None:
    """Count rows that hold NaN or infinity."""
    _non_finite.inc(count)


def replica_outstanding(replica: str, tokens: int) -> None:
    """Set the tokens that `replica` owes."""
    _outstanding.labels(replica).set(tokens)


def replica_ready(replica: str, ready: bool) -> None:
    """Set whether `replica` serves."""
    _ready.labels(replica).set(ready)


def exposition() -> bytes:
    """All values in Prometheus' text format, over all worker processes."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return generate_latest(_REGISTRY)
    merged = CollectorRegistry()
    multiprocess.MultiProcessCollector(merged)  # type: ignore[no-untyped-call]
    return generate_latest(merged)


def _method(num_inputs: int) -> str:
    return "single" if num_inputs == 1 else "batch"
