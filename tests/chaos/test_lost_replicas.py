"""Servers that die, stop, hang and are replaced while clients ask: nobody is told, nobody waits for long."""

from __future__ import annotations

import itertools
import time

from benchmarks.load import Verdict
from tests.chaos.checks import asked, assert_none_failed, under_load, wait_for

# What is promised, and what a machine that does much else may add to it.
STOPPED_SECONDS = 1.5 + 2.0
WEDGED_SECONDS = 2.0 + 2.0
PATIENCE = 3.0


def test_one_of_two_is_killed(pair, questions):
    tulip = pair.tulips[0]

    def event():
        tulip.kill()
        pair.wait_for_replicas(1, STOPPED_SECONDS + PATIENCE)

    assert_none_failed(under_load(pair, questions, event))
    tulip.start()
    pair.wait_for_replicas(2)


def test_every_server_is_restarted_in_turn(pair, questions):
    exits = []

    def event():
        for tulip in pair.tulips:
            exits.append(tulip.terminate())
            tulip.start()
            tulip.wait_until_ready()
            pair.wait_for_replicas(2)

    assert_none_failed(under_load(pair, questions, event))
    assert exits == [0, 0]


def test_a_stopped_one_is_taken_out_and_comes_back(pair, questions):
    stopped = pair.tulips[1]

    def event():
        with stopped.stopped():
            pair.wait_for_replicas(1, STOPPED_SECONDS + PATIENCE)
            assert pair.get("/health")[0] == 200
        pair.wait_for_replicas(2)

    assert_none_failed(under_load(pair, questions, event))


def test_all_stopped_is_red_and_said_so(pair, questions):
    with pair.tulips[0].stopped(), pair.tulips[1].stopped():
        wait_for(lambda: pair.get("/health")[0] == 503, STOPPED_SECONDS + PATIENCE)
        assert pair.get("/live")[0] == 200
        tally = asked(pair, itertools.islice(questions, 3))
        assert tally.statuses == {503: 3}
        assert tally.count(Verdict.REFUSED) == 3
    wait_for(lambda: pair.get("/health")[0] == 200, 20)
    assert_none_failed(asked(pair, itertools.islice(questions, 3)), 3)


def test_a_wedged_one_is_taken_out_and_comes_back(pair, questions):
    wedged = pair.tulips[0]

    def event():
        wedged.inject("hang.1")
        pair.wait_for_replicas(1, WEDGED_SECONDS + PATIENCE)
        assert pair.get("/health")[0] == 200
        wedged.inject("hang-release")
        pair.wait_for_replicas(2, 20)

    assert_none_failed(under_load(pair, questions, event))


def test_all_wedged_is_red(pair, questions):
    for tulip in pair.tulips:
        tulip.inject("hang.1")

    def event():
        wait_for(lambda: pair.get("/health")[0] == 503, WEDGED_SECONDS + PATIENCE)
        for tulip in pair.tulips:
            tulip.inject("hang-release")
        wait_for(lambda: pair.get("/health")[0] == 200, 20)

    tally = under_load(pair, questions, event)
    assert tally.count(Verdict.RIGHT) + tally.count(Verdict.REFUSED) == tally.sent, tally.complaints()
    assert tally.count(Verdict.RIGHT) > 0


def test_both_are_restarted_at_once(pair, questions):
    """For a moment nobody is there; requests wait for whoever comes back first."""

    def event():
        assert [tulip.terminate() for tulip in pair.tulips] == [0, 0]
        for tulip in pair.tulips:
            tulip.start()
        pair.wait_for_replicas(2)

    tally = under_load(pair, questions, event)
    counts = tally.summary()
    assert counts["right"] + counts["refused"] == counts["sent"], tally.complaints()
    assert max(outcome.seconds for outcome in tally.of(Verdict.RIGHT)) > 0.3


def test_the_gateway_itself_is_stopped(pair, questions):
    """Silence that is its own is nobody's fault: no server is taken out for it."""
    ejections = pair.metric("ivy_replica_ejections_total")

    def event():
        with pair.gateway.stopped():
            time.sleep(2.5)

    assert_none_failed(under_load(pair, questions, event))
    assert pair.metric("ivy_replica_ejections_total") == ejections


def test_a_slow_one_is_busy_and_stays(pair, questions):
    states = set()

    def event():
        pair.tulips[0].inject("slow.1.0")
        end = time.monotonic() + 3
        while time.monotonic() < end:
            states.add(pair.num_ready())
            time.sleep(0.05)

    assert_none_failed(under_load(pair, questions, event, after=0.0))
    assert states == {2}
