"""The server's errors; `status.py` maps those of a chunk to gRPC statuses, in one table.

TulipError
├── ConfigError             a flag or environment key that cannot be honoured
├── StartupError            a port, a file or a failed self-test that stops the server from starting
├── StoppedWhileLoading     a signal came before there was anything to serve
├── DeviceHung              the server ended while the device still held a step
└── ChunkError              why a chunk has no rows; its neighbours are not affected
    ├── BadChunk            the message is at fault: nothing of it was queued
    ├── Overloaded          the queue is full: nothing of it was queued
    ├── Wedged              the device does not answer: nothing of it was queued
    ├── ShuttingDown        the server ends: refused, or not finished in time
    ├── DeadlineExceeded    its time ran out before it was dispatched
    ├── Cancelled           the client does not want it any more
    ├── NonFiniteRow        one of its rows is not a number
    ├── StepFailed          the engine gave no rows for a batch it was part of
    └── DeviceUnusable      the device is lost, and this process with it

What goes wrong in the engine is an `EngineError` (rose_engine) until the runner turns it into one of these.
"""

from __future__ import annotations


class TulipError(Exception):
    """Anything the server tells a client or an operator about."""


class ConfigError(TulipError):
    """A flag or environment key that cannot be honoured; the message names it."""


class StartupError(TulipError):
    """A port, a file or a failed self-test that stops the server from starting; the message names it."""


class StoppedWhileLoading(TulipError):
    """A signal came before the engine was loaded; what loads it still runs."""


class DeviceHung(TulipError):
    """The server has answered everybody, and a step that never returned keeps its threads from ending."""


class ChunkError(TulipError):
    """Why a chunk has no rows. `sequence_index` is the sequence at fault within it, where there is one."""

    outcome = "error"  # the metrics' label

    def __init__(self, message: str, sequence_index: int | None = None) -> None:
        super().__init__(message)
        self.sequence_index = sequence_index


class BadChunk(ChunkError):
    """A message that contradicts itself, or a sequence the model cannot take; `field` names the culprit."""

    outcome = "bad_chunk"

    def __init__(self, field: str, reason: str, sequence_index: int | None = None) -> None:
        where = field if sequence_index is None else f"{field}, sequence {sequence_index}"
        super().__init__(f"{where}: {reason}", sequence_index)
        self.field = field


class Overloaded(ChunkError):
    """The queue has no room for the chunk; it may have later."""

    outcome = "overloaded"


class Wedged(ChunkError):
    """The device has held a step far longer than such steps take; another replica may answer."""

    outcome = "wedged"


class ShuttingDown(ChunkError):
    """The server ends; another replica may answer."""

    outcome = "shutting_down"


class DeadlineExceeded(ChunkError):
    """The chunk's time ran out while it waited."""

    outcome = "expired"


class Cancelled(ChunkError):
    """The client said, or showed by leaving, that it does not want the chunk any more."""

    outcome = "cancelled"


class NonFiniteRow(ChunkError):
    """The model's answer for one sequence is infinite or not a number."""

    outcome = "non_finite"

    def __init__(self, sequence_index: int) -> None:
        super().__init__(
            f"sequence {sequence_index}: the model gave a row that is not finite", sequence_index
        )


class StepFailed(ChunkError):
    """The engine gave no rows for a batch the chunk was part of."""

    outcome = "step_failed"


class DeviceUnusable(ChunkError):
    """The device is lost; the process ends and must be started again."""

    outcome = "device_lost"
