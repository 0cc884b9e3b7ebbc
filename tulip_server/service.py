"""The gRPC servicer: chunks in from calls and streams, rows or a status out.

Knows nothing of batches or of the engine; a chunk is submitted, and its future ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1.inference_pb2_grpc import InferenceServicer
from rose_engine.limits import EngineLimits
from tulip_server import metrics
from tulip_server.batcher import Batcher, ChunkResult, PendingChunk
from tulip_server.errors import (
    BadChunk,
    Cancelled,
    ChunkError,
    DeadlineExceeded,
    DeviceUnusable,
    NonFiniteRow,
    Overloaded,
    ShuttingDown,
    StepFailed,
)
from tulip_server.wire import RowFormat, timeout_seconds, to_reply, to_sequences

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

_STATUS: dict[type[ChunkError], grpc.StatusCode] = {
    BadChunk: grpc.StatusCode.INVALID_ARGUMENT,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ShuttingDown: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Cancelled: grpc.StatusCode.CANCELLED,
    NonFiniteRow: grpc.StatusCode.INTERNAL,
    StepFailed: grpc.StatusCode.INTERNAL,
    DeviceUnusable: grpc.StatusCode.UNAVAILABLE,
}

# A client that does not read its replies is not read from either.
_MAX_UNSENT_REPLIES = 1024


class InferenceService(InferenceServicer):
    """`tulip.v1.Inference` over one batcher."""

    def __init__(
        self,
        batcher: Batcher,
        limits: EngineLimits,
        row_format: RowFormat,
        description: pb.DescribeReply,
    ) -> None:
        self.row_format = row_format
        self._batcher = batcher
        self._limits = limits
        self._description = description
        self._streams: set[_Stream] = set()

    async def Infer(self, request: pb.InferRequest, context: Context) -> pb.InferReply:
        """One chunk. Ends with the status of what went wrong; a client that leaves cancels its chunk."""
        try:
            chunk = self.submit(request)
            return to_reply(await self._result(chunk), self.row_format, request.output)
        except ChunkError as error:
            metrics.chunk_failed(error.outcome)
            await context.abort(_STATUS[type(error)], str(error), _sequence_metadata(error))

    # A coroutine that writes, not a generator that yields: a generator is not told when the call is
    # cancelled during a write, and its chunks would stay in the queue.
    async def InferStream(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.StreamRequest], context: Context
    ) -> None:
        """Chunks by correlation id; ends when the client has sent its last and has all replies.

        However it ends, none of its chunks stays behind.
        """
        stream = _Stream(self)
        self._streams.add(stream)
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(stream.read(request_iterator))
                await stream.write(context)
                reader.cancel()
        finally:
            stream.cancel_all()
            self._streams.discard(stream)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeReply:  # noqa: ARG002
        """The model and the limits of this replica."""
        return self._description

    def submit(self, request: pb.InferRequest) -> PendingChunk:
        """Queue a chunk. Raises `BadChunk`, `Overloaded` or `ShuttingDown`, and then nothing was queued."""
        self.row_format.check(request.output)
        sequences = to_sequences(request, self._limits)
        self.row_format.check_size(sequences)
        return self._batcher.submit(sequences, timeout_seconds(request))

    def cancel(self, chunk: PendingChunk) -> None:
        """Forget a chunk that nobody waits for any more."""
        self._batcher.fail(chunk, Cancelled("the client cancelled the chunk"))
        metrics.chunk_failed(Cancelled.outcome)

    def end_streams(self) -> None:
        """Let every stream end after the replies it holds now."""
        for stream in self._streams:
            stream.end()

    async def _result(self, chunk: PendingChunk) -> ChunkResult:
        try:
            result = await chunk.future
        except asyncio.CancelledError:
            self.cancel(chunk)
            raise
        metrics.chunk_answered(result.queue_seconds, result.compute_seconds)
        return result


class _Stream:
    """One bidirectional stream: its chunks in flight and the replies that wait to be written."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._in_flight: dict[int, PendingChunk] = {}
        self._replies: asyncio.Queue[pb.StreamReply | None] = asyncio.Queue()  # None: the last was sent
        self._written = asyncio.Event()
        self._half_closed = False

    async def read(self, requests: AsyncIterator[pb.StreamRequest]) -> None:
        """Take in requests until the client sends no more; then the last reply ends the stream."""
        try:
            async for request in requests:
                self._accept(request)
                await self._room_for_replies()
        finally:
            self._half_closed = True
            self._end_after_last()

    async def write(self, context: Context) -> None:
        """Send replies, one at a time, in order of completion, until the stream ends."""
        while (reply := await self._replies.get()) is not None:
            await context.write(reply)
            self._written.set()

    def end(self) -> None:
        """End after the replies queued so far."""
        self._replies.put_nowait(None)

    def cancel_all(self) -> None:
        """Forget every chunk still in flight."""
        while self._in_flight:
            _, chunk = self._in_flight.popitem()
            self._service.cancel(chunk)

    def _accept(self, request: pb.StreamRequest) -> None:
        match request.WhichOneof("body"):
            case "infer":
                self._submit(request.correlation_id, request.infer)
            case "cancel":
                self._cancel(request.correlation_id)
            case _:
                self._fail(request.correlation_id, BadChunk("body", "neither infer nor cancel"))

    def _submit(self, correlation_id: int, request: pb.InferRequest) -> None:
        try:
            if correlation_id in self._in_flight:
                raise BadChunk("correlation_id", f"{correlation_id} is in flight already")
            chunk = self._service.submit(request)
        except ChunkError as error:
            self._fail(correlation_id, error)
            return
        self._in_flight[correlation_id] = chunk
        chunk.future.add_done_callback(partial(self._answer, correlation_id, chunk, request.output))

    def _cancel(self, correlation_id: int) -> None:
        # An id that is not there was answered while the cancel was on its way.
        if chunk := self._in_flight.pop(correlation_id, None):
            self._service.cancel(chunk)
            self._end_after_last()

    def _answer(
        self,
        correlation_id: int,
        chunk: PendingChunk,
        output: pb.Output,
        future: asyncio.Future[ChunkResult],
    ) -> None:
        # The client may have cancelled this chunk and given its id to another one.
        if self._in_flight.get(correlation_id) is not chunk:
            return
        del self._in_flight[correlation_id]
        error = future.exception()
        if error is None:
            result = future.result()
            metrics.chunk_answered(result.queue_seconds, result.compute_seconds)
            reply = to_reply(result, self._service.row_format, output)
            self._replies.put_nowait(pb.StreamReply(correlation_id=correlation_id, reply=reply))
        else:
            assert isinstance(error, ChunkError)
            self._fail(correlation_id, error)
        self._end_after_last()

    def _fail(self, correlation_id: int, error: ChunkError) -> None:
        metrics.chunk_failed(error.outcome)
        failure = _failure(error)
        self._replies.put_nowait(pb.StreamReply(correlation_id=correlation_id, failure=failure))

    def _end_after_last(self) -> None:
        if self._half_closed and not self._in_flight:
            self.end()

    async def _room_for_replies(self) -> None:
        while self._replies.qsize() >= _MAX_UNSENT_REPLIES:
            self._written.clear()
            await self._written.wait()


def _failure(error: ChunkError) -> pb.Failure:
    code, _name = _STATUS[type(error)].value
    return pb.Failure(code=code, message=str(error), sequence_index=error.sequence_index)


def _sequence_metadata(error: ChunkError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of a failed call: which sequence, where there is one."""
    return () if error.sequence_index is None else (("sequence-index", str(error.sequence_index)),)
