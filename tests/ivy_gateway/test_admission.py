"""The bounds on what waits: in tokens, and in time for as long as more comes in than goes out."""

from __future__ import annotations

import contextlib
import random

import pytest

from ivy_gateway.admission import MAX_RETRY_SECONDS, Admission, AdmissionLimits
from ivy_gateway.errors import Overloaded
from ivy_gateway.jobs import Lane


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def admission(clock: Clock | None = None, **limits) -> Admission:
    defaults = {
        "max_tokens": 1_000_000,
        "max_seconds": {Lane.INTERACTIVE: 2.0, Lane.BULK: 15.0},
        "bulk_inputs": 32,
        "bulk_tokens": 16384,
    }
    return Admission(AdmissionLimits(**{**defaults, **limits}), clock or Clock())


def test_whole_requests_are_refused_for_what_is_there_never_for_their_own_size():
    gate = admission(max_tokens=100)
    with gate.admitted(None, 1, 100_000) as large:
        large.correct(5000)
        with pytest.raises(Overloaded) as refused, gate.admitted(None, 1, 1):
            pass
        assert 1 <= refused.value.retry_after <= MAX_RETRY_SECONDS
    with gate.admitted(None, 1, 1) as small:
        small.correct(99)
        with gate.admitted(None, 1, 1) as other:
            other.correct(5000)
            with pytest.raises(Overloaded):
                gate.check(Lane.INTERACTIVE)
    assert gate.tokens == 0
    assert gate.num_requests == 0


def test_a_request_counts_before_its_texts_are_tokenized():
    gate = admission(max_tokens=1000)
    with contextlib.ExitStack() as inside:
        for _ in range(2):
            inside.enter_context(gate.admitted(None, 1, 2000))
        with pytest.raises(Overloaded):
            gate.check(Lane.BULK)
    assert gate.tokens == 0


def test_the_estimate_follows_the_texts():
    gate = admission()
    for _ in range(300):
        with gate.admitted(None, 1, 1000) as ticket:
            ticket.correct(900)
    assert 850 < gate.estimate(1000, 1) < 950


@pytest.mark.parametrize(
    ("asked", "num_inputs", "num_tokens", "lane"),
    [
        (None, 32, 16384, Lane.INTERACTIVE),
        (None, 33, 100, Lane.BULK),
        (None, 1, 16385, Lane.BULK),
        (Lane.INTERACTIVE, 2000, 100_000, Lane.INTERACTIVE),
        (Lane.BULK, 1, 1, Lane.BULK),
    ],
)
def test_lanes_by_size_unless_asked_for(asked, num_inputs, num_tokens, lane):
    gate = admission()
    with gate.admitted(asked, num_inputs, 0) as ticket:
        ticket.correct(num_tokens)
        assert ticket.lane is lane
        assert gate.tokens == num_tokens
    assert gate.tokens == 0


class Simulation:
    """One server of a fixed rate, first come, first served, behind an admission."""

    def __init__(self, tokens_per_second: float = 20_000.0) -> None:
        self.clock = Clock()
        self.gate = admission(self.clock)
        self.rate = tokens_per_second
        self.queue: list[tuple[contextlib.ExitStack, int, float, object]] = []
        self.free_at = self.clock.now
        self.waits: list[float] = []
        self.refused = 0

    def arrive(self, size: int, who: object = None) -> bool:
        stack = contextlib.ExitStack()
        try:
            ticket = stack.enter_context(self.gate.admitted(None, 1, 4 * size))
        except Overloaded:
            self.refused += 1
            return False
        ticket.correct(size)
        self.free_at = max(self.free_at, self.clock.now) + size / self.rate
        self.queue.append((stack, size, self.clock.now, who))
        self.ends = getattr(self, "ends", [])
        self.ends.append(self.free_at)
        return True

    def run_until(self, moment: float) -> list[object]:
        """Finish what ends by then, in order; whose requests those were."""
        done = []
        while self.queue and self.ends[0] <= moment:
            self.clock.now = self.ends.pop(0)
            stack, size, arrival, who = self.queue.pop(0)
            self.gate.done(size)
            stack.close()
            self.waits.append(self.clock.now - arrival)
            done.append(who)
        self.clock.now = moment
        return done

    def p99(self) -> float:
        ordered = sorted(self.waits)
        return ordered[int(0.99 * len(ordered))]


def open_loop(load: float, seconds: float = 60.0, seed: int = 1, sizes=(128,)) -> Simulation:
    """Poisson arrivals at `load` times what the server can do."""
    chance, simulation = random.Random(seed), Simulation()
    requests = load * simulation.rate / (sum(sizes) / len(sizes))
    moment = end = simulation.clock.now
    end += seconds
    while (moment := moment + chance.expovariate(requests)) < end:
        simulation.run_until(moment)
        simulation.arrive(chance.choice(sizes))
    return simulation


@pytest.mark.parametrize("sizes", [(128,), (16, 64, 500)])
def test_accepted_requests_keep_their_latency_at_three_times_what_can_be_done(sizes):
    normal, flooded = open_loop(0.9, sizes=sizes), open_loop(3.0, sizes=sizes)
    assert flooded.p99() < 1.5 * normal.p99()
    assert len(flooded.waits) * sum(sizes) / len(sizes) > 0.9 * 60 * flooded.rate  # and the server stays busy
    assert normal.refused < 0.02 * len(normal.waits)


@pytest.mark.parametrize("callers", [16, 64, 200])
def test_callers_that_wait_for_their_answers_are_never_refused(callers):
    chance, simulation = random.Random(2), Simulation()
    for caller in range(callers):
        simulation.arrive(chance.choice((10, 100, 400)), caller)
    for _ in range(3000):
        simulation.run_until(simulation.ends[0])
        simulation.arrive(chance.choice((10, 100, 400)))
    assert simulation.refused == 0
    assert len(simulation.queue) == callers


def test_a_burst_out_of_idleness_is_let_in():
    simulation = open_loop(0.5, seconds=5.0)
    simulation.run_until(simulation.clock.now + 10.0)
    assert all(simulation.arrive(128) for _ in range(500))


def test_a_flood_is_told_when_to_come_back():
    simulation = open_loop(3.0, seconds=10.0)
    while simulation.arrive(128):
        pass
    with pytest.raises(Overloaded) as refused:
        simulation.gate.check(Lane.INTERACTIVE)
    assert refused.value.retry_after == 1.0


def test_bulk_work_does_not_keep_interactive_requests_out():
    simulation = open_loop(0.9, seconds=5.0)
    with contextlib.ExitStack() as inside:
        inside.enter_context(simulation.gate.admitted(None, 2000, 2_000_000))
        for _ in range(100):
            with simulation.gate.admitted(None, 1, 100) as ticket:
                assert ticket.lane is Lane.INTERACTIVE


def test_each_of_several_workers_has_its_share(minilm):
    from ivy_gateway.config import GatewayConfig

    config = GatewayConfig(model=minilm, replicas=("a:1",), workers=4, max_waiting_tokens=400_000)
    assert AdmissionLimits.of(config).max_tokens == 100_000
