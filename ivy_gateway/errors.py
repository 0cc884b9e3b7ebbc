"""The gateway's errors: one tree, rendered as HTTP by route family in one place.

IvyError                      kind, message, param; everything a client or an operator is told
├── ClientError               the request is at fault: 4xx
│   ├── MalformedJson         the body is not JSON
│   ├── InvalidField          missing field or wrong type
│   ├── InvalidValue          right type, impossible value (dimensions, prompt name, id out of vocabulary ...)
│   ├── InvalidHeader         a header whose value cannot be honoured
│   ├── EmptyInput            an empty list or an empty text; the message names every empty index
│   ├── TooLong               over the model's limit with truncation off
│   ├── TooManyInputs         more inputs than one request may hold
│   ├── BodyTooLarge          more bytes than one request may hold
│   ├── UnsupportedMediaType  the content type is not JSON
│   ├── UnsupportedTask       the served model cannot do what the route asks
│   ├── UnknownModel          a model name that is not served here
│   ├── Unauthorized          no key, or a wrong one
│   └── UnknownRoute          no such path, or not with this method
├── ServiceError              the server is at fault, or busy: 429 or 5xx
│   ├── Overloaded            the queue is full; try again after `retry_after` seconds
│   ├── DeadlineExceeded      nobody could answer in time
│   ├── Unavailable           no replica: starting, draining or dead
│   └── InferenceFailed       the engine gave no usable rows
└── StartupError              a setting, file or port that stops the gateway from starting
    └── UsageError            a command line that cannot be read
"""

from __future__ import annotations


class IvyError(Exception):
    """Anything the gateway tells a client or an operator about.

    `param` names the request field at fault, with the item's index where there is one: `input[3]`.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ClientError(IvyError):
    """The request is at fault."""


class MalformedJson(ClientError):
    """The body is not JSON."""


class InvalidField(ClientError):
    """A missing field or one of the wrong type."""


class InvalidValue(ClientError):
    """A value of the right type that cannot be honoured."""


class InvalidHeader(ClientError):
    """A header whose value cannot be honoured."""


class EmptyInput(ClientError):
    """An empty list, or empty texts in it."""


class TooLong(ClientError):
    """An input over the model's limit while truncation is off."""


class TooManyInputs(ClientError):
    """More inputs than one request may hold."""


class BodyTooLarge(ClientError):
    """More bytes than one request may hold."""


class UnsupportedMediaType(ClientError):
    """A body whose content type is not JSON."""


class UnsupportedTask(ClientError):
    """The served model cannot do what the route asks for."""


class UnknownModel(ClientError):
    """A model name that is not served here."""


class Unauthorized(ClientError):
    """No key, or a wrong one."""


class UnknownRoute(ClientError):
    """No such path, or not with this method (`status` 404 or 405)."""

    def __init__(self, message: str, status: int = 404) -> None:
        super().__init__(message)
        self.status = status


class ServiceError(IvyError):
    """The server is at fault, or busy; the same request may succeed later."""

    def __init__(self, message: str, param: str | None = None, retry_after: float = 1.0) -> None:
        super().__init__(message, param)
        self.retry_after = retry_after  # seconds


class Overloaded(ServiceError):
    """Every queue is full."""


class DeadlineExceeded(ServiceError):
    """The deadline passed before all rows were there."""


class Unavailable(ServiceError):
    """No replica can take the request: starting, draining or dead."""


class InferenceFailed(ServiceError):
    """The engine gave no usable rows for this request."""


class StartupError(IvyError):
    """A setting, file or port that stops the gateway from starting."""

    exit_code = 1  # of the process


class UsageError(StartupError):
    """A command line that cannot be read."""

    exit_code = 2  # as argparse has it
