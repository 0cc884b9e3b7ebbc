"""The socket for gateways on this machine: bytes, frames, files; what streams do is tested with gRPC's."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
import uvloop

from protos.codec import MAX_MESSAGE_BYTES
from protos.frames import framed
from protos.tulip.v1 import inference_pb2 as pb
from rose_engine.fake import FakeEngine
from tests.tulip_server.conftest import (
    FrameStream,
    all_replies,
    expected_rows,
    remaining,
    rows_of,
    serving,
    until,
)
from tests.tulip_server.test_server import served
from tests.tulip_server.test_service import A, B, infer, manual_engine
from tulip_server.config import ServerConfig
from tulip_server.errors import StartupError
from tulip_server.frames_socket import frames_socket
from tulip_server.server import serve


def frame(*requests: pb.StreamRequest) -> bytes:
    return framed(pb.RequestFrame(requests=requests))


def config(path: Path, **settings) -> ServerConfig:
    return ServerConfig(model=Path("fake"), port=0, frames_socket=path, **settings)


# -- bytes and frames


async def test_the_server_speaks_first_and_says_what_describe_would():
    async with serving(FakeEngine(), "socket") as running:
        stream = running.stream()
        first = await stream.next_frame()
        assert stream.greeting == await running.stub.Describe(pb.DescribeRequest())
        assert [reply.WhichOneof("body") for reply in first.replies] == ["heartbeat"]


async def test_frames_may_come_in_any_pieces():
    async with serving(FakeEngine(), "socket") as running:
        stream = running.stream()
        data = frame(infer(1, A), infer(2, A, B)) + frame() + frame(infer(3, B))
        for start in range(0, len(data), 7):
            await stream.send(data[start : start + 7])
            await asyncio.sleep(0)
        replies = {reply.correlation_id: rows_of(reply.reply) for reply in await all_replies(stream, 3)}
    np.testing.assert_array_equal(replies[2], expected_rows(A, B))
    np.testing.assert_array_equal(replies[3], expected_rows(B))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"), "the limit is"),
        ((3).to_bytes(4, "little") + b"\xff\xff\xff", "RequestFrame"),
        (b"GET / HTTP/1.1\r\n\r\n", "the limit is"),
    ],
)
async def test_bytes_that_are_no_frames_end_their_own_connection_with_one_line(data, reason, caplog, waiting):
    engine = manual_engine()
    async with serving(engine, "socket", depth=1) as running:
        good, bad = running.stream(), running.stream()
        await good.write(infer(1, A))
        await until(lambda: engine.steps)
        await bad.write(infer(1, B))
        await until(lambda: waiting(running) == 4)
        with caplog.at_level("WARNING", "tulip_server.frames_socket"):
            await bad.send(data * 2)
            assert await remaining(bad) == []
        await until(lambda: waiting(running) == 0)
        engine.steps[0].complete()
        (reply,) = await all_replies(good, 1)
        np.testing.assert_array_equal(rows_of(reply.reply), expected_rows(A))
        assert running.server.state.streams == 1
    (record,) = (record for record in caplog.records if record.name == "tulip_server.frames_socket")
    assert reason in record.getMessage()


async def test_a_client_that_closes_leaves_nothing_behind(waiting):
    engine = manual_engine()
    async with serving(engine, "socket", depth=1) as running:
        stream = running.stream()
        await stream.write(*(infer(number, A, B) for number in range(5)))
        await until(lambda: waiting(running) == 36)
        _, writer = await stream.connected()
        writer.write_eof()  # no half-close: this is the end
        await until(lambda: waiting(running) == 0 and running.server.state.streams == 0)
        engine.steps[0].complete()  # and its rows have nowhere to go
        assert await remaining(stream) == []


async def test_what_a_batch_answers_leaves_in_one_frame():
    async with serving(FakeEngine(), "socket") as running:
        stream = running.stream()
        await stream.heartbeat()
        await stream.write(*(infer(number, A) for number in range(64)))
        while not (ids := [reply.correlation_id for reply in await answers_of(stream)]):
            pass
    assert ids == list(range(64))


async def answers_of(stream: FrameStream) -> list[pb.StreamReply]:
    """Of the next frame."""
    return [reply for reply in (await stream.next_frame()).replies if not reply.HasField("heartbeat")]


async def test_a_client_that_does_not_read_is_not_read_from_and_loses_nothing(monkeypatch):
    """40 MB of answers; their requests, of 90 bytes each, are more than the kernel holds for a reader."""
    monkeypatch.setattr("tulip_server.streams._MAX_UNSENT_BYTES", 1 << 20)
    async with serving(FakeEngine(dimensions=1024), "socket") as running:
        stream = running.stream()
        await stream.connected()
        (taken,) = running.server._streams._open
        sending = asyncio.create_task(send_all(stream, [infer(number, A) for number in range(10_000)]))
        await until(lambda: not taken.has_room and not taken._in_flight, seconds=30)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not sending.done()
        assert not taken._in_flight
        async with asyncio.timeout(60):
            ids = [(await stream.read()).correlation_id for _ in range(10_000)]
            await sending
    assert ids == list(range(10_000))


async def send_all(stream: FrameStream, requests: list[pb.StreamRequest]) -> None:
    for request in requests:
        await stream.write(request)


# -- start and end


async def test_before_there_is_anything_to_serve_a_connection_is_closed(tmp_path):
    loaded = threading.Event()

    def load_engine() -> FakeEngine:
        assert loaded.wait(20)
        return FakeEngine()

    settings = config(tmp_path / "frames.sock", ready_file=tmp_path / "ready.json")
    task = asyncio.create_task(serve(settings, load_engine))
    await until(settings.frames_socket.exists)
    try:
        reader, writer = await asyncio.open_unix_connection(settings.frames_socket)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        with pytest.raises(StartupError, match="in use"):
            async with frames_socket(settings):
                pass
    finally:
        loaded.set()
    await until(settings.ready_file.exists)
    stream = FrameStream(settings.frames_socket)
    await stream.write(infer(1, A))
    np.testing.assert_array_equal(rows_of((await stream.read()).reply), expected_rows(A))
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 10)
    assert await remaining(stream) == []
    assert not settings.frames_socket.exists()


async def test_an_idle_connection_does_not_hold_up_the_end(tmp_path):
    path = tmp_path / "frames.sock"
    async with served(FakeEngine(), tmp_path, frames_socket=path) as (ready, task):
        assert ready["frames_socket"] == str(path)
        stream = FrameStream(path)
        await stream.heartbeat()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, 10)  # of the thirty that a drain may take
        assert await remaining(stream) == []


async def test_a_client_that_never_reads_holds_up_the_end_for_as_long_as_a_drain_may_take(monkeypatch):
    monkeypatch.setattr("tulip_server.server._FLUSH_SECONDS", 0.1)
    async with serving(FakeEngine(dimensions=8192), "socket", drain_seconds=0.1) as running:
        stream = running.stream()
        await stream.write(*(infer(number, *([A] * 20)) for number in range(20)))
        (open_stream,) = running.server._streams._open
        await until(lambda: open_stream._answers and not open_stream._in_flight)
        await running.server.drain()
        assert running.server.state.streams == 1


# -- the file


@pytest.mark.parametrize("mode", ["600", "660"])
async def test_the_file_lets_in_whom_its_mode_lets_and_is_gone_afterwards(tmp_path, mode):
    path = tmp_path / "frames.sock"
    async with frames_socket(config(path, socket_mode=mode)):
        assert stat.S_IMODE(path.stat().st_mode) == int(mode, 8)
    assert not path.exists()


async def test_a_file_that_a_dead_server_left_is_replaced(tmp_path):
    path = tmp_path / "frames.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with frames_socket(config(path)):
        reader, writer = await asyncio.open_unix_connection(path)
        assert await reader.read() == b""
        writer.close()


async def test_a_socket_in_use_is_left_alone_be_it_our_own(tmp_path):
    path = tmp_path / "frames.sock"
    async with frames_socket(config(path)):
        with pytest.raises(StartupError, match=r"--frames-socket: .*in use"):
            async with frames_socket(config(path)):
                pass
        assert path.exists()
    both = ServerConfig(model=Path("fake"), socket=path, frames_socket=path)
    with pytest.raises(StartupError, match=r"--frames-socket: .*in use"):
        await serve(both, FakeEngine)


@pytest.mark.parametrize(
    ("name", "message"), [("file", "no socket"), ("x" * 120, "longer than 107 bytes"), ("a/b", "a/b")]
)
async def test_a_path_that_cannot_be_a_socket_is_refused(tmp_path, name, message):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(StartupError, match=f"--frames-socket: .*{message}"):
        async with frames_socket(config(tmp_path / name)):
            pass
    assert (tmp_path / "file").read_text() == "precious"


# -- both event loops


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_stream_from_greeting_to_drain_on_either_loop(run):
    """Large answers and small ones, more than a socket holds, to a client that begins to read late."""

    async def scenario() -> None:
        async with serving(FakeEngine(dimensions=8192), "socket") as running:
            stream, other, third = (running.stream() for _ in range(3))
            for number in range(40):
                await stream.write(infer(number, *([A] * (1 + 40 * (number % 2)))))
            (served_stream,) = running.server._streams._open
            await until(lambda: served_stream._answers and not served_stream._in_flight, seconds=30)
            await other.heartbeat()
            await other.send(b"\xff" * 5)
            await third.heartbeat()
            (await third.connected())[1].write_eof()
            await until(lambda: running.server.state.streams == 1)
            drain = asyncio.create_task(running.server.drain())
            replies = await remaining(stream)
            await drain
            assert [reply.correlation_id for reply in replies] == list(range(40))
            assert rows_of(replies[1].reply).shape == (41, 8192)
            assert running.server.state.streams == 0

    run(scenario())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_client_that_leaves_without_having_read_is_noticed_on_either_loop(run, monkeypatch):
    monkeypatch.setattr("tulip_server.streams._MAX_UNSENT_BYTES", 1 << 20)

    async def scenario() -> None:
        async with serving(FakeEngine(dimensions=8192), "socket") as running:
            stream = running.stream()
            await stream.write(*(infer(number, *([A] * 20)) for number in range(20)))
            (taken,) = running.server._streams._open
            await until(lambda: not taken.has_room and not taken._in_flight, seconds=30)
            stream.cancel()
            await until(lambda: running.server.state.streams == 0)

    run(scenario())
