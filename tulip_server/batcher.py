"""Who goes next: what waits, what may still come in, and what goes into the next batch.

Two lanes, each first come, first served. Interactive chunks go first; a bulk lane that has had no turn for
its patience gets the next batch before them. So neither lane starves the other: not even a bulk backlog of
minutes holds an interactive chunk up for more than one batch in each such time. What one lane leaves free
of a batch the other may fill.

A chunk enters whole or not at all, leaves sequence by sequence, and is answered once, through its one
future: one wake-up a chunk. Knows nothing of tensors, devices or the wire. All of it runs on one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING

from tulip_server import metrics
from tulip_server.chunk import ChunkPart, ChunkResult, Lane, PendingChunk
from tulip_server.errors import ChunkError, DeadlineExceeded, Overloaded, ShuttingDown, Wedged

if TYPE_CHECKING:
    from rose_engine.batch import Sequence

Clock = Callable[[], float]  # seconds, never backwards

# Entries of chunks that are gone, which the heap of deadlines may hold beside one for each that waits.
_STALE_DEADLINES = 64


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


class Line:
    """The chunks of one lane that have something left to take, in order of arrival, and how much that is."""

    def __init__(self) -> None:
        self.chunks: OrderedDict[PendingChunk, None] = OrderedDict()
        self.waiting_tokens = 0
        self.waiting_sequences = 0

    def append(self, chunk: PendingChunk, num_tokens: int) -> None:
        """Queue a whole chunk of `num_tokens`."""
        self.chunks[chunk] = None
        self.waiting_tokens += num_tokens
        self.waiting_sequences += len(chunk.sequences)

    def take(self, chunk: PendingChunk, number: int, now: float) -> tuple[ChunkPart, int]:
        """The next `number` sequences of a chunk, dispatched `now`, and their tokens."""
        num_tokens = sum(islice(chunk.waiting_lengths(), number))
        part = chunk.take(number, now)
        self.waiting_tokens -= num_tokens
        self.waiting_sequences -= number
        if not chunk.num_waiting:
            del self.chunks[chunk]
        return part, num_tokens

    def remove(self, chunk: PendingChunk) -> None:
        """Forget what of a chunk still waits."""
        del self.chunks[chunk]
        self.waiting_tokens -= sum(chunk.waiting_lengths())
        self.waiting_sequences -= chunk.num_waiting


class Deadlines:
    """Chunks by their deadline. One that is gone stays for a while, so few of those that nothing grows."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, PendingChunk]] = []
        self._number = count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, chunk: PendingChunk, num_waiting: int) -> None:
        """Take in a chunk; `num_waiting` chunks wait now."""
        if chunk.deadline == math.inf:
            return
        heapq.heappush(self._heap, (chunk.deadline, next(self._number), chunk))
        if len(self._heap) > 2 * num_waiting + _STALE_DEADLINES:
            self._heap = [entry for entry in self._heap if entry[2].waits]
            heapq.heapify(self._heap)

    def expired(self, now: float) -> Iterator[PendingChunk]:
        """Give out, once, each chunk that still waits and whose deadline has passed."""
        while self._heap and self._heap[0][0] <= now:
            chunk = heapq.heappop(self._heap)[2]
            if chunk.waits:
                yield chunk


class Batcher:
    """Chunks that wait, bounded in tokens: `max_waiting_tokens`, interactive ones `reserved_tokens` more.

    `changed` is set when work arrives or the batcher closes; the runner waits for it. While `wedged` is set,
    nothing is taken in. `bulk_patience` in seconds.
    """

    def __init__(
        self,
        budget: BatchBudget,
        max_waiting_tokens: int,
        clock: Clock = time.monotonic,
        *,
        reserved_tokens: int = 0,
        bulk_patience: float = 0.5,
    ) -> None:
        self.changed = asyncio.Event()
        self.closed = False
        self.wedged = False
        self.now = clock
        self.lines = {lane: Line() for lane in Lane}
        self._interactive, self._bulk = self.lines[Lane.INTERACTIVE], self.lines[Lane.BULK]
        self._budget = budget
        self._room = {
            Lane.INTERACTIVE: max_waiting_tokens + reserved_tokens,
            Lane.BULK: max_waiting_tokens,
        }
        self._bulk_patience = bulk_patience
        self._bulk_turn = -math.inf  # when bulk last had half of a batch or more
        self._deadlines = Deadlines()

    @property
    def waiting_tokens(self) -> int:
        """Tokens accepted, not yet dispatched."""
        return self._interactive.waiting_tokens + self._bulk.waiting_tokens

    @property
    def waiting_sequences(self) -> int:
        """Sequences accepted, not yet dispatched."""
        return self._interactive.waiting_sequences + self._bulk.waiting_sequences

    def submit(
        self, sequences: tuple[Sequence, ...], timeout: float = math.inf, lane: Lane = Lane.INTERACTIVE
    ) -> PendingChunk:
        """Queue a chunk of at least one sequence, all of it or nothing; `timeout` in seconds from now.

        A chunk that finds the queue empty is never too large. Raises `ShuttingDown` after `close`, `Wedged`
        while the device is, `Overloaded` when the queue has no room.
        """
        assert sequences, "an empty chunk: this is a bug of the caller"
        num_tokens = sum([sequence.num_tokens for sequence in sequences])
        now = self.now()
        try:
            self._admit(num_tokens, lane, now)
        except ChunkError as error:
            metrics.chunk_refused(error.outcome, lane.value)
            raise
        future: asyncio.Future[ChunkResult] = asyncio.get_running_loop().create_future()
        chunk = PendingChunk(sequences, future, now, now + timeout, lane)
        self.lines[lane].append(chunk, num_tokens)
        self._deadlines.add(chunk, len(self._interactive.chunks) + len(self._bulk.chunks))
        self.changed.set()
        return chunk

    def next_batch(self) -> list[ChunkPart]:
        """Take the sequences that go next, as many as fit the budget, at least one of them.

        Rows of tokens and pooled ones never go together: they differ in width.
        Empty only if nothing alive waits: chunks that ended or expired meanwhile are dropped on the way.
        """
        now, batch, room, bulk_tokens = self.now(), list[ChunkPart](), self._budget, 0
        for line in self._lines_in_turn(now):
            left = self._fill(batch, line, room, now)
            if line is self._bulk:
                bulk_tokens = room.max_tokens - left.max_tokens
            room = left
        if bulk_tokens and 2 * bulk_tokens >= self._budget.max_tokens - room.max_tokens:
            self._bulk_turn = now
        return batch

    def expire(self) -> None:
        """Fail every chunk whose deadline has passed while it waited, wherever in its lane it is."""
        for chunk in self._deadlines.expired(self.now()):
            self.fail(chunk, _expired())

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
        for line in self.lines.values():
            for chunk in list(line.chunks):
                self.fail(chunk, error)

    def _admit(self, num_tokens: int, lane: Lane, now: float) -> None:
        """Raise what keeps a chunk of `num_tokens` out, if anything does."""
        if self.closed:
            raise ShuttingDown("the server is shutting down")
        if self.wedged:
            raise Wedged("the device has not answered for long: nothing is taken in until it does")
        if self._has_room(num_tokens, lane):
            return
        for chunk in self._deadlines.expired(now):
            self.fail(chunk, _expired())
        if not self._has_room(num_tokens, lane):
            queue = f"{self.waiting_tokens} of {self._room[lane]} tokens wait"
            raise Overloaded(f"{queue}: no room for {num_tokens} more")

    def _has_room(self, num_tokens: int, lane: Lane) -> bool:
        waiting = self.waiting_tokens
        return not waiting or waiting + num_tokens <= self._room[lane]

    def _lines_in_turn(self, now: float) -> tuple[Line, Line]:
        oldest = self._oldest_alive(self._bulk, now) if self._bulk.chunks else None
        if oldest is not None and now - max(oldest.arrival, self._bulk_turn) >= self._bulk_patience:
            return self._bulk, self._interactive
        return self._interactive, self._bulk

    def _fill(self, batch: list[ChunkPart], line: Line, room: BatchBudget, now: float) -> BatchBudget:
        """Add to `batch` what fits of `line`, in order of arrival; the room that is left."""
        while (chunk := self._oldest_alive(line, now)) is not None:
            if batch and batch[0].chunk.per_token != chunk.per_token:
                break
            # The first sequence goes even if it is longer than the budget: alone, instead of never.
            number = room.num_fitting(chunk.waiting_lengths()) or int(not batch)
            if not number:
                break
            part, num_tokens = line.take(chunk, number, now)
            batch.append(part)
            room = room.less(num_tokens, number)
            if chunk.num_waiting:
                break
        return room

    def _oldest_alive(self, line: Line, now: float) -> PendingChunk | None:
        while line.chunks:
            chunk = next(iter(line.chunks))
            if chunk.future.done():
                self._drop(chunk, "cancelled")
            elif chunk.deadline <= now:
                self.fail(chunk, _expired())
            else:
                return chunk
        return None

    def _drop(self, chunk: PendingChunk, reason: str) -> None:
        line = self.lines[chunk.lane]
        if chunk in line.chunks:
            metrics.sequences_skipped(reason, chunk.num_waiting)
            line.remove(chunk)


def _expired() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed while the chunk waited")
