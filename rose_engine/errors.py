"""The engine's errors.

EngineError
├── EngineConfigError      a setting that cannot be honoured (unknown device, unsafe dtype ...)
├── CheckpointError        the model folder is missing, incomplete, or not what its files say
├── InvalidSequence        an input the model cannot take: refused before it reaches the device
└── StepError              a batch that was accepted and failed
    ├── OutOfDeviceMemory  this batch does not fit, even alone and with every graph dropped
    └── DeviceLost         the device context is dead: the process must end and be started again

Bugs are plain exceptions (`AssertionError`, `TypeError` ...), never one of these.
"""

from __future__ import annotations


class EngineError(Exception):
    """Anything the engine tells its user about."""


class EngineConfigError(EngineError):
    """A setting that cannot be honoured on this machine or for this model."""


class CheckpointError(EngineError):
    """A model folder that is missing, incomplete, or inconsistent; the message names file and tensor."""


class InvalidSequence(EngineError):
    """A sequence the model cannot take: empty, too long, or with ids out of range."""


class StepError(EngineError):
    """A step that was launched, or was about to be, and gives no rows."""


class OutOfDeviceMemory(StepError):
    """The device has no room for this batch."""


class DeviceLost(StepError):
    """The device context is unusable; nothing but a new process helps."""
