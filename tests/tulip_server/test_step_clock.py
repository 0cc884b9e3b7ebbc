"""What a step may take before the device counts as stuck."""

from __future__ import annotations

import pytest

from tulip_server.step_clock import Step, StepClock


def step(num_tokens: int, *, cold: bool = False) -> Step:
    return Step(num_tokens, 0.0, cold)


def unmeasured(cold_seconds: float = 60.0) -> StepClock:
    return StepClock(lambda _: None, cold_seconds)


def test_what_the_engine_measured_counts_five_times_and_at_least_two_seconds():
    clock = StepClock(lambda tokens: tokens / 1000, 60.0)
    assert clock.allowance(step(100)) == 2.0
    assert clock.allowance(step(1000)) == 5.0


def test_a_step_that_compiles_has_its_own_allowance_and_teaches_nothing():
    clock = unmeasured()
    assert clock.allowance(step(1, cold=True)) == 60.0
    clock.finished(step(1, cold=True), 30.0)
    assert clock.expected(1) is None
    assert StepClock(lambda _: 0.1, 60.0).allowance(step(1, cold=True)) == 60.0


def test_a_size_never_seen_has_the_cold_allowance():
    clock = unmeasured(90.0)
    clock.finished(step(100), 1.0)
    assert clock.allowance(step(1000)) == 90.0


def test_seen_sizes_answer_for_themselves_and_for_smaller_ones():
    clock = unmeasured()
    clock.finished(step(1000), 3.0)
    clock.finished(step(100), 0.5)
    assert clock.allowance(step(1000)) == 15.0
    assert clock.allowance(step(300)) == 15.0
    assert clock.allowance(step(100)) == 2.5
    assert clock.allowance(step(7)) == 2.5


def test_the_worst_counts_and_is_forgotten():
    clock = unmeasured()
    for seconds in (0.5, 1.0, 0.1):
        clock.finished(step(10), seconds)
    assert clock.expected(10) == pytest.approx(0.9)
    for _ in range(30):
        clock.finished(step(10), 0.1)
    assert clock.expected(10) == pytest.approx(0.1)


def test_a_late_step_teaches_no_more_than_its_allowance():
    clock = unmeasured()
    clock.finished(step(10), 0.1)
    clock.finished(step(10), 1000.0)
    assert clock.expected(10) == 2.0


def test_a_first_step_of_a_slow_device_is_learnt():
    clock = unmeasured(60.0)
    clock.finished(step(16_000), 200.0)
    assert clock.allowance(step(16_000)) == 300.0
