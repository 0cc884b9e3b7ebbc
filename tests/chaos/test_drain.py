"""Processes that are told to go: what they accepted is answered, and the others go on."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal

from benchmarks import load
from benchmarks.known_answers import random_ids
from benchmarks.load import Tally, Verdict
from benchmarks.processes import command_line, descendants
from tests.chaos.checks import asked, assert_none_failed, under_load, wait_for


def test_a_gateway_is_told_to_stop(start, answers, numpy_random):
    """All that it took in is answered right; what comes later is refused, and not forgotten."""
    question = answers.embed_ids(random_ids(numpy_random, 4, 50))
    accepted, late = Tally(), Tally()
    with start(replicas=1, tokens_per_second=4000) as stack:

        async def work():
            async with (
                load.connected(stack.base, accepted) as client,
                load.connected(stack.base, late) as other,
            ):
                asks = [asyncio.create_task(load.ask(client, question, accepted)) for _ in range(30)]
                await asyncio.to_thread(
                    wait_for, lambda: stack.metric("te_queue_size") == 30 * 4 or accepted.sent, 10
                )
                stack.gateway.signal(signal.SIGTERM)
                while stack.gateway.alive and late.sent < 1000:
                    await load.ask(other, question, late)
                    await asyncio.sleep(0.01)
                await asyncio.gather(*asks)

        load.run(work)
        assert stack.gateway.wait(30) == 0
    assert_none_failed(accepted, 30)
    assert late.count(Verdict.WRONG) == 0
    assert set(late.statuses) <= {0, 200, 503}, late.complaints()


def test_one_of_two_gateway_workers_is_killed(start, questions):
    """Its own connections end; everybody else is served, and a new worker takes its place."""
    with start("--workers", "2") as stack:
        before = workers(stack)
        assert len(before) == 2

        def event():
            os.kill(before[0], signal.SIGKILL)
            wait_for(lambda: len(set(workers(stack)) - set(before)) == 1, 30)
            stack.wait_for_replicas(2)

        tally = under_load(stack, questions, event)
        counts = tally.summary()
        assert counts["wrong"] == counts["surplus"] == 0
        assert set(tally.statuses) <= {0, 200}, tally.complaints()
        assert counts["failed"] <= 2 * 8, "more than what was under way on its connections"
        assert_none_failed(under_load(stack, questions, lambda: None))
        assert_all_end_with_their_parent(stack)
        assert_none_failed(asked(stack, itertools.islice(questions, 5)), 5)


def assert_all_end_with_their_parent(stack):
    """A gateway that is killed leaves nobody behind who holds the port that it is started on again."""
    family = descendants(stack.gateway.pid)
    stack.gateway.kill()
    wait_for(lambda: not any(command_line(pid) for pid in family), 30)
    stack.gateway.start()
    stack.gateway.wait_until_ready()
    stack.wait_for_replicas(2)


def workers(stack) -> list[int]:
    """The gateway's workers, without what Python itself keeps beside them."""
    return [pid for pid in descendants(stack.gateway.pid)[1:] if "spawn_main" in command_line(pid)]
