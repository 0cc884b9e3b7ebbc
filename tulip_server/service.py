"""The gRPC servicer: chunks in from calls and streams, rows or a status out.

Knows nothing of batches or of the engine; a chunk is submitted, and its future ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1.inference_pb2_grpc import InferenceServicer
from tulip_server.errors import ChunkError
from tulip_server.intake import Intake
from tulip_server.status import STATUS, sequence_metadata
from tulip_server.streams import Streams
from tulip_server.wire import fill_reply

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(InferenceServicer):
    """`tulip.v1.Inference`."""

    def __init__(self, intake: Intake, streams: Streams, description: pb.DescribeReply) -> None:
        self._intake = intake
        self._streams = streams
        self._description = description

    async def Infer(self, request: pb.InferRequest, context: Context) -> pb.InferReply:
        """One chunk. Ends with the status of what went wrong; a client that leaves cancels its chunk."""
        try:
            ticket = self._intake.submit(request)
        except ChunkError as error:
            await _abort(context, error)
        try:
            result = await ticket.chunk.future
        except ChunkError as error:
            self._intake.failed(ticket, error)
            await _abort(context, error)
        except asyncio.CancelledError:
            self._intake.cancel(ticket)
            raise
        self._intake.answered(ticket, result)
        reply = pb.InferReply()
        fill_reply(reply, result, self._intake.row_format, ticket.output)
        return reply

    # A coroutine that writes, not a generator that yields: a generator is not told when the call is
    # cancelled during a write, and its chunks would stay in the queue.
    async def InferStream(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.RequestFrame], context: Context
    ) -> None:
        """Chunks by correlation id; ends when the client has sent its last and has all replies.

        However it ends, none of its chunks stays behind.
        """
        carrier = _Carrier(self._streams)
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(carrier.read(request_iterator))
                await carrier.write(context)
                reader.cancel()
        finally:
            self._streams.close(carrier.stream)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeReply:  # noqa: ARG002
        """The model and the limits of this replica."""
        return self._description


class _Carrier:
    """A stream over a gRPC call: one coroutine reads, one writes."""

    def __init__(self, streams: Streams) -> None:
        self._work = asyncio.Event()  # there is something to write, or it is time to end
        self._written = asyncio.Event()
        self.stream = streams.open(lambda _: self._work.set())

    async def read(self, frames: AsyncIterator[pb.RequestFrame]) -> None:
        """Take in requests until the client sends no more; then the last reply ends the stream."""
        try:
            async for frame in frames:
                self.stream.take(frame)
                while not self.stream.has_room:
                    self._written.clear()
                    await self._written.wait()
        finally:
            self.stream.half_close()

    async def write(self, context: Context) -> None:
        """Send replies in order of completion until the stream ends."""
        while not self.stream.over:
            frame = self.stream.next_frame()
            if frame is None:
                self._work.clear()
                await self._work.wait()
            else:
                await context.write(frame)
                self._written.set()


async def _abort(context: Context, error: ChunkError) -> NoReturn:
    await context.abort(STATUS[type(error)], str(error), sequence_metadata(error))
