"""A chunk from arrival to answer, and its sequences on their way through batches.

Knows nothing of queues, tensors or the wire.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tulip_server.errors import ChunkError

if TYPE_CHECKING:
    from rose_engine.batch import Sequence

log = logging.getLogger(__name__)


class Lane(Enum):
    """Who waits in front of whom; the values are the metrics' labels."""

    INTERACTIVE = "interactive"  # somebody waits for the answer
    BULK = "bulk"  # a part of something large


@dataclass(frozen=True, slots=True, eq=False)
class ChunkResult:
    """A chunk's rows `[R, ...]` as the engine made them, in its own order, and where its time went."""

    rows_RD: NDArray[Any]
    queue_seconds: float  # from arrival to the dispatch of the last sequence
    compute_seconds: float  # from there until the last row was on the host


class ChunkPart(NamedTuple):
    """Sequences of a chunk, one after the other, on their way through one batch."""

    chunk: PendingChunk
    first: int  # position within the chunk, from 0
    number: int  # of sequences

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """What the engine gets."""
        return self.chunk.sequences[self.first : self.first + self.number]


@dataclass(slots=True, eq=False)
class PendingChunk:
    """A chunk from arrival to answer: its sequences share one future and one deadline.

    The future ends with a `ChunkResult`, with a `ChunkError`, or cancelled. Sequences are taken in order; all
    or none make a row for each token. `on_end` is for who must not wait for the next turn of the event loop,
    as whoever awaits the future does, and perhaps behind the launch of a batch.
    """

    sequences: tuple[Sequence, ...]
    future: asyncio.Future[ChunkResult]
    arrival: float  # on the batcher's clock, as is the deadline
    deadline: float = math.inf
    lane: Lane = Lane.INTERACTIVE
    on_end: Callable[[], None] | None = None  # called once, when it has a result or an error
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

    @property
    def waits(self) -> bool:
        """Whether something of it is still to be taken, and somebody wants it."""
        return self.num_waiting > 0 and not self.future.done()

    def waiting_lengths(self) -> Iterator[int]:
        """Tokens of each sequence not yet taken."""
        return (sequence.num_tokens for sequence in islice(self.sequences, self.num_taken, None))

    def take(self, count: int, now: float) -> ChunkPart:
        """The next `count` sequences, dispatched `now`."""
        first, self.num_taken = self.num_taken, self.num_taken + count
        self._last_dispatch = now
        return ChunkPart(self, first, count)

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
            self._ended()

    def fail(self, error: ChunkError) -> None:
        """End the future with `error`, unless it has ended already."""
        if not self.future.done():
            self.future.set_exception(error)
            # Read here: a chunk whose client has left fails with nobody to read it, which is no mistake.
            self.future.exception()
            self._ended()

    def _ended(self) -> None:
        if (on_end := self.on_end) is not None:
            self.on_end = None
            try:
                on_end()
            except Exception:  # costs this answer, and not the batch that others are in
                log.exception("this is a bug: what follows the end of a chunk failed")
