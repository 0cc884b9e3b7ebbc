"""Mixed traffic for a soak: every main route and dialect, mistakes, clients that leave or are slow, bursts.

Each kind of client is a coroutine that goes on until it is told to stop, and notes what it did.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import load
from benchmarks.http_client import Client, NoAnswer, encode_request
from benchmarks.known_answers import KnownAnswers, Question, mistake, random_ids
from benchmarks.load import Tally
from benchmarks.processes import Cluster

CALLERS = 6
LEAVERS_PER_SECOND = 20.0
SLOW_CLIENTS = 4  # of each kind, at any time
BURST_EVERY_SECONDS, BURST_SECONDS, BURST_RATE = 20.0, 2.0, 400.0

_WORDS = (
    "tea",
    "road",
    "river",
    "copper",
    "green",
    "slow",
    "wind",
    "seven",
    "lamp",
    "harbour",
    "paper",
    "north",
)
_SLOW_HEAD = b"POST /embed HTTP/1.1\r\nhost: loopback\r\ncontent-type: application/json\r\n"


@dataclass(slots=True)
class Record:
    """What became of the traffic: a tally for each kind of request, and plain counts of the rest."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def tally(self, kind: str) -> Tally:
        """The tally of one kind, new or old."""
        return self.tallies.setdefault(kind, Tally())


class Traffic:
    """All clients of one stack; `run` lets them come for a while."""

    def __init__(self, stack: Cluster, answers: KnownAnswers) -> None:
        self._stack = stack
        self._kinds = kinds(answers)
        self._single = answers.embed_ids(random_ids(np.random.default_rng(3), 1, 60))
        self._random = random.Random(5)
        self._deaf = json.dumps({"inputs": ["tea " * 200] * 40}).encode()

    async def run(self, seconds: float, record: Record) -> None:
        """Every kind of client for `seconds`; all connections are closed afterwards."""
        stop = asyncio.Event()
        clients: list[Callable[[asyncio.Event, Record], Coroutine[Any, Any, None]]] = [
            *([self._caller] * CALLERS),
            self._leavers,
            self._bursts,
            *([self._slow_sender] * SLOW_CLIENTS),
            *([self._slow_reader] * SLOW_CLIENTS),
        ]
        tasks = [asyncio.create_task(client(stop, record)) for client in clients]
        try:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            stop.set()
        await asyncio.gather(*tasks)

    async def _caller(self, stop: asyncio.Event, record: Record) -> None:
        """One request after the other, of every kind."""
        async with load.connected(self._stack.base, record.tally("unasked")) as client:
            while not stop.is_set():
                kind = self._random.choice(list(self._kinds))
                await load.ask(client, next(self._kinds[kind]), record.tally(kind))

    async def _leavers(self, stop: asyncio.Event, record: Record) -> None:
        """Clients that hang up before, while or after they are served."""
        async with asyncio.TaskGroup() as tasks:
            while not stop.is_set():
                await asyncio.sleep(self._random.expovariate(LEAVERS_PER_SECOND))
                tasks.create_task(self._leave(0.04 * self._random.random()))
                record.counts["disconnects"] += 1

    async def _leave(self, seconds: float) -> None:
        client = Client(self._stack.gateway.host, self._stack.gateway.port)
        question = next(self._kinds["batch of ids"])
        with contextlib.suppress(TimeoutError, NoAnswer):
            async with asyncio.timeout(seconds):
                await client.ask("POST", question.path, question.body)
        client.close()

    async def _bursts(self, stop: asyncio.Event, record: Record) -> None:
        """Now and then far more than the servers can do."""
        async with load.connected(self._stack.base, record.tally("unasked")) as client:
            while not await _stopped(stop, BURST_EVERY_SECONDS - BURST_SECONDS):
                singles, tally = itertools.repeat(self._single), record.tally("burst of singles")
                await load.poisson(client, singles, BURST_RATE, BURST_SECONDS, tally, record.counts["bursts"])
                record.counts["bursts"] += 1

    async def _slow_sender(self, stop: asyncio.Event, record: Record) -> None:
        """Headers, or a body, that never come to an end."""
        for number in itertools.count():
            if stop.is_set():
                return
            begin = _SLOW_HEAD if number % 2 else _SLOW_HEAD + b"content-length: 100000\r\n\r\n"
            await self._until_shown_out(stop, begin, b" ", record)

    async def _slow_reader(self, stop: asyncio.Event, record: Record) -> None:
        """Large replies that nobody reads."""
        request = encode_request("POST", "/embed_all", self._deaf)
        while not stop.is_set():
            # Empty lines may stand between requests; sending one shows whether the connection still lives.
            await self._until_shown_out(stop, request, b"\r\n", record)

    async def _until_shown_out(self, stop: asyncio.Event, begin: bytes, piece: bytes, record: Record) -> None:
        with contextlib.suppress(ConnectionError):
            # A small buffer, and nobody who reads from it: the reply stays with the gateway.
            reader, writer = await asyncio.open_connection(
                self._stack.gateway.host, self._stack.gateway.port, limit=1024
            )
            try:
                writer.write(begin)
                while not await _stopped(stop, 0.3):
                    if writer.is_closing() or reader.at_eof():
                        record.counts["slow clients shown out"] += 1
                        break
                    writer.write(piece)
            finally:
                writer.transport.abort()


def kinds(answers: KnownAnswers) -> dict[str, Iterator[Question]]:
    """Requests of every kind, in turn, with their answers."""
    generator, words = np.random.default_rng(9), random.Random(11)

    def texts(count: int) -> list[str]:
        return [" ".join(words.choices(_WORDS, k=words.randint(1, 30))) for _ in range(count)]

    def cycle(make: Callable[[], Question], count: int = 30) -> Iterator[Question]:
        return itertools.cycle([make() for _ in range(count)])

    return {
        "single text": cycle(lambda: answers.embed(texts(1))),
        "batch of texts": cycle(lambda: answers.embed(texts(words.randint(2, 30)))),
        "batch of ids": cycle(lambda: answers.embed_ids(random_ids(generator, 8, words.randint(1, 60)))),
        "bulk of ids": cycle(lambda: answers.embed_ids(random_ids(generator, 300, 20)), 2),
        "OpenAI": cycle(lambda: answers.openai(texts(3))),
        "OpenAI, base64": cycle(lambda: answers.openai(texts(3), encoded=True)),
        "Cohere": cycle(lambda: answers.cohere(texts(4))),
        "vLLM pooling": cycle(lambda: answers.pooling(texts(2))),
        "score": cycle(lambda: answers.score(texts(1)[0], texts(6))),
        "rerank": cycle(lambda: answers.rerank(texts(1)[0], texts(8))),
        "mistakes": itertools.cycle(MISTAKES),
    }


MISTAKES = (
    mistake("/embed", b'{"inputs": 3.5}', 422),
    mistake("/embed", b'{"inputs": ', 400),
    mistake("/embed", b'{"inputs": ["", "x"]}', 400),
    mistake("/embed", b'{"inputs": [[1, 99999999]]}', 422),
    mistake("/embed", b'{"inputs": ' + b"[" * 50_000, 400),
    mistake("/v1/embeddings", b'{"input": "x", "model": "no-such-model"}', 404),
    mistake("/v1/embeddings", b'{"input": [1, 2, 3]}', 400),
    mistake("/rerank", b'{"query": "x", "documents": []}', 400),
    mistake("/no-such-route", b"{}", 404),
)


async def _stopped(stop: asyncio.Event, seconds: float) -> bool:
    """Wait until `stop`, for at most `seconds`; whether it came."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
    return stop.is_set()
