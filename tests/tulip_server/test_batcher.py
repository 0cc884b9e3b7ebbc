"""Order, budgets and accounting of the queue."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_engine.batch import Sequence
from tulip_server.batcher import BatchBudget, Batcher, PendingChunk
from tulip_server.errors import BadChunk, Cancelled, DeadlineExceeded, NonFiniteRow, Overloaded, ShuttingDown


class ManualClock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def sequences(*lengths: int) -> tuple[Sequence, ...]:
    return tuple(Sequence(np.arange(length, dtype=np.int32)) for length in lengths)


def batcher(max_tokens=10, max_sequences=4, max_waiting_tokens=1000, clock=None) -> Batcher:
    return Batcher(BatchBudget(max_tokens, max_sequences), max_waiting_tokens, clock or ManualClock())


def lengths_of(batch) -> list[int]:
    return [pending.sequence.num_tokens for pending in batch]


def drained(queue: Batcher) -> list[list[int]]:
    batches = []
    while queue.waiting_sequences:
        batches.append(lengths_of(queue.next_batch()))
    return batches


# -- the decision alone


@given(
    lengths=st.lists(st.integers(1, 50)),
    max_tokens=st.integers(0, 200),
    max_sequences=st.integers(0, 10),
)
def test_a_budget_takes_the_longest_prefix_that_fits(lengths, max_tokens, max_sequences):
    fitting = BatchBudget(max_tokens, max_sequences).num_fitting(lengths)

    def fits(count: int) -> bool:
        return count <= max_sequences and sum(lengths[:count]) <= max_tokens

    assert fits(fitting)
    assert fitting == len(lengths) or not fits(fitting + 1)


# -- batches


async def test_batches_follow_arrival_and_cut_chunks_at_the_token_budget():
    queue = batcher(max_tokens=10)
    first = queue.submit(sequences(4, 4, 4))
    second = queue.submit(sequences(2, 2))

    batch = queue.next_batch()
    assert [(p.chunk, p.position) for p in batch] == [(first, 0), (first, 1)]
    batch = queue.next_batch()
    assert [(p.chunk, p.position) for p in batch] == [(first, 2), (second, 0), (second, 1)]
    assert (queue.waiting_tokens, queue.waiting_sequences) == (0, 0)


async def test_a_batch_is_cut_at_the_sequence_budget():
    queue = batcher(max_tokens=100, max_sequences=3)
    queue.submit(sequences(1, 1))
    queue.submit(sequences(1, 1))
    assert drained(queue) == [[1, 1, 1], [1]]


async def test_a_short_sequence_never_overtakes_a_long_one():
    queue = batcher(max_tokens=10)
    queue.submit(sequences(6))
    queue.submit(sequences(6))
    queue.submit(sequences(1))
    assert drained(queue) == [[6], [6, 1]]


async def test_a_sequence_longer_than_the_budget_goes_alone():
    queue = batcher(max_tokens=10)
    queue.submit(sequences(1, 30, 2))
    assert drained(queue) == [[1], [30], [2]]


async def test_nothing_waiting_is_an_empty_batch():
    assert batcher().next_batch() == []


CHUNKS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), max_size=8)


@given(chunks=CHUNKS, max_tokens=st.integers(1, 20), max_sequences=st.integers(1, 5))
def test_every_sequence_leaves_once_in_order_within_the_budgets(chunks, max_tokens, max_sequences):
    async def scenario() -> None:
        queue = batcher(max_tokens, max_sequences)
        submitted = [queue.submit(sequences(*lengths)) for lengths in chunks]
        batches = []
        while queue.waiting_sequences:
            batches.append(queue.next_batch())
        flat = [(p.chunk, p.position) for batch in batches for p in batch]
        assert flat == [(chunk, i) for chunk in submitted for i in range(len(chunk.sequences))]
        for batch in batches:
            assert 1 <= len(batch) <= max_sequences
            assert len(batch) == 1 or sum(lengths_of(batch)) <= max_tokens
        for batch, following in pairwise(batches):
            one_more = sum(lengths_of(batch)) + lengths_of(following)[0]
            assert len(batch) == max_sequences or one_more > max_tokens

    asyncio.run(scenario())


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.lists(st.integers(1, 12), min_size=1, max_size=5)),
        st.tuples(st.just("pop"), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("leave"), st.integers(0, 20)),
        st.tuples(st.just("wait"), st.none()),
    ),
    max_size=30,
)


@given(actions=ACTIONS)
def test_what_is_taken_is_given_back(actions):
    """After any history the counters equal what would still come out, and end at zero."""

    async def scenario() -> None:
        clock = ManualClock()
        queue = batcher(max_tokens=15, max_sequences=4, max_waiting_tokens=40, clock=clock)
        chunks: list[PendingChunk] = []
        for action, argument in actions:
            match action:
                case "submit":
                    before = queue.waiting_tokens
                    try:
                        chunks.append(queue.submit(sequences(*argument), timeout=2.5))
                    except Overloaded:
                        assert before > 0
                        assert before + sum(argument) > 40
                        assert queue.waiting_tokens == before
                case "pop":
                    popped = queue.next_batch()
                    assert all(not p.chunk.future.done() for p in popped)
                case "cancel" if chunks:
                    queue.fail(chunks[argument % len(chunks)], Cancelled("no longer wanted"))
                case "leave" if chunks:
                    chunks[argument % len(chunks)].future.cancel()
                case "wait":
                    clock.seconds += 1
            assert queue.waiting_tokens >= 0
            assert (queue.waiting_tokens > 0) == (queue.waiting_sequences > 0)
        while queue.waiting_sequences:
            queue.next_batch()
        assert queue.waiting_tokens == 0
        assert all(chunk.future.done() or not chunk.num_waiting for chunk in chunks)

    asyncio.run(scenario())


# -- admission


async def test_admission_counts_tokens_and_takes_whole_chunks_only():
    queue = batcher(max_waiting_tokens=10)
    queue.submit(sequences(3, 3))
    with pytest.raises(Overloaded, match="6 of 10 tokens wait"):
        queue.submit(sequences(1, 4))
    assert (queue.waiting_tokens, queue.waiting_sequences) == (6, 2)
    queue.submit(sequences(4))
    assert queue.waiting_tokens == 10


async def test_a_chunk_that_finds_the_queue_empty_is_never_too_large():
    queue = batcher(max_waiting_tokens=10)
    queue.submit(sequences(8, 8, 8))
    assert queue.waiting_tokens == 24


async def test_a_cancelled_chunk_makes_room_at_once():
    queue = batcher(max_waiting_tokens=10)
    chunk = queue.submit(sequences(10))
    queue.fail(chunk, Cancelled("no longer wanted"))
    queue.submit(sequences(10))
    assert queue.waiting_tokens == 10


async def test_a_closed_queue_refuses_and_hands_out_what_it_holds():
    queue = batcher()
    queue.submit(sequences(1, 2))
    queue.close()
    with pytest.raises(ShuttingDown):
        queue.submit(sequences(1))
    assert drained(queue) == [[1, 2]]


async def test_work_and_closing_are_announced():
    queue = batcher()
    assert not queue.changed.is_set()
    queue.submit(sequences(1))
    assert queue.changed.is_set()
    queue.changed.clear()
    queue.close()
    assert queue.changed.is_set()


async def test_abandoning_fails_all_that_waits():
    queue = batcher()
    chunks = [queue.submit(sequences(3)) for _ in range(3)]
    queue.abandon(ShuttingDown("too late"))
    assert all(isinstance(chunk.future.exception(), ShuttingDown) for chunk in chunks)
    assert queue.closed
    assert queue.waiting_tokens == 0


# -- skipping


async def test_cancelled_chunks_are_skipped():
    queue = batcher(max_tokens=100)
    left, told, wanted = (queue.submit(sequences(length)) for length in (1, 2, 3))
    left.future.cancel()
    queue.fail(told, Cancelled("no longer wanted"))
    assert [p.chunk for p in queue.next_batch()] == [wanted]
    assert queue.waiting_tokens == 0


async def test_expired_chunks_are_skipped_and_told():
    clock = ManualClock()
    queue = batcher(clock=clock)
    hurried, patient = queue.submit(sequences(1), timeout=1.0), queue.submit(sequences(2))
    clock.seconds += 1.0
    assert [p.chunk for p in queue.next_batch()] == [patient]
    with pytest.raises(DeadlineExceeded):
        await hurried.future
    assert queue.waiting_tokens == 0


async def test_the_rest_of_a_failed_chunk_is_dropped():
    queue = batcher(max_tokens=2)
    broken, other = queue.submit(sequences(2, 2, 2)), queue.submit(sequences(1))
    queue.next_batch()
    queue.fail(broken, NonFiniteRow(0))
    assert queue.waiting_tokens == 1
    assert [p.chunk for p in queue.next_batch()] == [other]


# -- delivery


@given(lengths=st.lists(st.integers(1, 3), min_size=1, max_size=6), data=st.data())
def test_rows_land_at_their_sequences_in_any_order_of_delivery(lengths, data):
    async def scenario() -> None:
        queue = batcher(max_tokens=4, max_sequences=3)
        chunk = queue.submit(sequences(*lengths))
        batches = []
        while queue.waiting_sequences:
            batches.append(queue.next_batch())
        for batch in data.draw(st.permutations(batches)):
            assert not chunk.future.done()
            rows = np.array([[p.position, -p.position] for p in batch], np.float32)
            chunk.deliver(batch[0].position, len(batch), rows, now=0.0)
        expected = [[i, -i] for i in range(len(lengths))]
        np.testing.assert_array_equal(chunk.future.result().rows_RD, expected)

    asyncio.run(scenario())


async def test_a_result_says_where_the_time_went():
    clock = ManualClock()
    queue = batcher(max_tokens=1, clock=clock)
    chunk = queue.submit(sequences(1, 1))
    for now in (101.0, 103.0):
        clock.seconds = now
        queue.next_batch()
    rows = np.zeros((1, 2), np.float32)
    chunk.deliver(0, 1, rows, 103.5)
    chunk.deliver(1, 1, rows, 104.0)
    result = await chunk.future
    assert (result.queue_seconds, result.compute_seconds) == (3.0, 1.0)


async def test_rows_for_a_chunk_that_ended_are_dropped():
    queue = batcher()
    chunk = queue.submit(sequences(1))
    queue.next_batch()
    chunk.future.cancel()
    chunk.deliver(0, 1, np.zeros((1, 2), np.float32), 0.0)
    queue.fail(chunk, NonFiniteRow(0))
    assert chunk.future.cancelled()


def test_errors_name_field_and_sequence():
    error = BadChunk("token_ids", "too large", 3)
    assert str(error) == "token_ids, sequence 3: too large"
    assert (error.field, error.sequence_index) == ("token_ids", 3)


def test_the_batcher_loads_neither_torch_nor_grpc():
    code = "import sys, tulip_server.batcher as _; sys.exit(bool({'torch', 'grpc'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
