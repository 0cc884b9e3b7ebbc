"""HTTP connections with limits: on headers, on the time that requests take to arrive and replies to leave.

Uvicorn's own protocol has none of these. Times are checked once a second, by `check`, so that a request costs
no timers. Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass
from typing import Any, ClassVar

from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ivy_gateway import metrics
from ivy_gateway.config import GatewayConfig
from ivy_gateway.wakefulness import ASLEEP, Wakefulness

_JOINED_BYTES = 64 * 1024  # of a body: more is dearer to copy than to write by itself
LINGER_SECONDS = 1.0  # how long an idle connection is listened to once the gateway takes in nothing more


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Of one process's connections; times in seconds."""

    max_connections: int
    max_header_bytes: int
    max_header_count: int
    header_seconds: float
    body_seconds: float
    write_seconds: float

    @classmethod
    def of(cls, config: GatewayConfig) -> ConnectionLimits:
        """Those that `config` states."""
        return cls(
            max_connections=config.max_connections,
            max_header_bytes=config.max_header_bytes,
            max_header_count=config.max_header_count,
            header_seconds=config.header_timeout_seconds,
            body_seconds=config.body_timeout_seconds,
            write_seconds=config.write_timeout_seconds,
        )


class _Phase(enum.Enum):
    """What a connection is waiting for."""

    HEADERS = enum.auto()  # from the first moment, or the first byte of a further request
    BODY = enum.auto()
    NOTHING = enum.auto()  # the request is there, or none has begun


class _Refused(Exception):
    """The parser is stopped: the request is over a limit."""


class _ReplyTransport(asyncio.Transport):
    """A connection's transport for one reply, whose head goes out together with what follows it.

    Two writes are two system calls, and wake a client twice. ASGI wants it so too: nothing is sent before a
    first part of the body is there.
    """

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
        super().__init__()
        self._transport = transport
        self._cycle: RequestResponseCycle | None = cycle  # until it gives a head: they hold each other
        self._head: bytes | None = None  # while it waits

    def write(self, data: bytes) -> None:  # type: ignore[override]
        """Send `data`, unless it is the head; what comes before that asks the client to go on."""
        if self._head is not None and len(data) <= _JOINED_BYTES:
            self._transport.write(self._head + data)
            self._head = None
        elif self._head is not None:
            self.flush()
            self._transport.write(data)
        elif self._cycle is not None and self._cycle.response_started:
            self._head, self._cycle = data, None
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Send the head of a reply that has no body."""
        if self._head is not None:
            self._transport.write(self._head)
            self._head = None

    def close(self) -> None:
        """Close the connection, once everything is sent."""
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether the connection is closed, or about to be."""
        return self._transport.is_closing()


class LimitedProtocol(HttpToolsProtocol):
    """One connection. `limits` and `wakefulness` are the process's; `protocol_with` sets them."""

    limits: ClassVar[ConnectionLimits]
    wakefulness: ClassVar[Wakefulness] = ASLEEP

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._phase = _Phase.HEADERS
        self._phase_began = self.loop.time()
        self._header_bytes = 0
        self._asked = False  # for anything, ever
        self._refusal = 400
        self._unwritten = 0  # bytes in the write buffer when it last shrank
        self._unwritten_since: float | None = None
        self._closes_at: float | None = None
        self._reply: _ReplyTransport | None = None  # the one under way, or the last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection in, or refuse it where there are too many."""
        super().connection_made(transport)
        metrics.connections_open(1)
        if len(self.connections) > self.limits.max_connections:
            self._end(503, "limit", "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        metrics.connections_open(-1)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; bytes that are not yet headers it can show are counted here."""
        if self.transport.is_closing():
            return
        self.wakefulness.touch()
        super().data_received(data)
        if self._phase is _Phase.HEADERS and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > self.limits.max_header_bytes:
                self._end(431, "headers", "the headers are too large")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._asked = True
        self._header_bytes = 0
        self._enter(_Phase.HEADERS)

    def on_url(self, url: bytes) -> None:
        """Part of the request's line."""
        super().on_url(url)
        if len(self.url) > self.limits.max_header_bytes:
            self._refuse(414)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, complete."""
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value) + 4
        too_large = self._header_bytes > self.limits.max_header_bytes
        if too_large or len(self.headers) > self.limits.max_header_count:
            self._refuse(431)

    def on_headers_complete(self) -> None:
        """All headers are there."""
        self._enter(_Phase.BODY)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The whole request is there."""
        self._enter(_Phase.NOTHING)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The whole reply was written."""
        if self._reply is not None:
            self._reply.flush()
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        cycle.transport = self._reply = _ReplyTransport(self.transport, cycle)
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """Answer a request that could not be parsed, or was refused while it was."""
        if self._refusal == 400:
            super().send_400_response(msg)
        else:
            self._end(self._refusal, "headers", "the request's line or headers are too large")

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        super().pause_writing()
        self._unwritten, self._unwritten_since = self.transport.get_write_buffer_size(), self.loop.time()

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        self._unwritten_since = None

    def shutdown(self) -> None:
        """Let the request in progress finish; listen a little longer, as one may be on its way."""
        if self._idle:
            self._closes_at = self.loop.time() + LINGER_SECONDS
        else:
            self.cycle.keep_alive = False

    def check(self, now: float) -> None:
        """End the connection if it is over one of the times."""
        if self._phase is _Phase.HEADERS and now - self._phase_began > self.limits.header_seconds:
            self._end(408, "headers", "the headers took too long")
        elif self._phase is _Phase.BODY and now - self._phase_began > self.limits.body_seconds:
            self._end(408, "body", "the body took too long")
        elif self._unwritten_since is not None:
            self._check_reader(now, self._unwritten_since)
        if self._closes_at is not None and now >= self._closes_at and self._idle:
            self.transport.close()

    @property
    def _idle(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # none before the first request
        return cycle is None or cycle.response_complete

    def _check_reader(self, now: float, since: float) -> None:
        unwritten = self.transport.get_write_buffer_size()
        if unwritten < self._unwritten:
            self._unwritten, self._unwritten_since = unwritten, now
        elif now - since > self.limits.write_seconds:
            metrics.connection_ended("reader")
            self.transport.abort()

    def _enter(self, phase: _Phase) -> None:
        self._phase, self._phase_began = phase, self.loop.time()

    def _refuse(self, status: int) -> None:
        self._refusal = status
        raise _Refused

    def _end(self, status: int, reason: str, message: str) -> None:
        """Say why, unless nothing was asked or an answer is on its way already, and close."""
        metrics.connection_ended(reason)
        self._enter(_Phase.NOTHING)
        if (self._asked or status == 503) and (self._idle or not self.cycle.response_started):
            body = message.encode()
            head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            length = b"content-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + length + body)
        self.transport.close()


def protocol_with(limits: ConnectionLimits, wakefulness: Wakefulness = ASLEEP) -> type[LimitedProtocol]:
    """The protocol under these limits; what comes in touches `wakefulness`."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits, "wakefulness": wakefulness})
