"""Streams, leases and retries over real gRPC, to servers that the test slows, breaks and replaces."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import numpy as np
import pytest

from ivy_gateway import replica as replica_module
from ivy_gateway.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidValue,
    Overloaded,
    StartupError,
    Unavailable,
)
from ivy_gateway.jobs import Chunk, EncodedInput
from ivy_gateway.replica import ReplicaState
from ivy_gateway.replicas import ReplicaPool
from protos.codec import decode_tensor, encode_tensor
from protos.tulip.v1 import inference_pb2 as pb
from tests.ivy_gateway.fake_tulip import FakeTulip, embedding_row, failure, serving

HASH = "tok"


def chunk(*lengths: int, first_index: int = 0) -> Chunk:
    return Chunk(
        tuple(
            EncodedInput(first_index + i, np.arange(1, n + 1, dtype=np.int32), None, truncated=False)
            for i, n in enumerate(lengths)
        )
    )


def soon(seconds: float = 20.0) -> float:
    return asyncio.get_running_loop().time() + seconds


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def pool_of(*tulips: FakeTulip, ready: int | None = None, max_waiting_tokens: int = 0):
    for tulip in tulips:
        tulip.description.tokenizer_hash = tulip.description.tokenizer_hash or HASH
    async with serving(*tulips):
        pool = ReplicaPool([t.address for t in tulips], HASH, max_waiting_tokens)
        async with pool.running():
            await until(lambda: pool.num_ready == (len(tulips) if ready is None else ready))
            yield pool


async def test_rows_come_back_for_each_sequence():
    async with pool_of(FakeTulip()) as pool:
        answer = await pool.infer(chunk(3, 1, 7), soon())
        expected = np.stack([embedding_row(np.arange(1, n + 1)) for n in (3, 1, 7)])
        np.testing.assert_array_equal(answer.rows, expected)
        assert (answer.queue, answer.inference) == (0.001, 0.002)
        assert pool.outstanding_tokens == 0


async def test_many_chunks_share_one_stream_and_get_their_own_rows():
    async with pool_of(FakeTulip()) as pool:
        sizes = list(range(1, 200))
        answers = await asyncio.gather(*(pool.infer(chunk(n), soon()) for n in sizes))
        for n, answer in zip(sizes, answers, strict=True):
            np.testing.assert_array_equal(answer.rows[0], embedding_row(np.arange(1, n + 1)))


async def test_segment_ids_travel_only_to_models_that_have_segments():
    ids = np.array([5, 6, 7], np.int32)
    pair = Chunk((EncodedInput(0, ids, np.array([0, 1, 1], np.int32), truncated=False),))
    for num_segments, expected in ((2, [0, 1, 1]), (1, None)):
        async with pool_of(tulip := FakeTulip(num_segments=num_segments)) as pool:
            await pool.infer(pair, soon())
            request = tulip.requests[0]
            sent = (
                decode_tensor(request.segment_ids, "s").tolist() if request.HasField("segment_ids") else None
            )
            assert sent == expected


async def test_other_tokenizer_is_refused_and_never_used():
    good, bad = FakeTulip(), FakeTulip(tokenizer_hash="other")
    async with pool_of(good, bad, ready=1) as pool:
        await until(lambda: pool.statuses()[1].state is ReplicaState.REFUSED)
        assert "tokenizer is other" in pool.statuses()[1].reason
        await asyncio.gather(*(pool.infer(chunk(5), soon()) for _ in range(10)))
        assert len(good.requests) == 10
        assert not bad.requests


async def test_only_refused_replicas_are_no_replicas():
    async with pool_of(FakeTulip(tokenizer_hash="other"), ready=0) as pool:
        await until(lambda: pool.statuses()[0].state is ReplicaState.REFUSED)
        assert not pool.healthy
        with pytest.raises(Unavailable):
            await pool.infer(chunk(1), soon())
        with pytest.raises(Unavailable):
            _ = pool.description


async def test_of_two_replicas_with_different_weights_one_is_refused():
    async with pool_of(FakeTulip(weights_hash="a"), FakeTulip(weights_hash="b"), ready=1) as pool:
        await until(lambda: any(s.state is ReplicaState.REFUSED for s in pool.statuses()))
        assert pool.num_ready == 1
        refused = next(s for s in pool.statuses() if s.state is ReplicaState.REFUSED)
        assert "weights" in refused.reason


async def test_work_goes_where_fewest_tokens_are_outstanding():
    slow, other = FakeTulip(), FakeTulip()
    slow.gate.clear()
    other.gate.clear()
    async with pool_of(slow, other) as pool:
        big = asyncio.create_task(pool.infer(chunk(100), soon()))
        small = [asyncio.create_task(pool.infer(chunk(20), soon())) for _ in range(4)]
        await until(lambda: len(slow.requests) + len(other.requests) == 5)
        assert sorted([len(slow.requests), len(other.requests)]) == [1, 4]
        assert pool.outstanding_tokens == 180
        slow.gate.set()
        other.gate.set()
        await asyncio.gather(big, *small)
        assert pool.outstanding_tokens == 0


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidValue),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.INTERNAL, InferenceFailed),
        (grpc.StatusCode.DATA_LOSS, InferenceFailed),
    ],
)
async def test_failures_become_our_errors_and_name_the_input(code, error):
    async with pool_of(tulip := FakeTulip()) as pool:
        tulip.fail = lambda request: failure(code, "planned", index=1)
        with pytest.raises(error, match="input 11: planned"):
            await pool.infer(chunk(2, 3, first_index=10), soon())
        assert pool.outstanding_tokens == 0
        tulip.fail = lambda request: None
        assert len((await pool.infer(chunk(2), soon())).rows) == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
async def test_a_failed_chunk_is_tried_once_elsewhere(code):
    first, second = FakeTulip(), FakeTulip()
    async with pool_of(first, second) as pool:
        for broken, whole in ((first, second), (second, first)):
            broken.fail, whole.fail = (lambda request: failure(code)), (lambda request: None)
            for _ in range(4):
                assert len((await pool.infer(chunk(4), soon())).rows) == 1
        assert pool.outstanding_tokens == 0


async def test_no_third_attempt():
    tulips = FakeTulip(), FakeTulip(), FakeTulip()
    async with pool_of(*tulips) as pool:
        for tulip in tulips:
            tulip.fail = lambda request: failure(grpc.StatusCode.UNAVAILABLE)
        with pytest.raises(Unavailable):
            await pool.infer(chunk(4), soon())
        assert sum(len(tulip.requests) for tulip in tulips) == 2
        assert max(len(tulip.requests) for tulip in tulips) == 1


async def test_client_mistakes_are_not_retried():
    async with pool_of(tulip := FakeTulip()) as pool:
        tulip.fail = lambda request: failure(grpc.StatusCode.INVALID_ARGUMENT)
        with pytest.raises(InvalidValue):
            await pool.infer(chunk(1), soon())
        assert len(tulip.requests) == 1


def test_a_pool_without_replicas_does_not_start():
    with pytest.raises(StartupError):
        ReplicaPool([], HASH, 0)


async def test_lost_stream_moves_the_chunk_to_the_other_replica():
    first, second = FakeTulip(), FakeTulip()
    first.gate.clear()
    second.gate.clear()
    async with pool_of(first, second) as pool:
        work = asyncio.create_task(pool.infer(chunk(4), soon()))
        await until(lambda: first.requests or second.requests)
        broken, whole = (first, second) if first.requests else (second, first)
        whole.gate.set()
        await broken.stop()
        assert len((await work).rows) == 1
        await until(lambda: pool.num_ready == 1)
        assert pool.healthy
        assert pool.outstanding_tokens == 0


async def test_a_replica_that_comes_back_under_its_address_is_used_again():
    async with pool_of(tulip := FakeTulip()) as pool:
        port = int(tulip.address.rpartition(":")[2])
        await tulip.stop()
        await until(lambda: pool.num_ready == 0)
        with pytest.raises(Unavailable):
            await pool.infer(chunk(1), soon())
        await tulip.start(port)
        await until(lambda: pool.num_ready == 1)
        assert len((await pool.infer(chunk(1), soon())).rows) == 1


async def test_cancelled_chunk_is_cancelled_at_the_server_and_given_back():
    async with pool_of(tulip := FakeTulip()) as pool:
        tulip.gate.clear()
        work = asyncio.create_task(pool.infer(chunk(50), soon()))
        await tulip.arrived.acquire()
        assert pool.outstanding_tokens == 50
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert pool.outstanding_tokens == 0
        async with asyncio.timeout(20):
            await tulip.cancelled.acquire()
        tulip.gate.set()
        assert len((await pool.infer(chunk(2), soon())).rows) == 1


async def test_deadline_ends_the_wait_and_travels_with_the_chunk():
    async with pool_of(tulip := FakeTulip()) as pool:
        tulip.gate.clear()
        with pytest.raises(DeadlineExceeded):
            await pool.infer(chunk(50), soon(0.05))
        assert 0 < tulip.requests[0].timeout_us <= 50_000
        assert pool.outstanding_tokens == 0
        async with asyncio.timeout(20):
            await tulip.cancelled.acquire()


async def test_unusable_replies_are_failures_of_the_engine():
    async with pool_of(tulip := FakeTulip()) as pool:
        tulip.reply_to = lambda request: pb.InferReply(rows=pb.Tensor(dtype=2, shape=[1, 4], data=b"123"))
        with pytest.raises(InferenceFailed, match="not usable"):
            await pool.infer(chunk(1), soon())


async def test_too_few_rows_are_a_failure_not_a_shift():
    async with pool_of(tulip := FakeTulip()) as pool:
        tulip.reply_to = lambda request: pb.InferReply(rows=encode_tensor(np.ones((1, 8), np.float32)))
        with pytest.raises(InferenceFailed, match="1 rows where 2 were expected"):
            await pool.infer(chunk(1, 1), soon())


async def test_leases_wait_for_room_in_order_of_arrival():
    async with pool_of(FakeTulip(max_waiting_tokens=100)) as pool:
        granted: list[str] = []

        async def take(name: str, cost: int, done: asyncio.Event) -> None:
            async with pool.lease(cost, soon()):
                granted.append(name)
                await done.wait()

        dones = {name: asyncio.Event() for name in "abc"}
        tasks = [asyncio.create_task(take(n, c, dones[n])) for n, c in (("a", 80), ("b", 50), ("c", 10))]
        await until(lambda: granted == ["a"])
        assert pool.outstanding_tokens == 80  # c would fit, but b came first
        dones["a"].set()
        await until(lambda: granted == ["a", "b", "c"])
        dones["b"].set()
        dones["c"].set()
        await asyncio.gather(*tasks)
        assert pool.outstanding_tokens == 0


async def test_a_chunk_larger_than_the_servers_queue_fits_an_idle_server():
    async with pool_of(FakeTulip(max_waiting_tokens=10)) as pool:
        assert len((await pool.infer(chunk(50), soon())).rows) == 1


async def test_waiting_leases_leave_no_trace_when_cancelled_or_late():
    async with pool_of(FakeTulip(max_waiting_tokens=100)) as pool:
        async with pool.lease(100, soon()):
            waiter = asyncio.create_task(pool.infer(chunk(60), soon()))
            with pytest.raises(DeadlineExceeded):
                await pool.infer(chunk(60), soon(0.02))
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            assert pool.outstanding_tokens == 100
        assert pool.outstanding_tokens == 0
        assert len((await pool.infer(chunk(60), soon())).rows) == 1


async def test_waiting_leases_fail_when_the_last_replica_goes():
    async with pool_of(tulip := FakeTulip(max_waiting_tokens=100)) as pool:
        tulip.gate.clear()
        running, waiting = (asyncio.create_task(pool.infer(chunk(80), soon())) for _ in range(2))
        await tulip.arrived.acquire()
        await tulip.stop()
        for work in (running, waiting):
            with pytest.raises(Unavailable):
                await work
        assert pool.outstanding_tokens == 0


async def test_admission_counts_whole_requests_and_ignores_their_own_size():
    async with pool_of(FakeTulip(), max_waiting_tokens=100) as pool:
        with pool.admitted(5000):  # idle: any size
            with pytest.raises(Overloaded) as refused, pool.admitted(1):
                pass
            assert refused.value.retry_after > 0
        with pool.admitted(99), pool.admitted(5000), pytest.raises(Overloaded):
            pool.check_admission()
        with pool.admitted(1):
            pass


async def test_a_silent_replica_with_work_is_stuck_and_a_busy_one_is_not(monkeypatch):
    async with pool_of(tulip := FakeTulip()) as pool:
        monkeypatch.setattr(replica_module, "STALL_SECONDS", 0.05)
        tulip.gate.clear()
        work = asyncio.create_task(pool.infer(chunk(5), soon()))
        await tulip.arrived.acquire()
        await until(lambda: not pool.healthy)
        tulip.gate.set()
        await work
        assert pool.healthy
