"""The loop, with an engine whose steps the test completes by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from rose_engine.batch import Batch, Sequence
from rose_engine.errors import DeviceLost, OutOfDeviceMemory, StepError
from rose_engine.fake import FakeEngine, fake_rows
from rose_engine.lazy_tensor import HostCompletion, LazyTensor
from tulip_server.batcher import BatchBudget, Batcher
from tulip_server.chunk import PendingChunk
from tulip_server.errors import (
    Cancelled,
    DeadlineExceeded,
    DeviceUnusable,
    NonFiniteRow,
    ShuttingDown,
    StepFailed,
)
from tulip_server.runner import Runner


def sequence(first_id: int, length: int = 4) -> Sequence:
    return Sequence(np.arange(first_id, first_id + length, dtype=np.int32))


def expected_rows(*sequences: Sequence, dimensions: int = 8) -> np.ndarray:
    return np.concatenate([fake_rows(Batch.pack([s]), dimensions) for s in sequences])


def first_ids(batch: Batch) -> list[int]:
    return batch.token_ids_T[batch.layout.cu_lengths[:-1]].tolist()


async def settled() -> None:
    """Let the loop do all that it can do without a further event."""
    for _ in range(20):
        await asyncio.sleep(0)


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@asynccontextmanager
async def running(engine, depth: int = 2, max_tokens: int = 4, clock=None) -> AsyncIterator[Batcher]:
    """A runner over a queue whose batches hold one sequence of four tokens unless told otherwise."""
    batcher = Batcher(BatchBudget(max_tokens, 64), max_waiting_tokens=10_000, clock=clock or Clock())
    runner = asyncio.create_task(Runner(engine, batcher, depth).run())
    try:
        yield batcher
    finally:
        batcher.close()
        for step in getattr(engine, "steps", ()):
            step.complete()
        await asyncio.wait({runner})
    runner.result()


class Recorder:
    """Wraps an engine and notes launches and deliveries in the order in which they happen."""

    polled = False

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.events: list[str] = []

    @property
    def steps(self):
        return self.engine.steps

    @property
    def description(self):
        return self.engine.description

    def would_block(self, batch: Batch) -> bool:
        return self.engine.would_block(batch)

    def step_seconds(self, num_tokens: int) -> float | None:
        return None

    def step(self, batch: Batch) -> LazyTensor:
        name = chr(first_ids(batch)[0])
        self.events.append(f"launch {name}")
        inner = self.engine.step(batch)

        def collect() -> np.ndarray:
            self.events.append(f"deliver {name}")
            return inner.result()

        return LazyTensor(inner._completion, collect)


async def complete_in_order(engine: FakeEngine, count: int) -> None:
    for number in range(count):
        await settled()
        engine.steps[number].complete()
    await settled()


def submit_letters(batcher: Batcher, letters: str) -> list[PendingChunk]:
    return [batcher.submit((sequence(ord(letter)),)) for letter in letters]


# -- overlap


async def test_depth_two_launches_the_next_batch_before_delivering_the_oldest():
    recorder = Recorder(FakeEngine(manual=True))
    async with running(recorder, depth=2) as batcher:
        submit_letters(batcher, "ABC")
        await complete_in_order(recorder.engine, 3)
        assert recorder.events == [
            "launch A", "launch B", "deliver A", "launch C", "deliver B", "deliver C"
        ]  # fmt: skip


async def test_depth_one_alternates():
    recorder = Recorder(FakeEngine(manual=True))
    async with running(recorder, depth=1) as batcher:
        submit_letters(batcher, "ABC")
        await complete_in_order(recorder.engine, 3)
        assert recorder.events == [
            "launch A", "deliver A", "launch B", "deliver B", "launch C", "deliver C"
        ]  # fmt: skip


async def test_new_work_does_not_wait_for_the_batch_in_flight():
    engine = FakeEngine(manual=True)
    async with running(engine, depth=2) as batcher:
        submit_letters(batcher, "A")
        await settled()
        assert len(engine.steps) == 1
        submit_letters(batcher, "B")
        await settled()
        assert len(engine.steps) == 2


async def test_with_room_in_flight_a_result_does_not_wait_for_new_work():
    engine = FakeEngine(manual=True)
    async with running(engine, depth=2) as batcher:
        (chunk,) = submit_letters(batcher, "A")
        await settled()
        engine.steps[0].complete()
        result = await chunk.future
        np.testing.assert_array_equal(result.rows_RD, expected_rows(sequence(ord("A"))))


async def test_sequences_accumulate_while_the_engine_is_busy():
    engine = FakeEngine(manual=True)
    async with running(engine, depth=1, max_tokens=64) as batcher:
        submit_letters(batcher, "A")
        await settled()
        submit_letters(batcher, "BCD")
        await settled()
        engine.steps[0].complete()
        await settled()
        assert [first_ids(step.batch) for step in engine.steps] == [[65], [66, 67, 68]]


async def test_a_result_that_another_thread_declares_wakes_the_loop():
    engine = FakeEngine(manual=True)
    async with running(engine) as batcher:
        (chunk,) = submit_letters(batcher, "A")
        await settled()
        thread = threading.Thread(target=engine.steps[0].complete)
        thread.start()
        result = await chunk.future
        thread.join()
        assert len(result.rows_RD) == 1


async def rows_of_one_queue(depth: int) -> list[np.ndarray]:
    lengths = [[3, 7, 1], [12], [5, 5, 5, 5], [2, 9]]
    async with running(FakeEngine(), depth=depth, max_tokens=12) as batcher:
        chunks = [
            batcher.submit(tuple(sequence(100 * i + j, n) for j, n in enumerate(chunk)))
            for i, chunk in enumerate(lengths)
        ]
        return [(await chunk.future).rows_RD for chunk in chunks]


class Polled(FakeEngine):
    """An engine whose results have to be asked for."""

    polled = True

    def step(self, batch: Batch) -> LazyTensor:
        rows = super().step(batch)
        rows.add_done_callback = lambda callback: pytest.fail("a thread would have to wait")
        return rows


async def test_the_results_of_a_polled_engine_are_asked_for():
    engine = Polled(manual=True)
    async with running(engine, depth=2) as batcher:
        (first,) = submit_letters(batcher, "A")
        await settled()
        (second,) = submit_letters(batcher, "B")
        await settled()
        assert len(engine.steps) == 2, "work that arrives while the loop asks is launched at once"
        assert not first.future.done()
        engine.steps[0].complete()
        await first.future
        assert not second.future.done()
        engine.steps[1].complete()
        await second.future


async def test_depth_changes_no_bit():
    one, two = await rows_of_one_queue(1), await rows_of_one_queue(2)
    assert [rows.tobytes() for rows in one] == [rows.tobytes() for rows in two]
    np.testing.assert_array_equal(one[1], expected_rows(sequence(100, 12)))


async def test_the_event_loop_gets_its_turns_however_much_work_waits():
    turns_before = []
    async with running(FakeEngine()) as batcher:
        chunks = submit_letters(batcher, "A" * 50)
        while not chunks[-1].future.done():
            turns_before.append(sum(chunk.future.done() for chunk in chunks))
            await asyncio.sleep(0)
    assert len(set(turns_before)) > 10


# -- where a step runs


class ThreadNoting(FakeEngine):
    """An engine that says which thread its steps ran on."""

    def __init__(self, blocks: bool) -> None:
        super().__init__(manual=True, blocks=blocks)
        self.threads: list[threading.Thread] = []

    def step(self, batch: Batch) -> LazyTensor:
        self.threads.append(threading.current_thread())
        lazy_tensor = super().step(batch)
        self.steps[-1].complete()
        return lazy_tensor


@pytest.mark.parametrize("blocks", [False, True])
async def test_only_a_step_that_blocks_leaves_the_event_loop(blocks):
    engine = ThreadNoting(blocks)
    async with running(engine) as batcher:
        chunks = submit_letters(batcher, "AB")
        for chunk in chunks:
            await chunk.future
    assert [thread is not threading.main_thread() for thread in engine.threads] == [blocks, blocks]


class Blocking:
    """An engine whose steps hold up their caller until they are let go."""

    def __init__(self, polled: bool = False) -> None:
        self.polled = polled
        self.inner = FakeEngine(manual=True)
        self.blocks = False
        self.let_go = threading.Event()
        self.entered = threading.Event()

    @property
    def steps(self):
        return self.inner.steps

    @property
    def description(self):
        return self.inner.description

    def would_block(self, batch: Batch) -> bool:
        return self.blocks

    def may_compile(self, batch: Batch) -> bool:
        return self.blocks

    def step_seconds(self, num_tokens: int) -> float | None:
        return None

    def step(self, batch: Batch) -> LazyTensor:
        if self.blocks:
            self.entered.set()
            self.let_go.wait()
        return self.inner.step(batch)


@pytest.mark.parametrize("polled", [False, True])
async def test_results_are_delivered_while_another_step_blocks(polled):
    engine = Blocking(polled)
    async with running(engine, depth=2) as batcher:
        (hot,) = submit_letters(batcher, "A")
        await settled()
        engine.blocks = True
        (cold, waiting) = submit_letters(batcher, "BC")
        await asyncio.to_thread(engine.entered.wait)
        engine.steps[0].complete()
        await hot.future
        await settled()
        assert len(engine.steps) == 1, "nothing is launched beside a step that blocks"
        engine.let_go.set()
        for number, chunk in enumerate((cold, waiting), start=1):
            while len(engine.steps) <= number and not chunk.future.done():
                await asyncio.sleep(0)
            engine.steps[-1].complete()
            await chunk.future


async def test_two_steps_that_block_are_in_flight_together():
    engine = Blocking()
    engine.blocks = True
    engine.let_go.set()
    async with running(engine, depth=2) as batcher:
        submit_letters(batcher, "A")
        while len(engine.steps) < 1:
            await asyncio.sleep(0)
        submit_letters(batcher, "B")
        while len(engine.steps) < 2:
            await asyncio.sleep(0)


async def test_a_step_s_time_counts_from_when_the_engine_could_begin_with_it():
    engine, clock = FakeEngine(manual=True), Clock()
    batcher = Batcher(BatchBudget(8, 64), max_waiting_tokens=1000, clock=clock)
    runner = Runner(engine, batcher, depth=2)
    running = asyncio.create_task(runner.run())
    for length in (4, 8):
        batcher.submit((sequence(1, length),))
    await settled()
    assert (runner.num_in_flight, runner.oldest_step.num_tokens) == (2, 4)
    for step, seconds in zip(engine.steps, (3.0, 3.5), strict=True):
        clock.seconds = seconds
        step.complete()
        await settled()
    assert (runner.step_clock.expected(4), runner.step_clock.expected(8)) == (3.0, 0.5)
    assert runner.oldest_step is None
    batcher.close()
    await running


# -- chunks that end early


async def test_cancelled_and_expired_chunks_never_reach_the_engine():
    engine, clock = FakeEngine(manual=True), Clock()
    async with running(engine, depth=1, clock=clock) as batcher:
        submit_letters(batcher, "A")
        await settled()
        cancelled, _ = submit_letters(batcher, "BC")
        expired = batcher.submit((sequence(ord("D")),), timeout=1.0)
        submit_letters(batcher, "E")
        batcher.fail(cancelled, Cancelled("no longer wanted"))
        clock.seconds = 1.0
        await complete_in_order(engine, 3)
        assert [first_ids(step.batch) for step in engine.steps] == [[ord(x)] for x in "ACE"]
        with pytest.raises(DeadlineExceeded):
            await expired.future


async def test_a_queue_of_dead_chunks_only_launches_nothing():
    engine = FakeEngine(manual=True)
    async with running(engine) as batcher:
        for chunk in submit_letters(batcher, "AB"):
            chunk.future.cancel()
        await settled()
        assert engine.steps == []
        assert batcher.waiting_tokens == 0


async def test_a_chunk_cancelled_in_flight_leaves_its_neighbours_alone():
    engine = FakeEngine(manual=True)
    async with running(engine, max_tokens=64) as batcher:
        cancelled, other = submit_letters(batcher, "AB")
        await settled()
        cancelled.future.cancel()
        engine.steps[0].complete()
        result = await other.future
        np.testing.assert_array_equal(result.rows_RD, expected_rows(sequence(ord("B"))))


# -- steps that go wrong


class Spoiling(FakeEngine):
    """Rows of sequences that start with token 0 come out as `value`."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def step(self, batch: Batch) -> LazyTensor:
        rows = super().step(batch).result()
        rows[np.array(first_ids(batch)) == 0, -1] = self._value
        completion = HostCompletion()
        completion.set()
        return LazyTensor(completion, lambda: rows)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_a_row_that_is_not_finite_fails_its_own_chunk_by_index(value):
    async with running(Spoiling(value), max_tokens=64) as batcher:
        before = batcher.submit((sequence(1), sequence(2)))
        spoilt = batcher.submit((sequence(3), sequence(4), sequence(0)))
        after = batcher.submit((sequence(5),))
        with pytest.raises(NonFiniteRow) as caught:
            await spoilt.future
        assert caught.value.sequence_index == 2
        np.testing.assert_array_equal((await before.future).rows_RD, expected_rows(sequence(1), sequence(2)))
        np.testing.assert_array_equal((await after.future).rows_RD, expected_rows(sequence(5)))


async def test_the_index_counts_within_the_chunk_also_across_batches():
    async with running(Spoiling(np.nan), max_tokens=8) as batcher:
        spoilt = batcher.submit((sequence(1), sequence(2), sequence(3), sequence(0), sequence(4)))
        with pytest.raises(NonFiniteRow) as caught:
            await spoilt.future
        assert caught.value.sequence_index == 3
        await settled()
        assert batcher.waiting_tokens == 0


@pytest.mark.parametrize("error", [StepError("no luck"), OutOfDeviceMemory("full"), ZeroDivisionError()])
async def test_a_failed_step_fails_its_batch_and_no_other(error):
    engine = FakeEngine(manual=True)
    async with running(engine, depth=2, max_tokens=8) as batcher:
        chunks = submit_letters(batcher, "ABCD")
        await settled()
        engine.steps[0].fail(error)
        engine.steps[1].complete()
        for chunk in chunks[:2]:
            with pytest.raises(StepFailed):
                await chunk.future
        for chunk in chunks[2:]:
            assert len((await chunk.future).rows_RD) == 1


class Refusing(FakeEngine):
    """An engine whose `step` itself raises while `error` is set."""

    error: Exception | None = None

    def step(self, batch: Batch) -> LazyTensor:
        if self.error is not None:
            raise self.error
        return super().step(batch)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("error", [StepError("no luck"), AssertionError("a bug")])
async def test_the_loop_survives_an_engine_that_raises(error, blocks):
    engine = Refusing(blocks=blocks)
    async with running(engine) as batcher:
        engine.error = error
        (failed,) = submit_letters(batcher, "A")
        with pytest.raises(StepFailed):
            await failed.future
        engine.error = None
        (fine,) = submit_letters(batcher, "B")
        assert len((await fine.future).rows_RD) == 1


async def test_a_bug_is_not_told_to_clients():
    engine = Refusing()
    async with running(engine) as batcher:
        engine.error = AssertionError("secret detail")
        (failed,) = submit_letters(batcher, "A")
        with pytest.raises(StepFailed, match="its log says why"):
            await failed.future


@pytest.mark.parametrize("at_launch", [True, False])
async def test_a_lost_device_ends_the_loop_and_answers_everybody(at_launch):
    engine = Refusing(manual=True)
    batcher = Batcher(BatchBudget(4, 64), max_waiting_tokens=1000)
    runner = asyncio.create_task(Runner(engine, batcher, depth=2).run())
    chunks = submit_letters(batcher, "A")
    await settled()
    if at_launch:
        engine.error = DeviceLost("gone")
    chunks += submit_letters(batcher, "BCD")
    await settled()
    if not at_launch:
        engine.steps[0].fail(DeviceLost("gone"))
    with pytest.raises(DeviceLost, match="gone"):
        await runner
    for chunk in chunks:
        with pytest.raises(DeviceUnusable):
            await chunk.future
    with pytest.raises(ShuttingDown):
        batcher.submit((sequence(1),))
    assert batcher.waiting_tokens == 0


# -- the end


async def test_a_closed_queue_is_worked_off_before_the_loop_ends():
    engine = FakeEngine(manual=True)
    batcher = Batcher(BatchBudget(4, 64), max_waiting_tokens=1000)
    runner = asyncio.create_task(Runner(engine, batcher, depth=2).run())
    chunks = submit_letters(batcher, "ABCD")
    batcher.close()
    await complete_in_order(engine, 4)
    await runner
    assert all(len(chunk.future.result().rows_RD) == 1 for chunk in chunks)


async def test_a_cancelled_loop_answers_everybody():
    engine = FakeEngine(manual=True)
    batcher = Batcher(BatchBudget(4, 64), max_waiting_tokens=1000)
    runner = asyncio.create_task(Runner(engine, batcher, depth=2).run())
    chunks = submit_letters(batcher, "ABCD")
    await settled()
    runner.cancel()
    await asyncio.wait({runner})
    assert runner.cancelled()
    for chunk in chunks:
        with pytest.raises(ShuttingDown):
            await chunk.future
