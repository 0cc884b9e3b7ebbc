"""First come, first served: what waits, what may still come in, and what goes into the next batch.

A chunk enters whole or not at all, leaves sequence by sequence, and is answered once, through its one
future: one wake-up a chunk. Knows nothing of tensors, devices or the wire. All of it runs on one event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tulip_server import metrics
from tulip_server.errors import ChunkError, DeadlineExceeded, Overloaded, ShuttingDown

if TYPE_CHECKING:
    from rose_engine.batch import Sequence

Clock = Callable[[], float]  # seconds, never backwards


@dataclass(frozen=True, slots=True)
class BatchBudget:
    """Room in a batch."""

    max_tokens: int
    max_sequences: int

    def num_fitting(self, lengths: Iterable[int]) -> int:
        """How many sequences of `lengths` tokens fit, from the first up to the first that does not."""
        room, count = self.max_tokens, 0
        for length in lengths:
            room -= length
            if room < 0 or count == self.max_sequences:
                break
            count += 1
        return count

    def less(self, num_tokens: int, num_sequences: int) -> BatchBudget:
        """What is left once these are in; less than nothing after a sequence longer than the budget."""
        return BatchBudget(self.max_tokens - num_tokens, self.max_sequences - num_sequences)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkResult:
    """A chunk's rows `[R, ...]` as the engine made them, in its own order, and where its time went."""

    rows_RD: NDArray[Any]
    queue_seconds: float  # from arrival to the dispatch of the last sequence
    compute_seconds: float  # from there until the last row was on the host


class PendingSequence(NamedTuple):
    """One sequence of a chunk on its way through a batch."""

    chunk: PendingChunk
    position: int  # within the chunk, from 0

    @property
    def sequence(self) -> Sequence:
        """What the engine gets."""
        return self.chunk.sequences[self.position]


@dataclass(slots=True, eq=False)
class PendingChunk:
    """A chunk from arrival to answer: its sequences share one future and one deadline.

    The future ends with a `ChunkResult`, with a `ChunkError`, or cancelled. Sequences are taken in order; all
    or none make a row for each token.
    """

    sequences: tuple[Sequence, ...]
    future: asyncio.Future[ChunkResult]
    arrival: float  # on the batcher's clock, as is the deadline
    deadline: float = math.inf
    num_taken: int = field(default=0, init=False)
    _last_dispatch: float = field(default=math.nan, init=False)
    _parts: dict[int, NDArray[Any]] = field(default_factory=dict, init=False)  # rows, by first sequence
    _num_delivered: int = field(default=0, init=False)

    @property
    def per_token(self) -> bool:
        """Whether its rows are of tokens."""
        return self.sequences[0].per_token

    @property
    def num_waiting(self) -> int:
        """Sequences not yet taken."""
        return len(self.sequences) - self.num_taken

    def waiting_lengths(self) -> Iterator[int]:
        """Tokens of each sequence not yet taken."""
        return (sequence.num_tokens for sequence in islice(self.sequences, self.num_taken, None))

    def take(self, count: int, now: float) -> list[PendingSequence]:
        """The next `count` sequences, dispatched `now`."""
        first, self.num_taken = self.num_taken, self.num_taken + count
        self._last_dispatch = now
        return [PendingSequence(self, position) for position in range(first, self.num_taken)]

    def deliver(self, first: int, count: int, rows_RD: NDArray[Any], now: float) -> None:
        """Take in the rows of `count` sequences from position `first` on; the last complete the future."""
        if self.future.done():
            return
        self._parts[first] = rows_RD
        self._num_delivered += count
        if self._num_delivered == len(self.sequences):
            parts = [self._parts[position] for position in sorted(self._parts)]
            rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
            queue_seconds, compute_seconds = self._last_dispatch - self.arrival, now - self._last_dispatch
            self.future.set_result(ChunkResult(rows, queue_seconds, compute_seconds))

    def fail(self, error: ChunkError) -> None:
        """End the future with `error`, unless it has ended already."""
        if not self.future.done():
            self.future.set_exception(error)
            # Read here: a chunk whose client has left fails with nobody to read it, which is no mistake.
            self.future.exception()


class Batcher:
    """Chunks that wait, oldest first, bounded in tokens.

    `changed` is set when work arrives or the batcher closes; the runner waits for it.
    """

    def __init__(self, budget: BatchBudget, max_waiting_tokens: int, clock: Clock = time.monotonic) -> None:
        self.changed = asyncio.Event()
        self.closed = False
        self.waiting_tokens = 0
        self.waiting_sequences = 0
        self.now = clock
        self._budget = budget
        self._max_waiting_tokens = max_waiting_tokens
        self._chunks: OrderedDict[PendingChunk, None] = OrderedDict()  # each with something left to take

    def submit(self, sequences: tuple[Sequence, ...], timeout: float = math.inf) -> PendingChunk:
        """Queue a chunk of at least one sequence, all of it or nothing; `timeout` in seconds from now.

        A chunk that finds the queue empty is never too large.
        Raises `ShuttingDown` after `close`, `Overloaded` when the queue has no room.
        """
        assert sequences, "an empty chunk: this is a bug of the caller"
        if self.closed:
            raise ShuttingDown("the server is shutting down")
        num_tokens = sum(sequence.num_tokens for sequence in sequences)
        if self.waiting_tokens and self.waiting_tokens + num_tokens > self._max_waiting_tokens:
            queue = f"{self.waiting_tokens} of {self._max_waiting_tokens} tokens wait"
            raise Overloaded(f"{queue}: no room for {num_tokens} more")
        now = self.now()
        future: asyncio.Future[ChunkResult] = asyncio.get_running_loop().create_future()
        chunk = PendingChunk(sequences, future, now, now + timeout)
        self._chunks[chunk] = None
        self._count(len(sequences), num_tokens)
        self.changed.set()
        return chunk

    def next_batch(self) -> list[PendingSequence]:
        """Take the oldest sequences that fit the budget, in order of arrival, at least one of them.

        Rows of tokens and pooled ones never go together: they differ in width.
        Empty only if nothing alive waits: chunks that ended or expired meanwhile are dropped on the way.
        """
        now = self.now()
        batch: list[PendingSequence] = []
        room = self._budget
        while (chunk := self._oldest_alive(now)) is not None:
            if batch and batch[0].chunk.per_token != chunk.per_token:
                break
            # The first sequence goes even if it is longer than the budget: alone, instead of never.
            count = room.num_fitting(chunk.waiting_lengths()) or int(not batch)
            num_tokens = sum(islice(chunk.waiting_lengths(), count))
            batch += chunk.take(count, now)
            room = room.less(num_tokens, count)
            self._count(-count, -num_tokens)
            if chunk.num_waiting:
                break
            del self._chunks[chunk]
        return batch

    def fail(self, chunk: PendingChunk, error: ChunkError) -> None:
        """End `chunk` with `error` and forget what of it still waits; nothing happens if it has ended."""
        chunk.fail(error)
        self._drop(chunk, error.outcome)

    def close(self) -> None:
        """Refuse new chunks; those that wait still go out."""
        self.closed = True
        self.changed.set()

    def abandon(self, error: ChunkError) -> None:
        """Refuse new chunks and fail all that wait."""
        self.close()
        for chunk in list(self._chunks):
            self.fail(chunk, error)

    def _oldest_alive(self, now: float) -> PendingChunk | None:
        while self._chunks:
            chunk = next(iter(self._chunks))
            if chunk.future.done():
                self._drop(chunk, "cancelled")
            elif chunk.deadline <= now:
                self.fail(chunk, DeadlineExceeded("the deadline passed while the chunk waited"))
            else:
                return chunk
        return None

    def _drop(self, chunk: PendingChunk, reason: str) -> None:
        if chunk in self._chunks:
            del self._chunks[chunk]
            metrics.sequences_skipped(reason, chunk.num_waiting)
            self._count(-chunk.num_waiting, -sum(chunk.waiting_lengths()))

    def _count(self, num_sequences: int, num_tokens: int) -> None:
        self.waiting_sequences += num_sequences
        self.waiting_tokens += num_tokens
        metrics.queue_changed(self.waiting_sequences, self.waiting_tokens)
