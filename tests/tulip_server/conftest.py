"""A server in this process, behind a real port, over an engine the test holds in its hands."""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

from protos import codec
from protos.frames import FrameSplitter, framed, parse
from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1.inference_pb2_grpc import InferenceStub
from rose_engine.batch import Batch, Sequence
from rose_engine.fake import fake_rows
from tulip_server.config import ServerConfig
from tulip_server.frames_socket import frames_socket
from tulip_server.listener import Listener
from tulip_server.server import Server


class ChunkStream:
    """A stream, one chunk a message, whose heartbeats are kept apart from its replies."""

    def __init__(self, stub: InferenceStub) -> None:
        self.call = stub.InferStream()
        self.heartbeats: list[pb.Heartbeat] = []
        self.done_writing, self.cancel, self.code = self.call.done_writing, self.call.cancel, self.call.code
        self._arrived: deque[pb.StreamReply] = deque()

    async def write(self, *requests: pb.StreamRequest) -> None:
        """Send these in one message."""
        await self.call.write(pb.RequestFrame(requests=requests))

    async def read(self) -> pb.StreamReply:
        """The next reply to a chunk, or EOF."""
        while (reply := await self._next()) is not grpc.aio.EOF and reply.HasField("heartbeat"):
            assert reply.correlation_id == 0
            self.heartbeats.append(reply.heartbeat)
        return reply

    async def heartbeat(self) -> pb.Heartbeat:
        """The next reply, which must be a heartbeat."""
        reply = await self._next()
        assert reply.HasField("heartbeat"), reply
        return reply.heartbeat

    async def ended_well(self) -> bool:
        """Whether the server ended the stream, which is over, in peace."""
        return await self.code() is grpc.StatusCode.OK

    async def next_frame(self) -> pb.ReplyFrame:
        """The next message, or EOF."""
        return await self.call.read()

    async def _next(self) -> pb.StreamReply:
        while not self._arrived:
            frame = await self.next_frame()
            if frame is grpc.aio.EOF:
                return frame
            self._arrived.extend(frame.replies)
        return self._arrived.popleft()

    async def __aiter__(self) -> AsyncIterator[pb.StreamReply]:
        while (reply := await self.read()) is not grpc.aio.EOF:
            yield reply


class FrameStream(ChunkStream):
    """The same over the frames' socket; connects when it is first used."""

    def __init__(self, path: Path) -> None:
        self.heartbeats: list[pb.Heartbeat] = []
        self.greeting: pb.DescribeReply | None = None
        self._path = path
        self._arrived: deque[pb.StreamReply] = deque()
        self._connecting = asyncio.Lock()
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._splitter = FrameSplitter()
        self._payloads: deque[bytes] = deque()

    async def connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Both ends, once the server has said what it serves."""
        async with self._connecting:
            if self._ends is None:
                self._ends = await asyncio.open_unix_connection(self._path)
                self.greeting = parse(pb.DescribeReply, await self._payload())
        return self._ends

    async def write(self, *requests: pb.StreamRequest) -> None:
        """Send these in one message."""
        await self.send(framed(pb.RequestFrame(requests=requests)))

    async def send(self, data: bytes) -> None:
        """Send these bytes."""
        _, writer = await self.connected()
        writer.write(data)
        await writer.drain()

    def cancel(self) -> None:
        """Go away without a word."""
        self._ends[1].transport.abort()

    def leave(self) -> None:
        """Leave the server, if ever connected."""
        if self._ends is not None:
            self.cancel()

    async def ended_well(self) -> bool:
        """There is one way to end."""
        reader, writer = await self.connected()
        writer.close()
        return reader.at_eof()

    async def next_frame(self) -> pb.ReplyFrame:
        """The next message, or EOF."""
        await self.connected()
        payload = await self._payload()
        return grpc.aio.EOF if payload is grpc.aio.EOF else parse(pb.ReplyFrame, payload)

    async def _payload(self) -> bytes:
        while not self._payloads:
            data = b""
            with suppress(ConnectionResetError):  # what we sent was not all read: the end just so
                data = await self._ends[0].read(1 << 16)
            if not data:
                self._ends[1].close()
                return grpc.aio.EOF
            self._payloads.extend(self._splitter.feed(data))
        return self._payloads.popleft()


@dataclass(frozen=True)
class Serving:
    """A started server, and a client of it."""

    server: Server
    address: str
    channel: grpc.aio.Channel
    stub: InferenceStub
    socket: Path | None
    opened: list[FrameStream]

    def stream(self) -> ChunkStream:
        """A new stream."""
        if self.socket is None:
            return ChunkStream(self.stub)
        self.opened.append(FrameStream(self.socket))
        return self.opened[-1]


@asynccontextmanager
async def serving(engine, carrier: str = "grpc", **settings) -> AsyncIterator[Serving]:
    """Start, hand out, drain. Steps that a manual engine still holds are completed first.

    Its streams are carried by gRPC, or by the frames' socket.
    """
    listener = Listener.bind("127.0.0.1", 0)
    await listener.open()
    with tempfile.TemporaryDirectory() as folder:
        path = None if carrier == "grpc" else Path(folder) / "frames.sock"
        config = ServerConfig(model=Path("fake"), frames_socket=path, **settings)
        async with frames_socket(config) as frames:
            server = Server(engine, config, listener, frames=frames)
            await server.start()
            channel = grpc.aio.insecure_channel(listener.address, options=codec.CHANNEL_OPTIONS)
            async with _running(server, engine), channel:
                running = Serving(server, listener.address, channel, InferenceStub(channel), path, [])
                yield running
                for stream in running.opened:
                    stream.leave()


@asynccontextmanager
async def _running(server: Server, engine) -> AsyncIterator[None]:
    try:
        yield
    finally:
        drain = asyncio.create_task(server.drain())
        while not drain.done():
            for step in engine.steps:
                step.complete()
            await asyncio.sleep(0)
        await drain


def infer_request(*sequences: list[int], timeout_us: int = 0) -> pb.InferRequest:
    """A chunk of these token ids."""
    ids = np.concatenate([np.array(sequence, np.int32) for sequence in sequences])
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    return pb.InferRequest(
        token_ids=codec.encode_tensor(ids), lengths=codec.encode_tensor(lengths), timeout_us=timeout_us
    )


def expected_rows(*sequences: list[int], dimensions: int = 8) -> np.ndarray:
    """What a fake engine answers."""
    batches = [Batch.pack([Sequence(np.array(sequence, np.int32))]) for sequence in sequences]
    return np.concatenate([fake_rows(batch, dimensions) for batch in batches])


def rows_of(reply: pb.InferReply) -> np.ndarray:
    """The reply's rows."""
    return codec.decode_tensor(reply.rows, "rows", pb.DTYPE_FLOAT32, 2)


async def remaining(stream) -> list[pb.StreamReply]:
    """The replies up to the end of a stream that was read from before."""
    return [reply async for reply in stream]


async def all_replies(stream, number: int) -> list[pb.StreamReply]:
    """The next `number` replies, if then there are no more than that."""
    replies = [await stream.read() for _ in range(number)]
    await stream.write(pb.StreamRequest(correlation_id=2**63))  # refused at once, behind whatever waits
    assert (await stream.read()).correlation_id == 2**63
    return replies


async def until(condition, seconds: float = 10) -> None:
    """Give the event loop turns until `condition()` holds; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture(params=["grpc", "socket"])
def carrier(request) -> str:
    """What carries a stream, for `serving`."""
    return request.param


@pytest.fixture
def waiting():
    """The tokens a server holds, from the inside."""
    return lambda running: running.server._batcher.waiting_tokens
