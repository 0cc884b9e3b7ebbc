"""When failures put a replica out, and what brings it back."""

from __future__ import annotations

import pytest

from ivy_gateway.ejection import (
    FIRST_EJECTION_SECONDS,
    LAST_EJECTION_SECONDS,
    MAX_FAILURES,
    WINDOW_SECONDS,
    FailureRecord,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ejected(clock: Clock) -> FailureRecord:
    record = FailureRecord(clock)
    for _ in range(MAX_FAILURES):
        assert not record.ejected
        record.failed()
    return record


def test_failures_in_a_row_eject_and_a_good_answer_after_that_time_brings_back(clock):
    record = ejected(clock)
    assert record.ejected
    record.succeeded()  # one that was on its way
    assert record.ejected
    clock.now += FIRST_EJECTION_SECONDS
    assert record.on_probation
    assert not record.ejected
    record.succeeded()
    assert not record.on_probation


def test_a_good_answer_in_between_starts_the_count_again(clock):
    record = FailureRecord(clock)
    for _ in range(10 * MAX_FAILURES):
        record.failed()
        record.succeeded()
    assert not record.ejected


def test_failures_far_apart_are_not_in_a_row(clock):
    record = FailureRecord(clock)
    for _ in range(10 * MAX_FAILURES):
        record.failed()
        clock.now += WINDOW_SECONDS + 1
    assert not record.ejected


def test_each_failed_probe_doubles_the_time_up_to_a_limit(clock):
    record = ejected(clock)
    seconds = FIRST_EJECTION_SECONDS
    for _ in range(10):
        clock.now += seconds - 0.01
        assert record.ejected
        clock.now += 0.02
        assert record.on_probation
        record.failed()
        seconds = min(2 * seconds, LAST_EJECTION_SECONDS)
    record.clear()
    assert not record.ejected
    assert not record.on_probation
