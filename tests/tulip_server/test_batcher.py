"""Order, budgets and accounting of the queue."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_engine.batch import Sequence
from tulip_server import metrics
from tulip_server.batcher import BatchBudget, Batcher
from tulip_server.chunk import Lane, PendingChunk
from tulip_server.errors import (
    BadChunk,
    Cancelled,
    DeadlineExceeded,
    NonFiniteRow,
    Overloaded,
    ShuttingDown,
    Wedged,
)


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
    return [sequence.num_tokens for part in batch for sequence in part.sequences]


def places(batch) -> list[tuple[PendingChunk, int]]:
    """Each sequence's chunk, and its position there."""
    return [(part.chunk, part.first + index) for part in batch for index in range(part.number)]


def drained(queue: Batcher) -> list[list[int]]:
    batches = []
    while queue.waiting_sequences:
        batches.append(lengths_of(queue.next_batch()))
    return batches


# -- the decision alone


@settings(deadline=None)  # the machine may be busy
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
    assert places(batch) == [(first, 0), (first, 1)]
    batch = queue.next_batch()
    assert places(batch) == [(first, 2), (second, 0), (second, 1)]
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


@settings(deadline=None)  # the machine may be busy
@given(chunks=CHUNKS, max_tokens=st.integers(1, 20), max_sequences=st.integers(1, 5))
def test_every_sequence_leaves_once_in_order_within_the_budgets(chunks, max_tokens, max_sequences):
    async def scenario() -> None:
        queue = batcher(max_tokens, max_sequences)
        submitted = [queue.submit(sequences(*lengths)) for lengths in chunks]
        batches = []
        while queue.waiting_sequences:
            batches.append(queue.next_batch())
        flat = [place for batch in batches for place in places(batch)]
        assert flat == [(chunk, i) for chunk in submitted for i in range(len(chunk.sequences))]
        for lengths in map(lengths_of, batches):
            assert 1 <= len(lengths) <= max_sequences
            assert len(lengths) == 1 or sum(lengths) <= max_tokens
        for lengths, following in pairwise(map(lengths_of, batches)):
            assert len(lengths) == max_sequences or sum(lengths) + following[0] > max_tokens

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


@settings(deadline=None)  # the machine may be busy
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
                        assert queue.waiting_tokens + sum(argument) > 40
                        assert queue.waiting_tokens <= before  # less where something had expired
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


@settings(deadline=None)  # the machine may be busy
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
            (part,) = batch
            positions = range(part.first, part.first + part.number)
            rows = np.array([[position, -position] for position in positions], np.float32)
            chunk.deliver(part.first, part.number, rows, now=0.0)
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


async def test_who_must_not_wait_for_a_turn_is_told_once_and_in_this_one():
    queue = batcher()
    ends = []
    answered, failed, both = (queue.submit(sequences(1)) for _ in range(3))
    for chunk in (answered, failed, both):
        chunk.on_end = lambda chunk=chunk: ends.append((chunk, chunk.future.exception()))
    queue.next_batch()
    error = Cancelled("enough")
    answered.deliver(0, 1, np.zeros((1, 2)), 1.0)
    queue.fail(failed, error)
    both.deliver(0, 1, np.zeros((1, 2)), 1.0)
    queue.fail(both, error)
    assert ends == [(answered, None), (failed, error), (both, None)]


async def test_a_bug_behind_one_chunk_s_end_costs_nobody_else(caplog):
    queue = batcher()
    broken, sound = (queue.submit(sequences(1)) for _ in range(2))
    broken.on_end = lambda: 1 / 0
    queue.next_batch()
    for chunk in (broken, sound):
        chunk.deliver(0, 1, np.zeros((1, 2)), 1.0)
    assert broken.future.done()
    assert sound.future.done()
    assert "this is a bug" in caplog.text


def test_errors_name_field_and_sequence():
    error = BadChunk("token_ids", "too large", 3)
    assert str(error) == "token_ids, sequence 3: too large"
    assert (error.field, error.sequence_index) == ("token_ids", 3)


def test_the_batcher_loads_neither_torch_nor_grpc():
    code = "import sys, tulip_server.batcher as _; sys.exit(bool({'torch', 'grpc'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- lanes


def bulk(queue: Batcher, *lengths: int, timeout: float = math.inf) -> PendingChunk:
    return queue.submit(sequences(*lengths), timeout, Lane.BULK)


def taken(queue: Batcher) -> list[PendingChunk]:
    """The chunks of the next batch, each once."""
    return list(dict.fromkeys(pending.chunk for pending in queue.next_batch()))


async def test_interactive_chunks_go_before_bulk_ones_that_came_earlier():
    queue = batcher(max_tokens=4)
    first, second = bulk(queue, 4), bulk(queue, 4)
    third, fourth = queue.submit(sequences(4)), queue.submit(sequences(4))
    assert [taken(queue) for _ in range(4)] == [[third], [fourth], [first], [second]]


async def test_what_one_lane_leaves_free_of_a_batch_the_other_fills():
    queue = batcher(max_tokens=10, max_sequences=10)
    large, small = bulk(queue, 3, 3, 3), bulk(queue, 1)
    query = queue.submit(sequences(2))
    batch = queue.next_batch()
    assert [chunk for chunk, _ in places(batch)] == [query, large, large]
    assert taken(queue) == [large, small]


async def test_a_bulk_chunk_fills_what_an_interactive_one_does_not_fit_into():
    queue = batcher(max_tokens=10)
    first, second = queue.submit(sequences(6)), queue.submit(sequences(6))
    filler = bulk(queue, 4)
    assert taken(queue) == [first, filler]
    assert taken(queue) == [second]


async def test_an_impatient_bulk_lane_goes_first_for_one_batch():
    clock = ManualClock()
    queue = batcher(max_tokens=4, clock=clock)
    for _ in range(4):
        bulk(queue, 4)
    for _ in range(4):
        queue.submit(sequences(4))
    clock.seconds += 0.5
    lanes = []
    for _ in range(8):
        (chunk,) = taken(queue)
        lanes.append(chunk.lane.value[0])
        clock.seconds += 0.2
    assert "".join(lanes) == "biibiibb"


async def test_a_long_bulk_backlog_holds_no_query_up_for_more_than_a_batch():
    """However old the backlog is: what counts is when its lane last had a turn."""
    clock = ManualClock()
    queue = batcher(max_tokens=4, clock=clock)
    for _ in range(100):
        bulk(queue, 4)
    waited = []
    for _ in range(40):
        clock.seconds += 0.2  # a batch's time
        query = queue.submit(sequences(4))
        batches = 1
        while taken(queue) != [query]:
            clock.seconds += 0.2
            batches += 1
        waited.append(batches)
    assert max(waited) == 2
    assert waited.count(2) <= 20


async def test_a_lane_that_shares_batches_fairly_is_not_impatient():
    """Half of each batch is a turn: interactive chunks keep going first."""
    clock = ManualClock()
    queue = batcher(max_tokens=4, clock=clock)
    for _ in range(10):
        bulk(queue, 2)
    for _ in range(5):
        clock.seconds += 0.4
        query = queue.submit(sequences(2))
        assert next(iter(taken(queue))) is query


@settings(deadline=None)  # the machine may be busy
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(Lane), st.lists(st.integers(1, 12), min_size=1, max_size=4)), max_size=12
    ),
    max_tokens=st.integers(1, 20),
    step=st.sampled_from([0.0, 0.1, 0.3]),
)
def test_lanes_keep_their_order_and_batches_their_budget(arrivals, max_tokens, step):
    async def scenario() -> None:
        clock = ManualClock()
        queue = batcher(max_tokens, max_sequences=5, clock=clock)
        submitted = [queue.submit(sequences(*lengths), lane=lane) for lane, lengths in arrivals]
        batches = []
        while queue.waiting_sequences:
            batches.append(queue.next_batch())
            clock.seconds += step
        for lane in Lane:
            left = [place for batch in batches for place in places(batch) if place[0].lane is lane]
            mine = [chunk for chunk in submitted if chunk.lane is lane]
            assert left == [(chunk, i) for chunk in mine for i in range(len(chunk.sequences))]
        for lengths in map(lengths_of, batches):
            assert 1 <= len(lengths) <= 5
            assert len(lengths) == 1 or sum(lengths) <= max_tokens
        assert all(line.waiting_tokens == line.waiting_sequences == 0 for line in queue.lines.values())

    asyncio.run(scenario())


async def test_neither_lane_starves_under_a_flood_of_the_other():
    clock = ManualClock()
    queue = batcher(max_tokens=4, max_waiting_tokens=10**6, clock=clock)
    single = {Lane.BULK: bulk(queue, 4)}
    for _ in range(20):
        queue.submit(sequences(4))
        queue.submit(sequences(4))  # twice as fast as they go
        queue.next_batch()
        clock.seconds += 0.1
    assert not single[Lane.BULK].num_waiting


async def test_rows_of_tokens_and_pooled_ones_stay_apart_across_lanes():
    queue = batcher(max_tokens=100)
    per_token = tuple(replace(sequence, per_token=True) for sequence in sequences(3))
    apart = queue.submit(per_token)
    filler = bulk(queue, 2)
    assert taken(queue) == [apart]
    assert taken(queue) == [filler]


async def test_interactive_chunks_find_room_that_bulk_ones_do_not():
    queue = Batcher(BatchBudget(10, 4), max_waiting_tokens=10, clock=ManualClock(), reserved_tokens=5)
    bulk(queue, 10)
    with pytest.raises(Overloaded, match="10 of 10 tokens wait"):
        bulk(queue, 1)
    queue.submit(sequences(5))
    with pytest.raises(Overloaded, match="15 of 15 tokens wait"):
        queue.submit(sequences(1))
    assert (queue.lines[Lane.BULK].waiting_tokens, queue.lines[Lane.INTERACTIVE].waiting_tokens) == (10, 5)


# -- what does not wait any more


async def test_expired_chunks_deep_in_the_queue_make_room_when_it_is_short():
    clock = ManualClock()
    queue = batcher(max_waiting_tokens=10, clock=clock)
    queue.submit(sequences(4))
    expired = bulk(queue, 6, timeout=1.0)
    clock.seconds += 1.0
    queue.submit(sequences(6))
    assert queue.waiting_tokens == 10
    with pytest.raises(DeadlineExceeded):
        await expired.future


async def test_expiry_answers_wherever_in_a_lane_a_chunk_waits():
    clock = ManualClock()
    queue = batcher(max_tokens=1, clock=clock)
    patient = queue.submit(sequences(1, 1))
    half = queue.submit(sequences(1, 1), timeout=2.0)
    hurried = [queue.submit(sequences(1), timeout=1.0 + i / 10) for i in range(3)]
    clock.seconds += 1.1
    queue.expire()
    assert [chunk.future.done() for chunk in hurried] == [True, True, False]
    assert queue.waiting_tokens == 5
    for _ in range(3):
        queue.next_batch()
    clock.seconds += 1
    queue.expire()
    assert isinstance(half.future.exception(), DeadlineExceeded)
    assert not patient.future.done()
    assert queue.waiting_tokens == 0


async def test_nothing_is_left_of_ten_thousand_cancelled_chunks():
    queue = batcher(max_waiting_tokens=100)
    before = skipped("cancelled")
    for number in range(10_000):
        chunk = queue.submit(sequences(5, 5), timeout=1000.0, lane=list(Lane)[number % 2])
        queue.fail(chunk, Cancelled("no longer wanted"))
    assert queue.waiting_tokens == queue.waiting_sequences == 0
    assert not any(line.chunks for line in queue.lines.values())
    assert len(queue._deadlines) <= 65
    assert skipped("cancelled") == before + 20_000


def skipped(reason: str) -> float:
    return metrics.REGISTRY.get_sample_value("tulip_skipped_sequences_total", {"reason": reason}) or 0.0


async def test_a_wedged_queue_refuses_and_keeps_what_it_holds():
    queue = batcher()
    held = queue.submit(sequences(2))
    queue.wedged = True
    with pytest.raises(Wedged):
        queue.submit(sequences(1))
    queue.wedged = False
    queue.submit(sequences(1))
    assert queue.waiting_tokens == 3
    assert not held.future.done()


async def test_refusals_are_counted_by_reason_and_lane():
    def refused(reason: str, lane: str) -> float:
        labels = {"reason": reason, "lane": lane}
        return metrics.REGISTRY.get_sample_value("tulip_refused_chunks_total", labels) or 0.0

    queue = batcher(max_waiting_tokens=1)
    queue.submit(sequences(1))
    before = refused("overloaded", "bulk"), refused("shutting_down", "interactive")
    with pytest.raises(Overloaded):
        bulk(queue, 1)
    queue.close()
    with pytest.raises(ShuttingDown):
        queue.submit(sequences(1))
    assert (refused("overloaded", "bulk"), refused("shutting_down", "interactive")) == (
        before[0] + 1,
        before[1] + 1,
    )
