"""Links, leases and retries over both carriers, to servers that the test slows, breaks and replaces."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import replace

import grpc
import numpy as np
import pytest

from ivy_gateway import replicas as replicas_module
from ivy_gateway import request_context
from ivy_gateway.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidValue,
    Overloaded,
    StartupError,
    Unavailable,
)
from ivy_gateway.jobs import Chunk, EncodedInput, Lane
from ivy_gateway.replica import LinkSettings, ReplicaState
from ivy_gateway.replicas import PoolSettings, ReplicaPool
from ivy_gateway.request_context import RequestContext
from ivy_gateway.resolver import Resolver
from protos.codec import decode_tensor, encode_tensor
from protos.tulip.v1 import inference_pb2 as pb
from tests.ivy_gateway.fake_tulip import FakeTulip, embedding_row, failure, serving

HASH = "tok"


@pytest.fixture(autouse=True, params=["grpc", "frames"])
def carrier(request, monkeypatch):
    """How every server of a test is reached."""
    monkeypatch.setattr(FakeTulip, "carrier", request.param)


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
async def pool_of(*tulips: FakeTulip, ready: int | None = None, **settings):
    for tulip in tulips:
        tulip.description.tokenizer_hash = tulip.description.tokenizer_hash or HASH
    async with serving(*tulips):
        settings = {"patience_seconds": 0.0, **settings}
        pool = ReplicaPool([t.address for t in tulips], HASH, PoolSettings(**settings))
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
        ReplicaPool([], HASH)


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
        await tulip.stop()
        await until(lambda: pool.num_ready == 0)
        with pytest.raises(Unavailable):
            await pool.infer(chunk(1), soon())
        await tulip.start()
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


def state_of(pool: ReplicaPool, i: int = 0) -> ReplicaState:
    return pool.statuses()[i].state


LINK = LinkSettings(silence_seconds=0.4, reconnect_seconds=100.0)


async def test_a_silent_replica_is_out_of_rotation_and_its_chunks_are_done_elsewhere():
    silent, other = FakeTulip(), FakeTulip()
    silent.gate.clear()
    async with pool_of(silent, other, link=LINK) as pool:
        other.gate.clear()
        works = [asyncio.create_task(pool.infer(chunk(5), soon())) for _ in range(2)]
        await until(lambda: silent.requests and other.requests)
        other.gate.set()
        silent.heartbeat = None
        for work in works:
            assert len((await work).rows) == 1
        assert state_of(pool) is ReplicaState.STALLED
        assert pool.num_ready == 1
        assert pool.healthy
        async with asyncio.timeout(20):
            await silent.cancelled.acquire()  # told to drop it, should it ever wake
        silent.heartbeat = pb.Heartbeat()
        await until(lambda: pool.num_ready == 2)
        silent.gate.set()
        assert pool.outstanding_tokens == 0


async def test_a_busy_replica_stays_in_however_long_it_takes():
    async with pool_of(tulip := FakeTulip(), link=LINK) as pool:
        tulip.gate.clear()
        work = asyncio.create_task(pool.infer(chunk(5), soon()))
        await asyncio.sleep(1.0)
        assert state_of(pool) is ReplicaState.READY
        tulip.gate.set()
        await work


async def test_the_pool_is_red_when_nobody_is_left_and_green_again():
    async with pool_of(tulip := FakeTulip(), link=LINK) as pool:
        tulip.heartbeat = None
        await until(lambda: not pool.healthy)
        with pytest.raises(Unavailable):
            await pool.infer(chunk(1), soon())
        tulip.heartbeat = pb.Heartbeat()
        await until(lambda: pool.healthy)


async def test_the_gateways_own_pauses_are_not_the_servers_silence():
    async with pool_of(tulip := FakeTulip(), link=LINK) as pool:
        before = len(tulip.streams)
        time.sleep(1.0)  # nothing on this loop ran, the servers neither
        await asyncio.sleep(0.3)
        assert state_of(pool) is ReplicaState.READY
        assert len(tulip.streams) == before == 1


async def test_long_silence_ends_the_stream_and_another_one_is_opened():
    link = LinkSettings(silence_seconds=0.2, reconnect_seconds=0.6)
    async with pool_of(tulip := FakeTulip(), link=link) as pool:
        tulip.heartbeat = None
        await until(lambda: len(tulip.streams) >= 2)
        assert not pool.healthy
        tulip.heartbeat = pb.Heartbeat()
        await until(lambda: pool.healthy)


async def test_a_wedged_replica_gets_nothing_and_its_chunks_are_done_elsewhere():
    wedged, other = FakeTulip(), FakeTulip()
    wedged.gate.clear()
    async with pool_of(wedged, other) as pool:
        other.gate.clear()
        works = [asyncio.create_task(pool.infer(chunk(5), soon())) for _ in range(2)]
        await until(lambda: wedged.requests and other.requests)
        other.gate.set()
        wedged.heartbeat = pb.Heartbeat(wedged=True, oldest_step_us=9_000_000)
        await asyncio.gather(*works)
        assert state_of(pool) is ReplicaState.WEDGED
        await asyncio.gather(*(pool.infer(chunk(5), soon()) for _ in range(10)))
        assert len(wedged.requests) == 1
        wedged.heartbeat = pb.Heartbeat()
        await until(lambda: pool.num_ready == 2)


async def test_a_draining_replica_finishes_what_it_has_and_gets_nothing_new():
    draining, other = FakeTulip(), FakeTulip()
    async with pool_of(draining, other) as pool:
        draining.gate.clear()
        other.gate.clear()
        works = [asyncio.create_task(pool.infer(chunk(5), soon())) for _ in range(2)]
        await until(lambda: draining.requests and other.requests)
        draining.heartbeat = pb.Heartbeat(draining=True)
        await until(lambda: state_of(pool) is ReplicaState.DRAINING)
        other.gate.set()
        await asyncio.gather(*(pool.infer(chunk(5), soon()) for _ in range(10)))
        draining.gate.set()
        await asyncio.gather(*works)
        assert len(draining.requests) == 1
        assert sum(len(tulip.requests) for tulip in (draining, other)) == 12  # nothing was sent twice


async def test_work_waits_for_a_while_when_the_last_replica_has_just_gone():
    async with pool_of(tulip := FakeTulip(), patience_seconds=20.0) as pool:
        tulip.gate.clear()
        works = [asyncio.create_task(pool.infer(chunk(3), soon())) for _ in range(5)]
        await until(lambda: len(tulip.requests) == 5)
        await tulip.stop()
        await until(lambda: pool.num_ready == 0)
        works += [asyncio.create_task(pool.infer(chunk(3), soon())) for _ in range(5)]
        tulip.gate.set()
        await tulip.start()
        assert [len(answer.rows) for answer in await asyncio.gather(*works)] == [1] * 10
        assert pool.outstanding_tokens == 0


async def test_patience_ends():
    async with pool_of(tulip := FakeTulip(), patience_seconds=0.3) as pool:
        await tulip.stop()
        await until(lambda: pool.num_ready == 0)
        with pytest.raises(Unavailable):
            await pool.infer(chunk(3), soon())
        assert pool.num_waiting == 0


async def test_a_full_server_is_not_asked_twice_but_another_one_is():
    full, other = FakeTulip(), FakeTulip()
    async with pool_of(full, other) as pool:
        full.fail = lambda request: failure(grpc.StatusCode.RESOURCE_EXHAUSTED)
        for _ in range(4):
            await pool.infer(chunk(1), soon())
        assert state_of(pool) is ReplicaState.READY  # full is not broken
        await other.stop()
        await until(lambda: pool.num_ready == 1)
        before = len(full.requests)
        with pytest.raises(Overloaded):
            await pool.infer(chunk(1), soon())
        assert len(full.requests) == before + 1


async def test_a_replica_that_only_fails_is_put_out_and_a_poisoned_chunk_puts_out_nobody():
    broken, other = FakeTulip(), FakeTulip()
    async with pool_of(broken, other) as pool:
        for tulip in (broken, other):
            tulip.fail = lambda request: failure(grpc.StatusCode.INTERNAL)
        for _ in range(20):
            with pytest.raises(InferenceFailed):
                await pool.infer(chunk(1), soon())
        assert pool.num_ready == 2
        other.fail = lambda request: None
        await until_ejected(pool, broken)
        seen = len(broken.requests)
        await asyncio.gather(*(pool.infer(chunk(1), soon()) for _ in range(10)))
        assert len(broken.requests) == seen
        broken.fail = lambda request: None
        await until(lambda: state_of(pool) is ReplicaState.READY)
        for _ in range(4):
            await pool.infer(chunk(1), soon())
        assert len(broken.requests) > seen


async def until_ejected(pool: ReplicaPool, broken: FakeTulip) -> None:
    async with asyncio.timeout(20):
        while state_of(pool) is not ReplicaState.EJECTED:
            await pool.infer(chunk(1), soon())


async def test_the_last_replica_is_not_put_out_for_its_failures():
    first, second = FakeTulip(), FakeTulip()
    async with pool_of(first, second) as pool:
        first.fail = lambda request: failure(grpc.StatusCode.INTERNAL)
        await until_ejected(pool, first)
        await second.stop()
        await until(lambda: state_of(pool, 1) is ReplicaState.CONNECTING)
        assert pool.healthy
        first.fail = lambda request: None
        assert len((await pool.infer(chunk(1), soon())).rows) == 1


async def test_bulk_chunks_leave_room_for_others_and_go_behind_them():
    async with pool_of(tulip := FakeTulip(max_waiting_tokens=100), bulk_patience_seconds=20.0) as pool:
        tulip.gate.clear()

        def send(cost: int, lane: Lane) -> asyncio.Task:
            return asyncio.create_task(pool.infer(replace(chunk(cost), lane=lane), soon()))

        works = [send(40, Lane.BULK), send(30, Lane.BULK), send(30, Lane.INTERACTIVE)]
        await until(lambda: len(tulip.requests) == 2)
        assert [request.lane for request in tulip.requests] == [pb.LANE_BULK, pb.LANE_INTERACTIVE]
        assert pool.num_waiting == 1
        tulip.gate.set()
        await asyncio.gather(*works)
        assert pool.outstanding_tokens == 0


async def test_the_requests_name_and_trace_travel_with_its_chunks():
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with pool_of(tulip := FakeTulip()) as pool:
        token = request_context.enter(RequestContext("request-7", trace))
        await pool.infer(chunk(1), soon())
        request_context.leave(token)
        await pool.infer(chunk(1), soon())
    sent = [(request.request_id, request.traceparent) for request in tulip.requests]
    assert sent == [("request-7", trace), ("", "")]


class Names:
    """A lookup whose answer the test changes."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)

    async def __call__(self, host: str, port: int) -> list[str]:
        return self.addresses


async def test_replicas_of_a_name_join_and_leave_while_work_goes_on(monkeypatch):
    tulips = [FakeTulip(tokenizer_hash=HASH) for _ in range(3)]
    async with serving(*tulips):
        names = Names(tulips[0].address)
        monkeypatch.setattr(
            replicas_module, "Resolver", lambda given: Resolver([tulips[2].address, *given], names)
        )
        pool = ReplicaPool(["dns:tulip:50051"], HASH, PoolSettings(resolve_seconds=0.05))
        async with pool.running():
            await until(lambda: pool.num_ready == 2)
            names.addresses = [tulip.address for tulip in tulips]  # one of them is there already
            await until(lambda: pool.num_ready == 3)
            tulips[0].gate.clear()
            works = [asyncio.create_task(pool.infer(chunk(5), soon())) for _ in range(3)]
            await until(lambda: tulips[0].requests)
            names.addresses = [tulips[1].address]
            await until(lambda: ReplicaState.LEAVING in {s.state for s in pool.statuses()})
            await asyncio.gather(*(pool.infer(chunk(5), soon()) for _ in range(5)))
            assert len(tulips[0].requests) == 1
            tulips[0].gate.set()
            await asyncio.gather(*works)
            await until(lambda: {s.address for s in pool.statuses()} == {t.address for t in tulips[1:]})
            assert sum(len(tulip.requests) for tulip in tulips) == 8  # nothing was sent twice
            assert pool.outstanding_tokens == 0


@pytest.mark.parametrize("seed", range(3))
async def test_no_lease_is_ever_lost(seed):
    """Chunks, hang-ups, short deadlines, failures, losses and silences at random: everything comes back."""
    chance = random.Random(seed)
    tulips = [FakeTulip(max_waiting_tokens=200) for _ in range(3)]
    link = LinkSettings(silence_seconds=0.2, reconnect_seconds=0.5)
    async with pool_of(*tulips, link=link, patience_seconds=1.0, bulk_patience_seconds=0.05) as pool:
        codes = [getattr(grpc.StatusCode, name) for name in ("UNAVAILABLE", "INTERNAL", "RESOURCE_EXHAUSTED")]
        for tulip in tulips:
            tulip.fail = lambda request: failure(chance.choice(codes)) if chance.random() < 0.1 else None

        async def work() -> None:
            lane = chance.choice(list(Lane))
            await pool.infer(
                replace(chunk(chance.randint(1, 150)), lane=lane), soon(chance.choice((0.05, 3)))
            )

        works = []
        for _ in range(400):
            works.append(asyncio.create_task(work()))
            if chance.random() < 0.3:
                chance.choice(works).cancel()
            await disturb(chance, chance.choice(tulips))
            await asyncio.sleep(0.002)
        for tulip in tulips:
            tulip.gate.set()
        await asyncio.gather(*works, return_exceptions=True)
        assert pool.outstanding_tokens == 0
        assert pool.num_waiting == 0
        assert [status.outstanding_tokens for status in pool.statuses()] == [0, 0, 0]
        for tulip in tulips:
            tulip.heartbeat, tulip.fail = pb.Heartbeat(), lambda request: None
        await until(lambda: pool.num_ready == 3)
        assert len((await pool.infer(chunk(5), soon())).rows) == 1


async def disturb(chance: random.Random, tulip: FakeTulip) -> None:
    match chance.randrange(40):
        case 0:
            await tulip.stop()
            await tulip.start()
        case 1 | 2:
            tulip.gate.clear()
        case 3 | 4 | 5:
            tulip.gate.set()
        case 6:
            tulip.heartbeat = None
        case 7:
            tulip.heartbeat = pb.Heartbeat(wedged=chance.random() < 0.5)
        case 8 | 9 | 10:
            tulip.heartbeat = pb.Heartbeat()


async def test_a_bug_costs_a_connection_and_not_the_replica(monkeypatch, caplog):
    check, seen = ReplicaPool._check, []

    def fails_once(pool, description):
        seen.append(description)
        if len(seen) == 1:
            raise ZeroDivisionError("a bug")
        check(pool, description)

    monkeypatch.setattr(ReplicaPool, "_check", fails_once)
    async with pool_of(FakeTulip()) as pool:
        assert pool.num_ready == 1
    assert len(seen) == 2
    assert "ZeroDivisionError" in caplog.text


async def test_a_fault_while_looking_after_the_replicas_does_not_end_that(monkeypatch):
    async with pool_of(FakeTulip()) as pool:
        (replica,) = pool._replicas.values()
        ticks, tick = [], replica.tick

        def faulty(seconds: float) -> None:
            ticks.append(seconds)
            if len(ticks) == 1:
                raise RuntimeError("a bug")
            tick(seconds)

        monkeypatch.setattr(replica, "tick", faulty)
        await until(lambda: len(ticks) > 2)
