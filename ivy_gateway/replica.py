"""One replica: a long-lived stream to one server, the chunks in flight on it, reconnection, what it serves.

Knows nothing of its peers, of HTTP or of texts: chunks of ids go out, rows come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from ivy_gateway import metrics
from ivy_gateway.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidValue,
    IvyError,
    Overloaded,
    Unavailable,
)
from ivy_gateway.jobs import Chunk, Output
from protos.codec import CHANNEL_OPTIONS, CodecError, decode_tensor, encode_tensor
from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1 import inference_pb2_grpc

logger = logging.getLogger(__name__)

DESCRIBE_SECONDS = 5.0  # a replica that cannot say what it serves within this is not ready
FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 2.0
# A replica that owes rows and has answered nothing at all for this long is stuck, not busy: the longest batch
# takes a fraction of it on the slowest device we measured.
STALL_SECONDS = 25.0
# Pings only while a stream is open (it always is): a peer that vanished without a word is noticed in 20 s.
_OPTIONS: tuple[tuple[str, int], ...] = (
    *CHANNEL_OPTIONS,
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),  # one connection per replica object, never a shared one
)

# What a gRPC status means to the client of the gateway. Any other code is a failure of the engine.
_FAILURES: dict[int, type[IvyError]] = {
    grpc.StatusCode.INVALID_ARGUMENT.value[0]: InvalidValue,
    grpc.StatusCode.OUT_OF_RANGE.value[0]: InvalidValue,
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED.value[0]: DeadlineExceeded,
    grpc.StatusCode.CANCELLED.value[0]: Unavailable,
    grpc.StatusCode.UNAVAILABLE.value[0]: Unavailable,
}

_OUTPUTS = {
    Output.OWN: pb.OUTPUT_OWN,
    Output.INT8: pb.OUTPUT_INT8,
    Output.BITS: pb.OUTPUT_BITS,
    Output.TOKENS: pb.OUTPUT_TOKENS,
}

Rows = NDArray[Any]


class ReplicaState(enum.Enum):
    """Where a replica stands: only `READY` ones get work."""

    CONNECTING = "connecting"
    READY = "ready"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica as `/info` shows it; `reason` says why it is not ready."""

    address: str
    state: ReplicaState
    reason: str
    outstanding_tokens: int
    description: pb.DescribeReply | None


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRows:
    """A chunk's rows, as its output says, and its seconds in the replica's queue and under computation."""

    rows: Rows
    queue: float
    inference: float


class ReplicaRefused(Exception):
    """The replica is alive but serves something else than this gateway does; the message says what."""


class Replica:
    """One long-lived stream to one server, and the futures of the chunks in flight on it.

    `check` raises `ReplicaRefused` for a description that this gateway cannot use; `on_change` is called
    whenever the state changes.
    """

    def __init__(
        self, address: str, check: Callable[[pb.DescribeReply], None], on_change: Callable[[], None]
    ) -> None:
        self.address = address
        self.state = ReplicaState.CONNECTING
        self.reason = "not connected yet"
        self.description: pb.DescribeReply | None = None
        self._check = check
        self._on_change = on_change
        self._outstanding_tokens = 0
        self._pending: dict[int, asyncio.Future[pb.InferReply]] = {}
        self._outbox: asyncio.Queue[pb.StreamRequest] = asyncio.Queue()
        self._next_id = 1
        self._silent_since = 0.0  # the last reply, or the moment work arrived after idleness

    @property
    def outstanding_tokens(self) -> int:
        """Tokens leased to this replica and not yet given back."""
        return self._outstanding_tokens

    @property
    def status(self) -> ReplicaStatus:
        """A snapshot for `/info`."""
        return ReplicaStatus(
            self.address, self.state, self.reason, self._outstanding_tokens, self.description
        )

    @property
    def stuck(self) -> bool:
        """Whether it owes rows and has been silent for `STALL_SECONDS`. Busy is not stuck."""
        return bool(self._pending) and _now() - self._silent_since > STALL_SECONDS

    def has_room(self, cost: int) -> bool:
        """Whether `cost` more tokens fit the server's own queue; an idle replica takes anything."""
        assert self.description is not None
        limit = self.description.max_waiting_tokens
        return not (limit and self._outstanding_tokens) or self._outstanding_tokens + cost <= limit

    def charge(self, cost: int) -> None:
        """Add `cost` (negative: give back) to the outstanding tokens."""
        self._outstanding_tokens += cost
        metrics.replica_outstanding(self.address, self._outstanding_tokens)

    async def infer(self, chunk: Chunk, deadline: float) -> ChunkRows:
        """Send one chunk and wait for its rows until `deadline` on the loop's clock.

        Raises the error that the server's failure maps to, `Unavailable` when the stream is lost, and
        `DeadlineExceeded`. Leaving early, for whatever reason, tells the server to drop the chunk.
        """
        correlation_id, reply = self._send(chunk, deadline)
        try:
            async with asyncio.timeout_at(deadline):
                return _decode(await reply, chunk)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the rows were there") from None
        except _FailedChunk as failed:
            raise _to_error(failed.failure, chunk) from None
        finally:
            if self._pending.pop(correlation_id, None) is not None and not _answered(reply):
                self._outbox.put_nowait(pb.StreamRequest(correlation_id=correlation_id, cancel=pb.Cancel()))

    def _send(self, chunk: Chunk, deadline: float) -> tuple[int, asyncio.Future[pb.InferReply]]:
        if self.state is not ReplicaState.READY:
            raise Unavailable(f"the server at {self.address} was lost")
        assert self.description is not None
        correlation_id, self._next_id = self._next_id, self._next_id + 1
        request = _encode(chunk, deadline, with_segments=self.description.num_segments > 1)
        if not self._pending:
            self._silent_since = _now()
        reply = self._pending[correlation_id] = asyncio.get_running_loop().create_future()
        self._outbox.put_nowait(pb.StreamRequest(correlation_id=correlation_id, infer=request))
        metrics.chunk_sent()
        return correlation_id, reply

    async def run(self) -> None:
        """Connect, serve, and connect again after a loss, until cancelled."""
        backoff = FIRST_BACKOFF_SECONDS
        async with grpc.aio.insecure_channel(self.address, options=_OPTIONS) as channel:
            stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
            while True:
                with self._lost_when_left():
                    await self._connect(stub)
                    backoff = FIRST_BACKOFF_SECONDS
                    await self._exchange(stub)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)

    @contextlib.contextmanager
    def _lost_when_left(self) -> Iterator[None]:
        """Whatever ends the block, the replica is not ready afterwards and nobody waits for it."""
        state, reason = ReplicaState.CONNECTING, "the stream ended"
        try:
            yield
        except ReplicaRefused as refusal:
            state, reason = ReplicaState.REFUSED, str(refusal)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            reason = _describe_error(error)
        except asyncio.CancelledError:
            reason = "the gateway stops"
            raise
        except asyncio.InvalidStateError:  # how grpc.aio says that the call ended under a write
            reason = "the stream broke"
        finally:
            self._change_state(state, reason)
            self._fail_pending(reason)

    async def _connect(self, stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
        self.description = await stub.Describe(pb.DescribeRequest(), timeout=DESCRIBE_SECONDS)
        self._check(self.description)
        self._outbox = asyncio.Queue()

    async def _exchange(self, stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
        """Carry requests out and replies in until the stream ends."""
        call = stub.InferStream()
        writer = asyncio.create_task(self._write(call))
        try:
            self._change_state(ReplicaState.READY, "")
            async for reply in call:
                self._deliver(reply)
        finally:
            call.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.StreamRequest, pb.StreamReply]) -> None:
        # One task owns all writes: grpc.aio allows one at a time, and a cancelled write ends the stream.
        while True:
            await call.write(await self._outbox.get())

    def _deliver(self, reply: pb.StreamReply) -> None:
        self._silent_since = _now()
        future = self._pending.get(reply.correlation_id)
        if future is None or future.done():  # cancelled meanwhile
            return
        if reply.WhichOneof("body") == "reply":
            future.set_result(reply.reply)
        else:
            future.set_exception(_FailedChunk(reply.failure))

    def _change_state(self, state: ReplicaState, reason: str) -> None:
        changed = (state, reason) != (self.state, self.reason)
        self.state, self.reason = state, reason
        metrics.replica_ready(self.address, state is ReplicaState.READY)
        if changed:
            logger.info("replica %s: %s%s", self.address, state.value, reason and f" ({reason})")
            self._on_change()

    def _fail_pending(self, reason: str) -> None:
        failure = pb.Failure(
            code=grpc.StatusCode.UNAVAILABLE.value[0],
            message=f"the server at {self.address} was lost: {reason}",
        )
        for future in self._pending.values():
            if not future.done():
                future.set_exception(_FailedChunk(failure))


class _FailedChunk(Exception):
    """A chunk's failure on its way from the stream to whoever waits."""

    def __init__(self, failure: pb.Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def _encode(chunk: Chunk, deadline: float, *, with_segments: bool) -> pb.InferRequest:
    inputs = chunk.inputs
    request = pb.InferRequest(
        token_ids=encode_tensor(np.concatenate([item.token_ids for item in inputs])),
        lengths=encode_tensor(np.array([item.num_tokens for item in inputs], np.int32)),
        timeout_us=max(1, int(1e6 * (deadline - _now()))),
        output=_OUTPUTS[chunk.output],
    )
    if with_segments and any(item.segment_ids is not None for item in inputs):
        segments = [np.zeros_like(i.token_ids) if i.segment_ids is None else i.segment_ids for i in inputs]
        request.segment_ids.CopyFrom(encode_tensor(np.concatenate(segments)))
    if chunk.output is not Output.TOKENS and any(item.spans is not None for item in inputs):
        spans = [np.array([[0, i.num_tokens]], np.int32) if i.spans is None else i.spans for i in inputs]
        request.spans.CopyFrom(encode_tensor(np.concatenate(spans)))
        request.span_counts.CopyFrom(encode_tensor(np.array([len(own) for own in spans], np.int32)))
    return request


def _decode(reply: pb.InferReply, chunk: Chunk) -> ChunkRows:
    try:
        rows = decode_tensor(reply.rows, "rows", ndim=2)
    except CodecError as error:
        raise InferenceFailed(f"the server's reply is not usable: {error}") from error
    if len(rows) != chunk.num_rows:
        raise InferenceFailed(f"the server answered {len(rows)} rows where {chunk.num_rows} were expected")
    return ChunkRows(rows, reply.timings.queue_us / 1e6, reply.timings.compute_us / 1e6)


def _to_error(failure: pb.Failure, chunk: Chunk) -> IvyError:
    """The gateway's error for a failure; the sequence at fault is named by its index in the request."""
    message = failure.message or "the server failed"
    if failure.HasField("sequence_index") and failure.sequence_index < len(chunk.inputs):
        message = f"input {chunk.inputs[failure.sequence_index].index}: {message}"
    return _FAILURES.get(failure.code, InferenceFailed)(message)


def _answered(reply: asyncio.Future[pb.InferReply]) -> bool:
    return reply.done() and not reply.cancelled()


def _describe_error(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details() or 'no details'}"
    return str(error)


def _now() -> float:
    return asyncio.get_running_loop().time()
