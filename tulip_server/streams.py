"""Streams of chunks: what a client has in flight, and the answers that wait to be sent to it.

Knows frames, and nothing of what carries them: a carrier takes each frame that comes to `Stream.take`, and
sends what `Stream.next_frame` gives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from protos.codec import FRAME_BYTES
from protos.stamps import stamp
from protos.tulip.v1 import inference_pb2 as pb
from tulip_server import metrics
from tulip_server.chunk import ChunkResult
from tulip_server.errors import BadChunk, ChunkError
from tulip_server.intake import Intake, Ticket
from tulip_server.status import failure
from tulip_server.wire import fill_reply

# A client that does not read its replies is not read from either.
_MAX_UNSENT_REPLIES = 1024
_MAX_UNSENT_BYTES = 64 << 20


class Answer(NamedTuple):
    """What a chunk came to, until it is sent."""

    correlation_id: int
    end: ChunkResult | pb.Failure
    output: pb.Output
    num_bytes: int  # of its rows


class Stream:
    """One client's chunks in flight by correlation id, and the answers that wait, in order of completion.

    `wake` is called when there is something to send, or it is time to end: cheap, and often; with `True` for
    rows after which the client has nothing in flight, so that nothing can follow them. All that waits goes
    into one frame, up to a size. A heartbeat goes before the answers, and at most one waits: a client that
    does not read piles up none.
    """

    def __init__(self, intake: Intake, wake: Callable[[bool], None]) -> None:
        self._intake = intake
        self._wake = wake
        self._in_flight: dict[int, Ticket] = {}
        self._answers: deque[Answer] = deque()
        self._unsent_bytes = 0
        self._heartbeat: pb.Heartbeat | None = None
        self._half_closed = False
        self._ending = False

    @property
    def over(self) -> bool:
        """Whether everything was sent and nothing follows."""
        return self._ending and not self._answers and self._heartbeat is None

    @property
    def has_room(self) -> bool:
        """Whether the client has taken enough of its answers to be read from."""
        return len(self._answers) < _MAX_UNSENT_REPLIES and self._unsent_bytes < _MAX_UNSENT_BYTES

    def take(self, frame: pb.RequestFrame) -> None:
        """Do what the client asks: nothing of it is waited for."""
        for request in frame.requests:
            self._accept(request)

    def half_close(self) -> None:
        """The client sends no more: end after the last of its chunks."""
        self._half_closed = True
        self._end_after_last()

    def next_frame(self) -> pb.ReplyFrame | None:
        """What is to be sent next; `None` while there is nothing."""
        if self._heartbeat is None and not self._answers:
            return None
        frame = pb.ReplyFrame()
        if self._heartbeat is not None:
            frame.replies.add(heartbeat=self._heartbeat)
            self._heartbeat = None
        self._fill(frame)
        return frame

    def beat(self, heartbeat: pb.Heartbeat) -> None:
        """Send a heartbeat next, in place of one that was not sent yet."""
        self._heartbeat = heartbeat
        self._wake(False)

    def end(self) -> None:
        """End after the answers that wait now."""
        self._ending = True
        self._wake(False)

    def cancel_all(self) -> None:
        """Forget every chunk still in flight."""
        while self._in_flight:
            _, ticket = self._in_flight.popitem()
            self._intake.cancel(ticket)

    def _fill(self, frame: pb.ReplyFrame) -> None:
        """Move into `frame` the answers that wait: the first, and those that fit with it."""
        answers, room = self._answers, FRAME_BYTES
        while answers and (answers[0].num_bytes <= room or room == FRAME_BYTES):
            correlation_id, end, output, num_bytes = answers.popleft()
            room -= num_bytes
            self._unsent_bytes -= num_bytes
            reply = frame.replies.add(correlation_id=correlation_id)
            if isinstance(end, ChunkResult):
                fill_reply(reply.reply, end, self._intake.row_format, output)
                stamp("tulip.replied")
            else:
                reply.failure.CopyFrom(end)

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
            ticket = self._intake.submit(request)
        except ChunkError as error:
            self._put_failure(correlation_id, error)
            return
        self._in_flight[correlation_id] = ticket
        ticket.chunk.on_end = partial(self._answer, correlation_id, ticket)

    def _cancel(self, correlation_id: int) -> None:
        # An id that is not there was answered while the cancel was on its way.
        if ticket := self._in_flight.pop(correlation_id, None):
            self._intake.cancel(ticket)
            self._end_after_last()

    def _answer(self, correlation_id: int, ticket: Ticket) -> None:
        # The client may have cancelled this chunk and given its id to another one.
        if self._in_flight.get(correlation_id) is not ticket:
            return
        del self._in_flight[correlation_id]
        error = ticket.chunk.future.exception()
        if error is None:
            result = ticket.chunk.future.result()
            answer = Answer(correlation_id, result, ticket.output, result.rows_RD.nbytes)
            self._put(answer, last=not self._in_flight)
            self._intake.answered(ticket, result)
        else:
            assert isinstance(error, ChunkError)
            self._put_failure(correlation_id, error)
            self._intake.failed(ticket, error)
        self._end_after_last()

    def _refuse(self, correlation_id: int, error: BadChunk) -> None:
        self._intake.refused(error)
        self._put_failure(correlation_id, error)

    def _put_failure(self, correlation_id: int, error: ChunkError) -> None:
        self._put(Answer(correlation_id, failure(error), pb.OUTPUT_OWN, 0))

    def _put(self, answer: Answer, *, last: bool = False) -> None:
        self._answers.append(answer)
        self._unsent_bytes += answer.num_bytes
        self._wake(last)

    def _end_after_last(self) -> None:
        if self._half_closed and not self._in_flight:
            self.end()


class Streams:
    """The streams that are open, whatever carries them; all of them beat, and end, together."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._open: set[Stream] = set()
        self._left = asyncio.Event()
        self._heartbeat: pb.Heartbeat | None = None
        self._ended = False

    def __len__(self) -> int:
        return len(self._open)

    def open(self, wake: Callable[[bool], None]) -> Stream:
        """A new stream (see there for `wake`); its first heartbeat waits already, if there is one."""
        stream = Stream(self._intake, wake)
        self._open.add(stream)
        if self._heartbeat is not None:
            stream.beat(self._heartbeat)
        if self._ended:
            stream.end()
        return stream

    def close(self, stream: Stream) -> None:
        """The client has gone, or has everything: none of its chunks stays behind."""
        stream.cancel_all()
        self._open.discard(stream)
        self._left.set()

    def beat(self, heartbeat: pb.Heartbeat) -> None:
        """Send a heartbeat on every stream, and on those that open before the next one."""
        self._heartbeat = heartbeat
        for stream in self._open:
            stream.beat(heartbeat)
        metrics.heartbeats_sent(len(self._open))

    async def end(self, seconds: float) -> None:
        """Let every stream end after the answers it holds now; wait until the last has, or for `seconds`."""
        self._ended = True
        for stream in self._open:
            stream.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._open:
                    self._left.clear()
                    await self._left.wait()
