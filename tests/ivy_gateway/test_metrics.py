"""What is noted in plain numbers arrives in the library's, once, whoever scrapes."""

import pytest
from prometheus_client import CollectorRegistry, Histogram

from ivy_gateway import metrics
from ivy_gateway.jobs import PhaseTimings, Usage


def samples(registry):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


@pytest.fixture
def before():
    metrics.fold()
    return samples(metrics._REGISTRY)


def test_a_tally_gives_what_the_library_gives():
    bounds = (0.001, 0.01, 1.0)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = metrics._Tally("seconds", "", buckets=bounds, registry=ours)
    histogram = Histogram("seconds", "", buckets=bounds, registry=theirs)
    for value in (0.0, 0.001, 0.0010001, 0.5, 1.0, 7.0, 7.0):
        tally.observe(value)
        histogram.observe(value)
    tally.fold()
    assert samples(ours) == pytest.approx(samples(theirs))
    metrics._tallies.remove(tally)


def test_what_was_noted_is_counted_once(before):
    metrics.job_started(3)
    metrics.job_succeeded(3, Usage(100, 400, 1), PhaseTimings(0.1, 0.2, 0.3, 0.6))
    metrics.job_ended(3)
    for _ in range(2):
        metrics.fold()
    after = samples(metrics._REGISTRY)
    risen = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert risen[("ivy_tokens_total",)] == 100
    assert risen[("ivy_inputs_total",)] == 3
    assert risen[("ivy_truncated_inputs_total",)] == 1
    assert risen[("te_request_count", "batch")] == risen[("te_request_success", "batch")] == 1
    assert risen[("ivy_phase_seconds_sum", "queue")] == pytest.approx(0.2)
    assert risen[("te_request_duration_count",)] == 1
    assert ("te_queue_size",) not in risen


def test_jobs_are_counted_however_many_succeed_between_two_folds(before):
    for _ in range(3 * metrics._MOST_SUCCEEDED + 5):
        metrics.job_succeeded(1, Usage(10, 40, 0), PhaseTimings(0.1, 0.2, 0.3, 0.6))
        assert len(metrics._succeeded) < metrics._MOST_SUCCEEDED
    metrics.fold()
    after = samples(metrics._REGISTRY)
    num_jobs = 3 * metrics._MOST_SUCCEEDED + 5
    assert after[("ivy_tokens_total",)] - before[("ivy_tokens_total",)] == 10 * num_jobs
    name = ("te_request_duration_count",)
    assert after[name] - before.get(name, 0) == num_jobs


def test_a_gauge_shows_what_was_set_last_and_survives_a_replica_that_comes_back():
    name = ("ivy_replica_outstanding_tokens", "[::1]:1")
    for _ in range(2):
        metrics.replica_outstanding("[::1]:1", 7)
        metrics.replica_state("[::1]:1", "ready")
        metrics.replica_outstanding("[::1]:1", 9)
        metrics.fold()
        assert samples(metrics._REGISTRY)[name] == 9
        metrics.replica_gone("[::1]:1")
        assert name not in samples(metrics._REGISTRY)


def test_the_exposition_has_everything_noted_so_far(before):
    metrics.request_finished("/embed", 200, 0.02)
    text = metrics.exposition().decode()
    number = before.get(("ivy_requests_total", "/embed", "200"), 0) + 1
    assert f'ivy_requests_total{{route="/embed",status="200"}} {number}' in text
