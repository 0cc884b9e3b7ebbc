"""The gRPC servicer: chunks in from calls and streams, rows or a status out.

Knows nothing of batches or of the engine; a chunk is submitted, and its future ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import grpc

from protos.codec import FRAME_BYTES
from protos.stamps import stamp
from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1.inference_pb2_grpc import InferenceServicer
from rose_engine.limits import EngineLimits
from tulip_server import metrics
from tulip_server.batcher import Batcher
from tulip_server.chunk import ChunkResult, PendingChunk
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
    Wedged,
)
from tulip_server.logs import origin
from tulip_server.wire import RowFormat, fill_reply, timeout_seconds, to_lane, to_sequences

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)

_STATUS: dict[type[ChunkError], grpc.StatusCode] = {
    BadChunk: grpc.StatusCode.INVALID_ARGUMENT,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Wedged: grpc.StatusCode.UNAVAILABLE,
    ShuttingDown: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Cancelled: grpc.StatusCode.CANCELLED,
    NonFiniteRow: grpc.StatusCode.INTERNAL,
    StepFailed: grpc.StatusCode.INTERNAL,
    DeviceUnusable: grpc.StatusCode.UNAVAILABLE,
}

# Told to an operator one by one; the others are counted, and as many as there is traffic.
_WORTH_A_LINE = (BadChunk, NonFiniteRow, StepFailed, DeviceUnusable)

# A client that does not read its replies is not read from either.
_MAX_UNSENT_REPLIES = 1024
_MAX_UNSENT_BYTES = 64 << 20


class Ticket(NamedTuple):
    """A chunk that was taken in, and what its request said beside the sequences."""

    chunk: PendingChunk
    output: pb.Output
    request_id: str
    traceparent: str


class Answer(NamedTuple):
    """What a chunk on a stream came to, until it is written."""

    correlation_id: int
    end: ChunkResult | pb.Failure
    output: pb.Output

    @property
    def num_bytes(self) -> int:
        """Of its rows."""
        return self.end.rows_RD.nbytes if isinstance(self.end, ChunkResult) else 0


class ChunkTracer(Protocol):
    """Where the story of each chunk goes, if anybody asked for it."""

    def record(
        self, chunk: PendingChunk, request_id: str, traceparent: str, end: ChunkResult | ChunkError
    ) -> None:
        """A chunk has ended."""
        ...


class InferenceService(InferenceServicer):
    """`tulip.v1.Inference` over one batcher."""

    def __init__(
        self,
        batcher: Batcher,
        limits: EngineLimits,
        row_format: RowFormat,
        description: pb.DescribeReply,
        tracer: ChunkTracer | None = None,
    ) -> None:
        self.row_format = row_format
        self._batcher = batcher
        self._limits = limits
        self._description = description
        self._tracer = tracer
        self._streams: set[_Stream] = set()
        self._stream_left = asyncio.Event()
        self._heartbeat: pb.Heartbeat | None = None
        self._ended = False

    @property
    def num_streams(self) -> int:
        """Streams open."""
        return len(self._streams)

    async def Infer(self, request: pb.InferRequest, context: Context) -> pb.InferReply:
        """One chunk. Ends with the status of what went wrong; a client that leaves cancels its chunk."""
        try:
            ticket = self.submit(request)
        except ChunkError as error:
            await _abort(context, error)
        try:
            result = await ticket.chunk.future
        except ChunkError as error:
            self.failed(ticket, error)
            await _abort(context, error)
        except asyncio.CancelledError:
            self.cancel(ticket)
            raise
        self.answered(ticket, result)
        reply = pb.InferReply()
        fill_reply(reply, result, self.row_format, ticket.output)
        return reply

    # A coroutine that writes, not a generator that yields: a generator is not told when the call is
    # cancelled during a write, and its chunks would stay in the queue.
    async def InferStream(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.RequestFrame], context: Context
    ) -> None:
        """Chunks by correlation id; ends when the client has sent its last and has all replies.

        However it ends, none of its chunks stays behind.
        """
        stream = _Stream(self)
        self._streams.add(stream)
        if self._heartbeat is not None:
            stream.beat(self._heartbeat)
        if self._ended:
            stream.end()
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(stream.read(request_iterator))
                await stream.write(context)
                reader.cancel()
        finally:
            stream.cancel_all()
            self._streams.discard(stream)
            self._stream_left.set()

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeReply:  # noqa: ARG002
        """The model and the limits of this replica."""
        return self._description

    def submit(self, request: pb.InferRequest) -> Ticket:
        """Queue a chunk, or nothing of it: raises `BadChunk`, `Overloaded`, `Wedged` or `ShuttingDown`."""
        try:
            self.row_format.check(request.output)
            sequences = to_sequences(request, self._limits)
            self.row_format.check_size(sequences)
            chunk = self._batcher.submit(sequences, timeout_seconds(request), to_lane(request))
        except ChunkError as error:
            _note_failure(error, request.request_id, request.traceparent)
            raise
        return Ticket(chunk, request.output, request.request_id, request.traceparent)

    def answered(self, ticket: Ticket, result: ChunkResult) -> None:
        """A chunk has all its rows."""
        metrics.chunk_answered(ticket.chunk.lane.value, result.queue_seconds, result.compute_seconds)
        self._trace(ticket, result)

    def failed(self, ticket: Ticket, error: ChunkError) -> None:
        """A chunk that was taken in has no rows."""
        _note_failure(error, ticket.request_id, ticket.traceparent)
        self._trace(ticket, error)

    def cancel(self, ticket: Ticket) -> None:
        """Forget a chunk that nobody waits for any more."""
        error = Cancelled("the client cancelled the chunk")
        self._batcher.fail(ticket.chunk, error)
        self.failed(ticket, error)

    def beat(self, heartbeat: pb.Heartbeat) -> None:
        """Send a heartbeat on every stream, and on those that open before the next one."""
        self._heartbeat = heartbeat
        for stream in self._streams:
            stream.beat(heartbeat)
        metrics.heartbeats_sent(len(self._streams))

    async def end_streams(self, seconds: float) -> None:
        """Let every stream end after the replies it holds now; wait until the last has, or for `seconds`."""
        self._ended = True
        for stream in self._streams:
            stream.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._streams:
                    self._stream_left.clear()
                    await self._stream_left.wait()

    def _trace(self, ticket: Ticket, end: ChunkResult | ChunkError) -> None:
        if self._tracer is not None:
            self._tracer.record(ticket.chunk, ticket.request_id, ticket.traceparent, end)


class _Stream:
    """One bidirectional stream: its chunks in flight and the replies that wait to be written.

    All that waits is written as one message, up to a size. A heartbeat goes before the replies, and at most
    one waits: a client that does not read piles up none.
    """

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._in_flight: dict[int, Ticket] = {}
        self._answers: deque[Answer] = deque()
        self._unsent_bytes = 0
        self._heartbeat: pb.Heartbeat | None = None
        self._work = asyncio.Event()  # there is something to write, or it is time to end
        self._written = asyncio.Event()
        self._half_closed = False
        self._ending = False

    async def read(self, frames: AsyncIterator[pb.RequestFrame]) -> None:
        """Take in requests until the client sends no more; then the last reply ends the stream."""
        try:
            async for frame in frames:
                for request in frame.requests:
                    self._accept(request)
                await self._room_for_answers()
        finally:
            self._half_closed = True
            self._end_after_last()

    async def write(self, context: Context) -> None:
        """Send replies in order of completion until the stream ends."""
        while (frame := await self._next()) is not None:
            await context.write(frame)
            self._written.set()

    def beat(self, heartbeat: pb.Heartbeat) -> None:
        """Send a heartbeat next, in place of one that was not sent yet."""
        self._heartbeat = heartbeat
        self._work.set()

    def end(self) -> None:
        """End after the replies queued so far."""
        self._ending = True
        self._work.set()

    def cancel_all(self) -> None:
        """Forget every chunk still in flight."""
        while self._in_flight:
            _, ticket = self._in_flight.popitem()
            self._service.cancel(ticket)

    async def _next(self) -> pb.ReplyFrame | None:
        """What is written next, once there is something; `None` at the end."""
        while self._heartbeat is None and not self._answers:
            if self._ending:
                return None
            self._work.clear()
            await self._work.wait()
        frame = pb.ReplyFrame()
        if self._heartbeat is not None:
            frame.replies.add(heartbeat=self._heartbeat)
            self._heartbeat = None
        self._fill(frame)
        return frame

    def _fill(self, frame: pb.ReplyFrame) -> None:
        """Move into `frame` the answers that wait: the first, and those that fit with it."""
        room = FRAME_BYTES
        while self._answers and (self._answers[0].num_bytes <= room or room == FRAME_BYTES):
            answer = self._answers.popleft()
            room -= answer.num_bytes
            self._unsent_bytes -= answer.num_bytes
            reply = frame.replies.add(correlation_id=answer.correlation_id)
            if isinstance(answer.end, ChunkResult):
                fill_reply(reply.reply, answer.end, self._service.row_format, answer.output)
                stamp("tulip.replied")
            else:
                reply.failure.CopyFrom(answer.end)

    def _accept(self, request: pb.StreamRequest) -> None:
        match request.WhichOneof("body"):
            case "infer":
                self._submit(request.correlation_id, request.infer)
            case "cancel":
                self._cancel(request.correlation_id)
            case _:
                self._refuse(request.correlation_id, BadChunk("body", "neither infer nor cancel"))

    def _submit(self, correlation_id: int, request: pb.InferRequest) -> None:
        stamp("tulip.chunk")
        if correlation_id in self._in_flight:
            self._refuse(correlation_id, BadChunk("correlation_id", f"{correlation_id} is in flight already"))
            return
        try:
            ticket = self._service.submit(request)
        except ChunkError as error:
            self._put_failure(correlation_id, error)
            return
        self._in_flight[correlation_id] = ticket
        ticket.chunk.future.add_done_callback(partial(self._answer, correlation_id, ticket))

    def _cancel(self, correlation_id: int) -> None:
        # An id that is not there was answered while the cancel was on its way.
        if ticket := self._in_flight.pop(correlation_id, None):
            self._service.cancel(ticket)
            self._end_after_last()

    def _answer(self, correlation_id: int, ticket: Ticket, future: asyncio.Future[ChunkResult]) -> None:
        # The client may have cancelled this chunk and given its id to another one.
        if self._in_flight.get(correlation_id) is not ticket:
            return
        del self._in_flight[correlation_id]
        error = future.exception()
        if error is None:
            result = future.result()
            self._service.answered(ticket, result)
            self._put(Answer(correlation_id, result, ticket.output))
        else:
            assert isinstance(error, ChunkError)
            self._service.failed(ticket, error)
            self._put_failure(correlation_id, error)
        self._end_after_last()

    def _refuse(self, correlation_id: int, error: BadChunk) -> None:
        _note_failure(error, "", "")
        self._put_failure(correlation_id, error)

    def _put_failure(self, correlation_id: int, error: ChunkError) -> None:
        self._put(Answer(correlation_id, _failure(error), pb.OUTPUT_OWN))

    def _put(self, answer: Answer) -> None:
        self._answers.append(answer)
        self._unsent_bytes += answer.num_bytes
        self._work.set()

    def _end_after_last(self) -> None:
        if self._half_closed and not self._in_flight:
            self.end()

    async def _room_for_answers(self) -> None:
        while len(self._answers) >= _MAX_UNSENT_REPLIES or self._unsent_bytes >= _MAX_UNSENT_BYTES:
            self._written.clear()
            await self._written.wait()


def _note_failure(error: ChunkError, request_id: str, traceparent: str) -> None:
    """Count a chunk without rows, and log it: by outcome only, for a message may quote the input."""
    metrics.chunk_failed(error.outcome)
    level = logging.WARNING if isinstance(error, _WORTH_A_LINE) else logging.DEBUG
    if log.isEnabledFor(level):
        where = "" if error.sequence_index is None else f", sequence {error.sequence_index}"
        log.log(level, "a chunk failed: %s%s", error.outcome, where, extra=origin(request_id, traceparent))


async def _abort(context: Context, error: ChunkError) -> NoReturn:
    await context.abort(_STATUS[type(error)], str(error), _sequence_metadata(error))


def _failure(error: ChunkError) -> pb.Failure:
    code, _name = _STATUS[type(error)].value
    return pb.Failure(code=code, message=str(error), sequence_index=error.sequence_index)


def _sequence_metadata(error: ChunkError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of a failed call: which sequence, where there is one."""
    return () if error.sequence_index is None else (("sequence-index", str(error.sequence_index)),)
