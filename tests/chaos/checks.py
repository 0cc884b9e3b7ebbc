"""What scenarios share: a load around an event, and what must hold of it afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks import load
from benchmarks.known_answers import Question
from benchmarks.load import Tally, Verdict
from benchmarks.processes import Cluster

CALLERS = 8


def under_load(
    stack: Cluster,
    questions: Iterator[Question],
    event: Callable[[], Any],
    *,
    callers: int = CALLERS,
    before: float = 0.5,
    after: float = 0.5,
) -> Tally:
    """What became of the callers' requests while `event` ran on a thread, and a while before and after."""
    tally = Tally()

    async def work() -> None:
        async with load.callers(stack.base, questions, callers, tally):
            await asyncio.sleep(before)
            await asyncio.to_thread(event)
            await asyncio.sleep(after)

    load.run(work)
    return tally


def asked(stack: Cluster, questions: Iterable[Question]) -> Tally:
    """What became of these requests, one after the other."""
    tally = Tally()

    async def work() -> None:
        async with load.connected(stack.base, tally) as client:
            for question in questions:
                await load.ask(client, question, tally)

    load.run(work)
    return tally


def together(stack: Cluster, questions: Iterable[Question]) -> Tally:
    """What became of these requests, all at once."""
    tally = Tally()

    async def work() -> None:
        async with load.connected(stack.base, tally) as client:
            await asyncio.gather(*(load.ask(client, question, tally) for question in questions))

    load.run(work)
    return tally


def assert_none_failed(tally: Tally, at_least: int = 20) -> None:
    """Every request was answered once, with what was asked for."""
    assert tally.sent >= at_least
    assert tally.count(Verdict.RIGHT) == tally.sent, (tally.summary(), tally.complaints())
    assert tally.surplus == 0


def wait_for(condition: Callable[[], Any], seconds: float) -> float:
    """Poll until `condition()` is true; the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"it did not happen within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - began
