"""The door of the queue: a request's chunk is checked and let in, and its end is counted, logged and traced.

Knows nothing of what carried the request, nor of where the rows go.
"""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

from protos.tulip.v1 import inference_pb2 as pb
from rose_engine.limits import EngineLimits
from tulip_server import metrics
from tulip_server.batcher import Batcher
from tulip_server.chunk import ChunkResult, PendingChunk
from tulip_server.errors import (
    BadChunk,
    Cancelled,
    ChunkError,
    DeviceUnusable,
    NonFiniteRow,
    StepFailed,
)
from tulip_server.logs import origin
from tulip_server.wire import RowFormat, timeout_seconds, to_lane, to_sequences

log = logging.getLogger(__name__)

# Told to an operator one by one; the others are counted, and as many as there is traffic.
_WORTH_A_LINE = (BadChunk, NonFiniteRow, StepFailed, DeviceUnusable)


class Ticket(NamedTuple):
    """A chunk that was taken in, and what its request said beside the sequences."""

    chunk: PendingChunk
    output: pb.Output
    request_id: str
    traceparent: str


class ChunkTracer(Protocol):
    """Where the story of each chunk goes, if anybody asked for it."""

    def record(
        self, chunk: PendingChunk, request_id: str, traceparent: str, end: ChunkResult | ChunkError
    ) -> None:
        """A chunk has ended."""
        ...


class Intake:
    """The way into one batcher, for chunks of an engine's limits whose rows have `row_format`."""

    def __init__(
        self,
        batcher: Batcher,
        limits: EngineLimits,
        row_format: RowFormat,
        tracer: ChunkTracer | None = None,
    ) -> None:
        self.row_format = row_format
        self._batcher = batcher
        self._limits = limits
        self._tracer = tracer

    def submit(self, request: pb.InferRequest) -> Ticket:
        """Queue a chunk, or nothing of it: raises `BadChunk`, `Overloaded`, `Wedged` or `ShuttingDown`."""
        try:
            self.row_format.check(request.output)
            sequences = to_sequences(request, self._limits)
            self.row_format.check_size(sequences)
            chunk = self._batcher.submit(sequences, timeout_seconds(request), to_lane(request))
        except ChunkError as error:
            self.refused(error, request.request_id, request.traceparent)
            raise
        return Ticket(chunk, request.output, request.request_id, request.traceparent)

    def answered(self, ticket: Ticket, result: ChunkResult) -> None:
        """A chunk has all its rows."""
        metrics.chunk_answered(ticket.chunk.lane.value, result.queue_seconds, result.compute_seconds)
        self._trace(ticket, result)

    def failed(self, ticket: Ticket, error: ChunkError) -> None:
        """A chunk that was taken in has no rows."""
        self.refused(error, ticket.request_id, ticket.traceparent)
        self._trace(ticket, error)

    def refused(self, error: ChunkError, request_id: str = "", traceparent: str = "") -> None:
        """Count a chunk without rows, and log it: by outcome only, for a message may quote the input."""
        metrics.chunk_failed(error.outcome)
        level = logging.WARNING if isinstance(error, _WORTH_A_LINE) else logging.DEBUG
        if log.isEnabledFor(level):
            where = "" if error.sequence_index is None else f", sequence {error.sequence_index}"
            log.log(
                level, "a chunk failed: %s%s", error.outcome, where, extra=origin(request_id, traceparent)
            )

    def cancel(self, ticket: Ticket) -> None:
        """Forget a chunk that nobody waits for any more."""
        error = Cancelled("the client cancelled the chunk")
        self._batcher.fail(ticket.chunk, error)
        self.failed(ticket, error)

    def _trace(self, ticket: Ticket, end: ChunkResult | ChunkError) -> None:
        if self._tracer is not None:
            self._tracer.record(ticket.chunk, ticket.request_id, ticket.traceparent, end)
