"""A server in this process, behind a real port, over an engine the test holds in its hands."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

from protos import codec
from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1.inference_pb2_grpc import InferenceStub
from rose_engine.batch import Batch, Sequence
from rose_engine.fake import fake_rows
from tulip_server.config import ServerConfig
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

    async def _next(self) -> pb.StreamReply:
        while not self._arrived:
            frame = await self.call.read()
            if frame is grpc.aio.EOF:
                return frame
            self._arrived.extend(frame.replies)
        return self._arrived.popleft()

    async def __aiter__(self) -> AsyncIterator[pb.StreamReply]:
        while (reply := await self.read()) is not grpc.aio.EOF:
            yield reply


@dataclass(frozen=True)
class Serving:
    """A started server, and a client of it."""

    server: Server
    address: str
    channel: grpc.aio.Channel
    stub: InferenceStub

    def stream(self) -> ChunkStream:
        """A new stream."""
        return ChunkStream(self.stub)


@asynccontextmanager
async def serving(engine, **settings) -> AsyncIterator[Serving]:
    """Start, hand out, drain. Steps that a manual engine still holds are completed first."""
    listener = Listener.bind("127.0.0.1", 0)
    await listener.open()
    server = Server(engine, ServerConfig(model=Path("fake"), **settings), listener)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(listener.address, options=codec.CHANNEL_OPTIONS) as channel:
            yield Serving(server, listener.address, channel, InferenceStub(channel))
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


async def until(condition, seconds: float = 10) -> None:
    """Give the event loop turns until `condition()` holds; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def waiting():
    """The tokens a server holds, from the inside."""
    return lambda running: running.server._batcher.waiting_tokens
