"""The loop between queue and engine: pop, step, await the rows, deliver.

Up to `depth` batches are with the engine at once, so that one is prepared while another runs. Knows nothing
of the wire, and of the engine only its steps, what they may cost, how many values a row has, and the
`LazyTensor` that comes back.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import numpy as np

from protos.stamps import stamp
from rose_engine.batch import Batch, RowLayout
from rose_engine.description import ModelDescription
from rose_engine.errors import DeviceLost, StepError
from rose_engine.lazy_tensor import LazyTensor, finite_rows
from tulip_server import metrics
from tulip_server.batcher import Batcher
from tulip_server.chunk import ChunkPart
from tulip_server.errors import ChunkError, DeviceUnusable, NonFiniteRow, ShuttingDown, StepFailed
from tulip_server.step_clock import Step, StepClock

log = logging.getLogger(__name__)

# Between two looks at a result while another step is being launched on its thread: a loop that never rests
# takes the interpreter from it again and again.
_SECONDS_BESIDE_A_COLD_STEP = 0.0005
# Beside a device that is polled anyway, a loop without work goes on turning for so long before it sleeps: the
# kernel, and the more so a virtual machine's, takes 50 to 100 us to wake a thread for the next request.
_RESTLESS_SECONDS = 0.002


class StepEngine(Protocol):
    """The part of `rose_engine.engine.Engine` that the runner needs."""

    @property
    def description(self) -> ModelDescription:
        """The loaded model."""
        ...

    @property
    def polled(self) -> bool:
        """Whether results are had soonest by asking `ready()`, instead of by a callback."""
        ...

    def step(self, batch: Batch) -> LazyTensor:
        """Launch `batch`; hand back its rows `[R, D]` without waiting for them."""
        ...

    def would_block(self, batch: Batch) -> bool:
        """Whether `step` would hold up its caller: compile, capture, or launch for long."""
        ...

    def may_compile(self, batch: Batch) -> bool:
        """Whether a step that would block may take far longer than such steps do: it compiles or captures."""
        ...

    def step_seconds(self, num_tokens: int) -> float | None:
        """What a step of so many tokens takes, where the engine has measured that."""
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

    batch: list[ChunkPart]
    step: Step
    layout: RowLayout | None  # of the rows; None: one from each sequence
    rows: LazyTensor

    @property
    def num_rows(self) -> int:
        """Rows that were asked for."""
        return sum([part.number for part in self.batch]) if self.layout is None else self.layout.num_rows

    def parts(self) -> Iterator[tuple[ChunkPart, slice]]:
        """Each part of the batch, and where its rows lie."""
        start = 0
        for part in self.batch:
            stop = start + part.number
            yield part, self._rows_of(start, stop)
            start = stop

    def position_of(self, row: int, part: ChunkPart, first_row: int) -> int:
        """The place, in its chunk, of the sequence that a row of `part` belongs to."""
        return part.first + self._sequence_of(row) - self._sequence_of(first_row)

    def _rows_of(self, start: int, stop: int) -> slice:
        if self.layout is None:
            return slice(start, stop)
        cu_rows = self.layout.of_sequences.cu_lengths
        return slice(int(cu_rows[start]), int(cu_rows[stop]))

    def _sequence_of(self, row: int) -> int:
        if self.layout is None:
            return row
        return int(np.searchsorted(self.layout.of_sequences.cu_lengths, row, side="right")) - 1


@dataclass(frozen=True, slots=True, eq=False)
class ColdStep:
    """A batch whose step is on the worker thread."""

    batch: list[ChunkPart]
    step: Step
    layout: RowLayout | None
    launch: asyncio.Future[LazyTensor]


class Runner:
    """Feeds one engine from one batcher, in order of arrival.

    Where `step` runs: inline on the event loop, because a hot step costs tens of microseconds and a
    hand-over to another thread and back costs more (and fights over the interpreter lock with the loop's
    own work). For the same reason the results of a device that has no thread of its own are asked for in
    each turn of the loop while it computes. A step that would block, because it compiles, captures, or
    launches a large batch kernel by kernel, runs on a worker thread: results, health checks, cancels and
    refusals go on meanwhile, and the next batch is launched once this one is.

    `cold_step_seconds`: see `StepClock`.
    """

    def __init__(
        self, engine: StepEngine, batcher: Batcher, depth: int, cold_step_seconds: float = 60.0
    ) -> None:
        assert depth >= 1
        self.step_clock = StepClock(engine.step_seconds, cold_step_seconds)
        self._engine = engine
        self._batcher = batcher
        self._depth = depth
        self._loop = asyncio.get_running_loop()
        self._in_flight: deque[Flight] = deque()
        self._cold_step: ColdStep | None = None
        self._cold_steps = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cold-step")
        self._last_cold_launch: asyncio.Future[LazyTensor] | None = None
        self._last_return = -math.inf  # when a batch last came back

    @property
    def num_in_flight(self) -> int:
        """Batches with the engine."""
        return len(self._in_flight) + (self._cold_step is not None)

    @property
    def oldest_step(self) -> Step | None:
        """What the engine has held for longest."""
        if self._in_flight:
            return self._in_flight[0].step
        return None if self._cold_step is None else self._cold_step.step

    def step_age(self, step: Step, now: float) -> float:
        """Seconds since the engine could begin with `step`, the oldest one."""
        return now - max(step.launched, self._last_return)

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

    async def close(self, seconds: float) -> bool:
        """Wait for a cold step that outlived the loop: the engine must not be closed under it.

        False if it has not returned after `seconds`.
        """
        launch = self._last_cold_launch
        if launch is None:
            return True
        await asyncio.wait({launch}, timeout=seconds)
        if launch.done() and not launch.cancelled():
            launch.exception()  # nobody else may have asked
        return launch.done()

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
        if self._engine.polled:
            await self._poll()
            if self._in_flight:
                return
        await self._batcher.changed.wait()

    async def _poll(self) -> None:
        """Turn with the loop while a result, or for a moment a chunk, may come."""
        restless_until = self._batcher.now() + _RESTLESS_SECONDS
        # Only a thread that waits could set an event here, and to be woken by one is what this saves.
        while self._polls(restless_until):  # noqa: ASYNC110
            await asyncio.sleep(0 if self._cold_step is None else _SECONDS_BESIDE_A_COLD_STEP)

    def _polls(self, restless_until: float) -> bool:
        """Whether the loop is to turn once more: nothing has happened, and something may at any moment."""
        if self._batcher.changed.is_set():
            return False
        if self._in_flight:
            return not self._in_flight[0].rows.ready()
        return self._cold_step is None and self._batcher.now() < restless_until

    def _handle(self, event: Event) -> None:
        match event:
            case Event.NEW_WORK:
                self._launch(self._batcher.next_batch())
            case Event.COLD_STEP_LAUNCHED:
                assert self._cold_step is not None
                cold, self._cold_step = self._cold_step, None
                self._enter(cold.batch, cold.step, cold.layout, cold.launch.result)
            case Event.OLDEST_RESULT:
                flight, now = self._in_flight.popleft(), self._batcher.now()
                self._deliver(flight, now)
                self._note_return(flight.step, now)  # when the rows are on their way

    def _launch(self, batch: list[ChunkPart]) -> None:
        if not batch:
            return
        stamp("tulip.dispatched")
        packed = Batch.pack([sequence for part in batch for sequence in part.sequences])
        now = self._batcher.now()
        if self._engine.would_block(packed):
            step = Step(packed.num_tokens, now, self._engine.may_compile(packed))
            launch = self._loop.run_in_executor(self._cold_steps, self._engine.step, packed)
            launch.add_done_callback(lambda _: self._batcher.changed.set())
            self._cold_step = ColdStep(batch, step, packed.rows, launch)
            self._last_cold_launch = launch
        else:
            step = Step(packed.num_tokens, now, cold=False)
            self._enter(batch, step, packed.rows, lambda: self._engine.step(packed))
        metrics.batch_dispatched(packed.num_sequences, packed.num_tokens)  # when the device has its work

    def _enter(
        self,
        batch: list[ChunkPart],
        step: Step,
        layout: RowLayout | None,
        launch: Callable[[], LazyTensor],
    ) -> None:
        """Put `batch` in flight, or fail it with what `launch` raises."""
        try:
            rows = launch()
        except BaseException as error:
            self._fail(batch, error)
            if _ends_the_loop(error):
                raise
            return
        stamp("tulip.launched")
        self._in_flight.append(Flight(batch, step, layout, rows))
        if not self._engine.polled:
            rows.add_done_callback(self._announce)

    def _announce(self, _rows: LazyTensor) -> None:
        """Tell the loop that a result is there; called from a thread of the engine."""
        stamp("tulip.rows")
        try:
            self._loop.call_soon_threadsafe(self._batcher.changed.set)
        except RuntimeError:  # the loop has ended without this step
            log.warning("a step returned after the server had given it up")

    def _deliver(self, flight: Flight, now: float) -> None:
        """Hand each chunk its rows. A row that is not finite fails its own chunk and no other."""
        if self._engine.polled:
            stamp("tulip.rows")  # nobody has told
        stamp("tulip.collected")
        try:
            rows_RD = flight.rows.result()
            assert len(rows_RD) == flight.num_rows, (
                "not the rows that were asked for: this is a bug of the engine"
            )
            good_R = finite_rows(rows_RD, self._engine.description.dimensions)
        except Exception as error:
            self._fail(flight.batch, error)
            if _ends_the_loop(error):
                raise
            return
        for part, rows in flight.parts():
            worst = rows.start + int(good_R[rows].argmin())  # the first that is not good, if there is one
            if good_R[worst]:
                part.chunk.deliver(part.first, part.number, rows_RD[rows], now)
            else:
                position = flight.position_of(worst, part, rows.start)
                self._batcher.fail(part.chunk, NonFiniteRow(position))

    def _note_return(self, step: Step, now: float) -> None:
        seconds = self.step_age(step, now)
        self._last_return = now
        self.step_clock.finished(step, seconds)
        metrics.step_finished(seconds, cold=step.cold)

    def _fail(self, batch: list[ChunkPart], error: BaseException) -> None:
        num_sequences = sum(part.number for part in batch)
        log.error("a batch of %d sequences failed", num_sequences, exc_info=error)
        for part in batch:
            self._batcher.fail(part.chunk, _failure(error))

    def _abandon(self, reason: ChunkError) -> None:
        abandoned = [flight.batch for flight in self._in_flight]
        if self._cold_step is not None:
            abandoned.append(self._cold_step.batch)
        self._in_flight.clear()
        self._cold_step = None
        for batch in abandoned:
            for part in batch:
                self._batcher.fail(part.chunk, reason)
        self._batcher.abandon(reason)


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
