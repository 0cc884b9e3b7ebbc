"""The loop between queue and engine: pop, step, await the rows, deliver.

Up to `depth` batches are with the engine at once, so that one is prepared while another runs. Knows nothing
of the wire, and of the engine only `step`, `would_block`, how many values a row has, and the `LazyTensor`
that comes back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby
from typing import Protocol

import numpy as np

from rose_engine.batch import Batch, RowLayout
from rose_engine.description import ModelDescription
from rose_engine.errors import DeviceLost, StepError
from rose_engine.lazy_tensor import LazyTensor, finite_rows
from tulip_server import metrics
from tulip_server.batcher import Batcher, PendingChunk, PendingSequence
from tulip_server.errors import ChunkError, DeviceUnusable, NonFiniteRow, ShuttingDown, StepFailed

log = logging.getLogger(__name__)


class StepEngine(Protocol):
    """The part of `rose_engine.engine.Engine` that the runner needs."""

    @property
    def description(self) -> ModelDescription:
        """The loaded model."""
        ...

    def step(self, batch: Batch) -> LazyTensor:
        """Launch `batch`; hand back its rows `[R, D]` without waiting for them."""
        ...

    def would_block(self, batch: Batch) -> bool:
        """Whether `step` would hold up its caller to compile or capture."""
        ...


class Event(Enum):
    """What the loop does next."""

    NEW_WORK = auto()
    COLD_STEP_LAUNCHED = auto()
    OLDEST_RESULT = auto()
    END = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A batch that is with the engine."""

    batch: list[PendingSequence]
    rows: LazyTensor
    layout: RowLayout | None  # of the rows; None: one from each sequence

    def rows_of(self, run: slice) -> slice:
        """Where the rows of a stretch of the batch lie."""
        if self.layout is None:
            return run
        cu_rows = self.layout.of_sequences.cu_lengths
        return slice(int(cu_rows[run.start]), int(cu_rows[run.stop]))

    def position_of(self, row: int) -> int:
        """The place, in its chunk, of the sequence that a row belongs to."""
        if self.layout is not None:
            row = int(np.searchsorted(self.layout.of_sequences.cu_lengths, row, side="right")) - 1
        return self.batch[row].position


@dataclass(frozen=True, slots=True, eq=False)
class ColdStep:
    """A batch whose step is on the worker thread."""

    batch: list[PendingSequence]
    launch: asyncio.Future[LazyTensor]
    layout: RowLayout | None


class Runner:
    """Feeds one engine from one batcher, in order of arrival.

    Where `step` runs: inline on the event loop, because a hot step costs tens of microseconds and a
    hand-over to another thread and back costs more (and fights over the interpreter lock with the loop's
    own work). One that would block, because it compiles, captures, or launches a large batch kernel by
    kernel, runs on a worker thread: results, health checks, cancels and refusals go on meanwhile, and the
    next batch is launched once this one is.
    """

    def __init__(self, engine: StepEngine, batcher: Batcher, depth: int) -> None:
        assert depth >= 1
        self._engine = engine
        self._batcher = batcher
        self._depth = depth
        self._loop = asyncio.get_running_loop()
        self._in_flight: deque[Flight] = deque()
        self._cold_step: ColdStep | None = None
        self._cold_steps = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cold-step")

    async def run(self) -> None:
        """Serve until the batcher is closed and everything accepted is answered.

        Raises `DeviceLost` when the engine does. However it ends, no chunk is left without an answer.
        """
        try:
            while (event := await self._next_event()) is not Event.END:
                self._handle(event)
        except BaseException as error:
            self._abandon(_failure(error))
            raise
        finally:
            self._cold_steps.shutdown(wait=False)

    async def close(self) -> None:
        """Wait for a cold step that outlived the loop: the engine must not be closed under it."""
        await asyncio.to_thread(self._cold_steps.shutdown)

    async def _next_event(self) -> Event:
        # Between two events replies go out and chunks come in, however much work waits.
        await asyncio.sleep(0)
        while (event := self._event_now()) is None:
            await self._change()
        return event

    def _event_now(self) -> Event | None:
        if self._cold_step is not None and self._cold_step.launch.done():
            return Event.COLD_STEP_LAUNCHED
        if self._may_launch() and self._batcher.waiting_sequences:
            return Event.NEW_WORK
        if self._in_flight and self._in_flight[0].rows.ready():
            return Event.OLDEST_RESULT
        idle = not self._in_flight and self._cold_step is None
        return Event.END if idle and self._batcher.closed else None

    def _may_launch(self) -> bool:
        return self._cold_step is None and len(self._in_flight) < self._depth

    async def _change(self) -> None:
        self._batcher.changed.clear()
        await self._batcher.changed.wait()

    def _handle(self, event: Event) -> None:
        match event:
            case Event.NEW_WORK:
                self._launch(self._batcher.next_batch())
            case Event.COLD_STEP_LAUNCHED:
                assert self._cold_step is not None
                cold, self._cold_step = self._cold_step, None
                self._enter(cold.batch, cold.launch.result, cold.layout)
            case Event.OLDEST_RESULT:
                self._deliver(self._in_flight.popleft())

    def _launch(self, batch: list[PendingSequence]) -> None:
        if not batch:
            return
        packed = Batch.pack(pending.sequence for pending in batch)
        metrics.batch_dispatched(packed.num_sequences, packed.num_tokens)
        if self._engine.would_block(packed):
            launch = self._loop.run_in_executor(self._cold_steps, self._engine.step, packed)
            launch.add_done_callback(lambda _: self._batcher.changed.set())
            self._cold_step = ColdStep(batch, launch, packed.rows)
        else:
            self._enter(batch, lambda: self._engine.step(packed), packed.rows)

    def _enter(
        self, batch: list[PendingSequence], step: Callable[[], LazyTensor], layout: RowLayout | None
    ) -> None:
        """Put `batch` in flight, or fail it with what `step` raises."""
        try:
            rows = step()
        except BaseException as error:
            self._fail(batch, error)
            if _ends_the_loop(error):
                raise
            return
        self._in_flight.append(Flight(batch, rows, layout))
        metrics.in_flight_changed(len(self._in_flight))
        rows.add_done_callback(self._announce)

    def _announce(self, _rows: LazyTensor) -> None:
        """Tell the loop that a result is there; called from a thread of the engine."""
        self._loop.call_soon_threadsafe(self._batcher.changed.set)

    def _deliver(self, flight: Flight) -> None:
        """Hand each chunk its rows. A row that is not finite fails its own chunk and no other."""
        metrics.in_flight_changed(len(self._in_flight))
        try:
            rows_RD = flight.rows.result()
            assert len(rows_RD) == flight.rows_of(slice(0, len(flight.batch))).stop, (
                "not the rows that were asked for: this is a bug of the engine"
            )
            good_R = finite_rows(rows_RD, self._engine.description.dimensions)
        except Exception as error:
            self._fail(flight.batch, error)
            if _ends_the_loop(error):
                raise
            return
        now = self._batcher.now()
        for chunk, run in _runs(flight.batch):
            rows = flight.rows_of(run)
            if good_R[rows].all():
                first = flight.batch[run.start].position
                chunk.deliver(first, run.stop - run.start, rows_RD[rows], now)
            else:
                bad = rows.start + int(np.argmin(good_R[rows]))
                self._batcher.fail(chunk, NonFiniteRow(flight.position_of(bad)))

    def _fail(self, batch: list[PendingSequence], error: BaseException) -> None:
        log.error("a batch of %d sequences failed", len(batch), exc_info=error)
        for chunk, _ in _runs(batch):
            self._batcher.fail(chunk, _failure(error))

    def _abandon(self, reason: ChunkError) -> None:
        abandoned = [flight.batch for flight in self._in_flight]
        if self._cold_step is not None:
            abandoned.append(self._cold_step.batch)
        self._in_flight.clear()
        self._cold_step = None
        for batch in abandoned:
            for chunk, _ in _runs(batch):
                self._batcher.fail(chunk, reason)
        metrics.in_flight_changed(0)
        self._batcher.abandon(reason)


def _runs(batch: list[PendingSequence]) -> Iterator[tuple[PendingChunk, slice]]:
    """The chunks in `batch` and the stretch of it that each of them has."""
    start = 0
    for chunk, group in groupby(batch, key=lambda pending: pending.chunk):
        stop = start + sum(1 for _ in group)
        yield chunk, slice(start, stop)
        start = stop


def _ends_the_loop(error: BaseException) -> bool:
    return isinstance(error, DeviceLost) or not isinstance(error, Exception)


def _failure(error: BaseException) -> ChunkError:
    """What a chunk is told when `error` took its rows."""
    match error:
        case DeviceLost():
            return DeviceUnusable(f"the device is lost: {error}")
        case StepError():
            return StepFailed(str(error))
        case asyncio.CancelledError():
            return ShuttingDown("the server shut down before the chunk was finished")
        case _:
            return StepFailed("the step failed inside the server; its log says why")
