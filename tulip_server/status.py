"""What a chunk's error is called outside: the gRPC status of a call, the `Failure` on a stream. One table."""

from __future__ import annotations

import grpc

from protos.tulip.v1 import inference_pb2 as pb
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

STATUS: dict[type[ChunkError], grpc.StatusCode] = {
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


def failure(error: ChunkError) -> pb.Failure:
    """What a stream tells its client."""
    code, _name = STATUS[type(error)].value
    return pb.Failure(code=code, message=str(error), sequence_index=error.sequence_index)


def sequence_metadata(error: ChunkError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of a failed call: which sequence, where there is one."""
    return () if error.sequence_index is None else (("sequence-index", str(error.sequence_index)),)
