"""What only a socket of frames has: a greeting, bytes that are none, readers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import functools

import numpy as np
import pytest
import uvloop

from ivy_gateway import frame_link
from ivy_gateway.errors import Unavailable
from ivy_gateway.jobs import Chunk, EncodedInput
from ivy_gateway.replica import ReplicaState
from ivy_gateway.replicas import PoolSettings, ReplicaPool
from protos.codec import decode_tensor
from protos.frames import FrameSplitter, framed, parse
from protos.tulip.v1 import inference_pb2 as pb
from tests.ivy_gateway.fake_tulip import DIMENSIONS, FakeTulip, embedding_row, serving
from tests.ivy_gateway.test_replicas import HASH, chunk, soon, state_of, until

GREETING = framed(pb.DescribeReply(dimensions=DIMENSIONS, num_segments=1, tokenizer_hash=HASH))
ALIVE = framed(pb.ReplyFrame(replies=[pb.StreamReply(heartbeat=pb.Heartbeat())]))
NO_FRAME = b"HTTP/1.1 400 Bad Request\r\n\r\n"


def on_uvloop(test):
    """Run a test on the loop that serves: its transports write and call back at other moments."""

    @functools.wraps(test)
    def run(*arguments, **fixtures):
        uvloop.run(test(*arguments, **fixtures))

    return run


@pytest.fixture
def carrier(monkeypatch):
    monkeypatch.setattr(FakeTulip, "carrier", "frames")


@contextlib.asynccontextmanager
async def listening(path, says):
    """A socket at `path`; `says(reader, writer)` is run for each connection, counted in what is given."""
    connections = []

    async def serve(reader, writer):
        connections.append(asyncio.current_task())
        with contextlib.suppress(asyncio.CancelledError):  # of which asyncio's streams would complain
            await says(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_unix_server(serve, str(path))
    try:
        yield connections
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


@contextlib.asynccontextmanager
async def pool_at(path):
    pool = ReplicaPool([f"frames:{path}"], HASH, PoolSettings(patience_seconds=0.0))
    async with pool.running():
        yield pool


def reason_of(pool) -> str:
    return pool.statuses()[0].reason


@on_uvloop
async def test_nobody_listens_yet(tmp_path):
    async with pool_at(tmp_path / "s") as pool:
        await until(lambda: "No such file" in reason_of(pool))
        assert state_of(pool) is ReplicaState.CONNECTING

        async def lives(_reader, writer):
            writer.write(GREETING + ALIVE)
            await asyncio.Event().wait()

        async with listening(tmp_path / "s", lives):
            await until(lambda: pool.num_ready == 1)


@on_uvloop
async def test_the_first_heartbeat_counts_however_soon_it_comes(tmp_path):
    """It is the only one: what came with the greeting was not dropped while the greeting was looked at."""

    async def says_all_at_once(_reader, writer):
        writer.write(GREETING + ALIVE)
        await asyncio.Event().wait()

    async with listening(tmp_path / "s", says_all_at_once) as connections, pool_at(tmp_path / "s") as pool:
        await until(lambda: pool.num_ready == 1)
        assert len(connections) == 1


@on_uvloop
async def test_a_server_that_does_not_greet_is_not_ready(tmp_path, monkeypatch):
    monkeypatch.setattr(frame_link, "DESCRIBE_SECONDS", 0.05)

    async def says_nothing(_reader, _writer):
        await asyncio.Event().wait()

    async with listening(tmp_path / "s", says_nothing) as connections, pool_at(tmp_path / "s") as pool:
        await until(lambda: len(connections) >= 2)
        assert "no greeting within 0.05 s" in reason_of(pool)
        assert not pool.healthy


@pytest.mark.parametrize(
    "first",
    [NO_FRAME, GREETING + NO_FRAME, GREETING + ALIVE + b"\2\0\0\0\xff\xff"],
)
@on_uvloop
async def test_bytes_that_are_no_frames_end_the_link_and_the_next_one_may_work(tmp_path, first):
    said = iter([first])

    async def wrong_at_first(_reader, writer):
        writer.write(next(said, GREETING + ALIVE))
        await asyncio.Event().wait()

    async with listening(tmp_path / "s", wrong_at_first) as connections, pool_at(tmp_path / "s") as pool:
        reasons = []
        await until(lambda: reasons.append(reason_of(pool)) or any("speaks no frames" in r for r in reasons))
        await until(lambda: pool.num_ready == 1)
        assert len(connections) == 2


@on_uvloop
async def test_a_chunk_in_flight_is_told_why_its_link_ended(tmp_path):
    async def answers_nonsense(reader, writer):
        writer.write(GREETING + ALIVE)
        await reader.read(1)
        writer.write(NO_FRAME)
        await asyncio.Event().wait()

    async with listening(tmp_path / "s", answers_nonsense), pool_at(tmp_path / "s") as pool:
        await until(lambda: pool.num_ready == 1)
        with pytest.raises(Unavailable, match=r"was lost: the server speaks no frames: a frame of \d+ bytes"):
            await pool._replicas[f"frames:{tmp_path / 's'}"].infer(chunk(1), soon())


@on_uvloop
async def test_a_server_that_does_not_read_holds_up_nobody_and_loses_nothing(tmp_path):
    """Chunks wait in the gateway; one given up meanwhile is never sent, the others come whole, in order."""
    reads, arrived = asyncio.Event(), []

    async def reads_late(reader, writer):
        writer.write(GREETING + ALIVE)
        await reads.wait()
        splitter = FrameSplitter()
        while data := await reader.read(1 << 16):
            for payload in splitter.feed(data):
                arrived.extend(parse(pb.RequestFrame, payload).requests)

    async with listening(tmp_path / "s", reads_late), pool_at(tmp_path / "s") as pool:
        await until(lambda: pool.num_ready == 1)
        (replica,) = pool._replicas.values()
        works = [asyncio.create_task(replica.infer(chunk(20_000 + n), soon())) for n in range(40)]
        await asyncio.sleep(0)
        link = replica._link
        held = len(link._held)
        assert 0 < held < 40, "some were written, some are held"
        works[0].cancel()
        works[-1].cancel()
        await asyncio.wait({works[0], works[-1]})
        reads.set()
        await until(lambda: len(arrived) == 40)
        chunks = [message.infer for message in arrived if message.WhichOneof("body") == "infer"]
        lengths = [int(decode_tensor(request.lengths, "lengths")[0]) for request in chunks]
        assert lengths == [20_000 + n for n in range(39)]
        assert all(
            (decode_tensor(request.token_ids, "ids") == np.arange(1, n + 1)).all()
            for n, request in zip(lengths, chunks, strict=True)
        )
        (cancel,) = [message for message in arrived if message.WhichOneof("body") == "cancel"]
        assert cancel.correlation_id == arrived[0].correlation_id
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)


@on_uvloop
async def test_rows_of_megabytes_come_whole(carrier):
    tulip = FakeTulip(tokenizer_hash=HASH)
    sizes = np.random.default_rng(0).integers(1, 5, 30_000)
    inputs = tuple(
        EncodedInput(i, np.arange(1, n + 1, dtype=np.int32), None, truncated=False)
        for i, n in enumerate(sizes)
    )
    rows = {n: embedding_row(np.arange(1, n + 1)) for n in range(1, 5)}
    tulip.row = lambda ids: rows[len(ids)]
    async with serving(tulip):
        pool = ReplicaPool([tulip.address], HASH, PoolSettings())
        async with pool.running():
            await until(lambda: pool.num_ready == 1)
            answers = await asyncio.gather(*(pool.infer(Chunk(inputs), soon(60)) for _ in range(2)))
    for answer in answers:
        np.testing.assert_array_equal(answer.rows, np.stack([rows[n] for n in sizes]))


@on_uvloop
async def test_servers_of_both_carriers_make_one_pool():
    far, near = FakeTulip(tokenizer_hash=HASH), FakeTulip(tokenizer_hash=HASH)
    near.carrier = "frames"
    async with serving(far, near):
        pool = ReplicaPool([far.address, near.address], HASH, PoolSettings())
        async with pool.running():
            await until(lambda: pool.num_ready == 2)
            assert [status.address for status in pool.statuses()] == [far.address, near.address]
            for tulip in (far, near):
                tulip.gate.clear()
            works = [asyncio.create_task(pool.infer(chunk(5), soon())) for _ in range(4)]
            await until(lambda: len(far.requests) == len(near.requests) == 2)
            for tulip in (far, near):
                tulip.gate.set()
            await asyncio.gather(*works)
