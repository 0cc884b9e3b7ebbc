"""A chunk on the wire, seen from the gateway: a `Chunk` into an `InferRequest`, an `InferReply` into rows.

Knows the byte layout only through `protos.codec`, and nothing of connections or of who else asks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from ivy_gateway import request_context, tracing
from ivy_gateway.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidValue,
    IvyError,
    Overloaded,
    Unavailable,
)
from ivy_gateway.jobs import Chunk, Lane, Output
from protos.codec import CodecError, decode_tensor, fill_tensor
from protos.tulip.v1 import inference_pb2 as pb

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
_LANES = {Lane.INTERACTIVE: pb.LANE_INTERACTIVE, Lane.BULK: pb.LANE_BULK}

_BYTES_A_TOKEN = 4

Rows = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRows:
    """A chunk's rows, as its output says, and its seconds in the replica's queue and under computation."""

    rows: Rows
    queue: float
    inference: float


@dataclass(slots=True, eq=False)
class Dispatch:
    """A chunk on its way to a server, and the request that it belongs to; `deadline` on the loop's clock."""

    chunk: Chunk
    deadline: float
    request_id: str
    traceparent: str

    @classmethod
    def of(cls, chunk: Chunk, deadline: float) -> Dispatch:
        """Sent for the request of the running task."""
        return cls(chunk, deadline, request_context.current().request_id, tracing.traceparent())

    @property
    def num_bytes(self) -> int:
        """Of its token ids."""
        return _BYTES_A_TOKEN * self.chunk.num_tokens

    def fill(self, request: pb.InferRequest, now: float, *, with_segments: bool) -> None:
        """Write it into an empty `request`, sent `now`."""
        chunk, inputs = self.chunk, self.chunk.inputs
        ids = [item.token_ids for item in inputs]
        fill_tensor(request.token_ids, ids[0] if len(ids) == 1 else np.concatenate(ids))
        fill_tensor(request.lengths, np.array([len(own) for own in ids], np.int32))
        request.timeout_us = max(1, int(1e6 * (self.deadline - now)))
        request.output = _OUTPUTS[chunk.output]
        request.lane = _LANES[chunk.lane]
        request.request_id, request.traceparent = self.request_id, self.traceparent
        if with_segments and any(item.segment_ids is not None for item in inputs):
            zeros = (np.zeros_like(i.token_ids) if i.segment_ids is None else i.segment_ids for i in inputs)
            fill_tensor(request.segment_ids, np.concatenate(list(zeros)))
        if chunk.output is not Output.TOKENS and any(item.spans is not None for item in inputs):
            _fill_spans(request, chunk)


def add_chunk(
    frame: pb.RequestFrame, correlation_id: int, dispatch: Dispatch, *, with_segments: bool
) -> None:
    """Put a chunk that is sent now into `frame`."""
    request = frame.requests.add(correlation_id=correlation_id)
    dispatch.fill(request.infer, asyncio.get_running_loop().time(), with_segments=with_segments)


def add_cancel(frame: pb.RequestFrame, correlation_id: int) -> None:
    """Put into `frame` that nobody waits for a chunk any more."""
    frame.requests.add(correlation_id=correlation_id).cancel.SetInParent()


def _fill_spans(request: pb.InferRequest, chunk: Chunk) -> None:
    spans = [np.array([[0, i.num_tokens]], np.int32) if i.spans is None else i.spans for i in chunk.inputs]
    fill_tensor(request.spans, np.concatenate(spans))
    fill_tensor(request.span_counts, np.array([len(own) for own in spans], np.int32))


def to_rows(reply: pb.InferReply, chunk: Chunk, width: int) -> ChunkRows:
    """The rows, if they are as many and as wide (0: any) as they must be. Raises `InferenceFailed`."""
    try:
        rows = decode_tensor(reply.rows, "rows", ndim=2)
    except CodecError as error:
        raise InferenceFailed(f"the server's reply is not usable: {error}") from error
    if len(rows) != chunk.num_rows:
        raise InferenceFailed(f"the server answered {len(rows)} rows where {chunk.num_rows} were expected")
    if width and rows.shape[1] != width:
        raise InferenceFailed(f"the server answered {rows.shape[1]} values a row instead of {width}")
    return ChunkRows(rows, reply.timings.queue_us / 1e6, reply.timings.compute_us / 1e6)


def to_error(failure: pb.Failure, chunk: Chunk) -> IvyError:
    """The gateway's error for a failure; the sequence at fault is named by its index in the request."""
    message = failure.message or "the server failed"
    if failure.HasField("sequence_index") and failure.sequence_index < len(chunk.inputs):
        message = f"input {chunk.inputs[failure.sequence_index].index}: {message}"
    return _FAILURES.get(failure.code, InferenceFailed)(message)
