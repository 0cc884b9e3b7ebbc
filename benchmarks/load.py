"""Load on a gateway, and a record of what became of every request.

A request ends in one of four ways: answered right, answered wrong (by value, status or request id), refused
for the moment (429 or 503 with `Retry-After`), or failed (any other status, or no answer at all).
"""

from __future__ import annotations

import asyncio
import collections
import enum
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import uvloop

from benchmarks.http_client import Client, NoAnswer, Reply, new_request_id
from benchmarks.known_answers import Question

T = TypeVar("T")
SECONDS = 60.0  # the longest that a client waits
_REFUSALS = (429, 503)


class Verdict(enum.Enum):
    """How a request ended."""

    RIGHT = "right"
    WRONG = "wrong"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: how it ended, its status (0: no answer), when it was sent and how long it took."""

    verdict: Verdict
    status: int
    sent: float  # seconds, on the monotonic clock
    seconds: float
    retry_after: str | None
    detail: str


@dataclass(slots=True)
class Tally:
    """All requests of one load."""

    outcomes: list[Outcome] = field(default_factory=list)
    surplus: int = 0  # answers that nobody asked for

    @property
    def sent(self) -> int:
        """Requests sent."""
        return len(self.outcomes)

    @property
    def statuses(self) -> collections.Counter[int]:
        """Requests by status; 0 is no answer."""
        return collections.Counter(outcome.status for outcome in self.outcomes)

    def of(self, *verdicts: Verdict) -> list[Outcome]:
        """Those that ended so."""
        return [outcome for outcome in self.outcomes if outcome.verdict in verdicts]

    def count(self, verdict: Verdict) -> int:
        """How many ended so."""
        return len(self.of(verdict))

    def summary(self) -> dict[str, int]:
        """The counts, which add up to `sent`, and the surplus."""
        counts = {verdict.value: self.count(verdict) for verdict in Verdict}
        return {"sent": self.sent, **counts, "surplus": self.surplus}

    def complaints(self) -> list[str]:
        """What the first few that ended wrong or failed were told."""
        return [f"{o.status}: {o.detail}" for o in self.of(Verdict.WRONG, Verdict.FAILED)][:10]


async def ask(client: Client, question: Question, tally: Tally | None = None) -> Outcome:
    """Send one question and judge its answer; into `tally` where there is one."""
    request_id, sent = new_request_id(), time.monotonic()
    try:
        async with asyncio.timeout(SECONDS):
            headers = {"x-request-id": request_id}
            reply = await client.ask("POST", question.path, question.body, headers)
    except (NoAnswer, TimeoutError) as error:
        outcome = Outcome(Verdict.FAILED, 0, sent, time.monotonic() - sent, None, str(error) or "timeout")
    else:
        seconds = time.monotonic() - sent
        verdict = judge(question, reply, request_id)
        detail = "" if verdict is Verdict.RIGHT else reply.body[:300].decode(errors="replace")
        outcome = Outcome(verdict, reply.status, sent, seconds, reply.headers.get("retry-after"), detail)
    if tally is not None:
        tally.outcomes.append(outcome)
    return outcome


def judge(question: Question, reply: Reply, request_id: str) -> Verdict:
    """How a request ended that was answered."""
    if reply.headers.get("x-request-id") != request_id:
        return Verdict.WRONG
    if reply.status in _REFUSALS:
        return Verdict.REFUSED if "retry-after" in reply.headers else Verdict.WRONG
    if reply.status != question.status:
        return Verdict.FAILED
    if reply.status != 200:
        return Verdict.RIGHT
    try:
        return Verdict.RIGHT if question.right(reply.body) else Verdict.WRONG
    except (ValueError, KeyError, TypeError):
        return Verdict.WRONG


@asynccontextmanager
async def connected(base: str, tally: Tally) -> AsyncIterator[Client]:
    """A client for the block; surplus answers are counted when it ends."""
    host, _, port = base.removeprefix("http://").rpartition(":")
    client = Client(host, int(port))
    try:
        yield client
    finally:
        await asyncio.sleep(0)  # what has arrived is read
        client.close()
        tally.surplus += client.surplus


class Callers:
    """Callers that each ask one question after the other, from `start` to `stop`: a closed loop.

    A caller that is refused waits for `patience` seconds, like a client that reads `Retry-After`.
    """

    def __init__(
        self, client: Client, questions: Iterator[Question], count: int, tally: Tally, patience: float = 0.05
    ) -> None:
        self._client = client
        self._questions = questions
        self._tally = tally
        self._patience = patience
        self._stopping = False
        self._tasks = [asyncio.create_task(self._call()) for _ in range(count)]

    async def stop(self) -> None:
        """Let every caller receive its last answer."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _call(self) -> None:
        while not self._stopping:
            outcome = await ask(self._client, next(self._questions), self._tally)
            if outcome.verdict is not Verdict.RIGHT:
                await asyncio.sleep(self._patience)


@asynccontextmanager
async def callers(
    base: str, questions: Iterator[Question], count: int, tally: Tally
) -> AsyncIterator[Client]:
    """`count` callers for as long as the block lasts."""
    async with connected(base, tally) as client:
        crowd = Callers(client, questions, count, tally)
        try:
            yield client
        finally:
            await crowd.stop()


async def poisson(
    client: Client, questions: Iterator[Question], rate: float, seconds: float, tally: Tally, seed: int = 0
) -> float:
    """An open loop: requests at `rate` a second on average, whatever becomes of them.

    Gives the longest time, in seconds, by which this process itself sent one too late.
    """
    arrivals, loop, latest = random.Random(seed), asyncio.get_running_loop(), 0.0
    began, due = loop.time(), 0.0
    async with asyncio.TaskGroup() as tasks:
        while (due := due + arrivals.expovariate(rate)) < seconds:
            await asyncio.sleep(began + due - loop.time())
            latest = max(latest, loop.time() - began - due)
            tasks.create_task(ask(client, next(questions), tally))
    return latest


def run(work: Callable[[], Awaitable[T]]) -> T:
    """Run `work` to its end on an event loop of its own."""

    async def main() -> T:
        return await work()

    return uvloop.run(main())
