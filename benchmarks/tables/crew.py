"""Client processes: each makes its own inputs ready, then all start together.

They live as long as the crew and share nothing with the server but its address.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from benchmarks.http_client import encode_request
from benchmarks.tables import closed_loop
from benchmarks.tables.dialects import Dialect
from benchmarks.tables.workloads import Cell, InputMaker

_READY_SECONDS = 300.0
T = TypeVar("T")
Answer = closed_loop.Timings | Exception | None
CLIENTS = ("raw", "aiohttp")


@dataclass(frozen=True, slots=True)
class Target:
    """A server as clients see it, and what inputs for it are made with."""

    address: tuple[str, int]
    model: str
    dialect: Dialect
    tokenizer_file: Path
    vocabulary_size: int
    client: str = "raw"


@dataclass(frozen=True, slots=True)
class Task:
    """One process's share of a cell."""

    target: Target
    cell: Cell
    count: int  # of requests
    concurrency: int
    seed: tuple[int, int]  # of the run, and of the process


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a cell gave."""

    milliseconds: list[float]
    requests_per_second: float


class Crew:
    """Processes that send; a context that ends them."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Pipe] = []
        self._processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:  # they hold nothing that could be lost
            process.kill()
        for process in self._processes:
            process.join()

    def run(self, target: Target, cell: Cell, count: int, seconds: float, seed: int) -> Run:
        """Send up to `count` requests of `cell` within `seconds`. Raises `closed_loop.RequestFailed`."""
        pipes = self._pipes[: cell.processes]
        shares = [_share(cell.concurrency, len(pipes), i) for i in range(len(pipes))]
        for i, (pipe, concurrency) in enumerate(zip(pipes, shares, strict=True)):
            mine = max(concurrency, -(-count * concurrency // cell.concurrency))
            pipe.send(Task(target, cell, mine, concurrency, (seed, i)))
        self._agree(pipes, [_answer(pipe, _READY_SECONDS) for pipe in pipes], seconds)
        return _joined(_checked([_answer(pipe, seconds + _READY_SECONDS) for pipe in pipes]))

    @staticmethod
    def _agree(pipes: Sequence[Pipe], answers: Sequence[Answer], seconds: float) -> None:
        """Let all start, or none where one could not make its inputs."""
        failed = any(isinstance(answer, Exception) for answer in answers)
        for pipe in pipes:
            pipe.send(None if failed else seconds)
        _checked(answers)


def _share(total: int, parts: int, index: int) -> int:
    return total // parts + (index < total % parts)


def _answer(pipe: Pipe, timeout: float) -> Answer:
    if not pipe.poll(timeout):
        raise closed_loop.RequestFailed(f"a client process was silent for {timeout:.0f} s")
    try:
        answer: Answer = pipe.recv()
    except EOFError:
        raise closed_loop.RequestFailed("a client process ended") from None
    return answer


def _checked(answers: Sequence[Answer]) -> list[closed_loop.Timings]:
    for answer in answers:
        if isinstance(answer, Exception):
            raise closed_loop.RequestFailed(str(answer)) from answer
    return [answer for answer in answers if isinstance(answer, closed_loop.Timings)]


def _joined(parts: Sequence[closed_loop.Timings]) -> Run:
    first = min(min(part.sent) for part in parts)
    last = max(max(part.received) for part in parts)
    milliseconds = [value for part in parts for value in part.milliseconds]
    return Run(milliseconds, len(milliseconds) / ((last - first) / 1e9))


def _work(pipe: Pipe) -> None:
    """What one client process runs: a task, whether its inputs are ready, the go, what came of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its clients
    with contextlib.suppress(EOFError, BrokenPipeError):  # it is gone
        while True:
            task: Task = pipe.recv()
            requests = _caught(partial(_prepare, task))
            pipe.send(requests if isinstance(requests, Exception) else None)
            if (seconds := pipe.recv()) is not None and not isinstance(requests, Exception):
                pipe.send(_caught(partial(_drive, task, requests, seconds)))


def _caught(work: Callable[[], T]) -> T | Exception:
    """What `work` gives, or what it raises, in words that travel between processes."""
    try:
        return work()
    except closed_loop.RequestFailed as error:
        return error
    except Exception as error:  # noqa: BLE001 - told to the parent, which raises it
        return RuntimeError(f"{type(error).__name__}: {error}")


def _prepare(task: Task) -> list[bytes]:
    target, cell = task.target, task.cell
    maker = InputMaker(target.tokenizer_file, target.vocabulary_size, cell.seed, *task.seed)
    path = target.dialect.path(cell)
    return [
        encode_request("POST", path, target.dialect.body(cell, target.model, inputs))
        for inputs in maker.requests(cell, task.count)
    ]


def _drive(task: Task, requests: list[bytes], seconds: float) -> closed_loop.Timings:
    if task.target.client == "aiohttp":
        from benchmarks.tables import aiohttp_client

        return aiohttp_client.drive(task.target.address, requests, task.concurrency, seconds)
    return closed_loop.drive(task.target.address, requests, task.concurrency, seconds)
