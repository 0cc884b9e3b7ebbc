"""An HTTP/1.1 client that is cheap enough to share two cores with the stack it puts under load.

One request at a time on each connection; connections are kept. What no client library tells is told here:
bytes that nobody asked for.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import httptools

_REQUEST_IDS = itertools.count(1)


class NoAnswer(ConnectionError):
    """The connection could not be made, or ended before the answer did."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Connection(asyncio.Protocol):
    """One connection; `surplus` counts answers beyond those asked for."""

    def __init__(self) -> None:
        self.open = False
        self.surplus = 0
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Reply] | None = None
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    @classmethod
    async def to(cls, host: str, port: int) -> Connection:
        """Connect. Raises `NoAnswer`."""
        try:
            _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        except OSError as error:
            raise NoAnswer(f"cannot connect: {error}") from None
        return connection

    async def ask(self, request: bytes) -> Reply:
        """Send one whole request and wait for its answer. Raises `NoAnswer`."""
        if not self.open or self.transport is None:
            raise NoAnswer("the connection is closed")
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            return await self._answer
        finally:
            self._answer = None

    def close(self) -> None:
        """Close it, whatever is under way."""
        if self.transport is not None:
            self.transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self.transport, self.open = cast("asyncio.Transport", transport), True

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        self.open = False
        self._fail(f"closed before the answer was there: {error or 'by the server'}")

    # Called by the parser.

    def on_message_begin(self) -> None:
        """An answer begins."""
        self._headers, self._body = {}, []

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if self._parser.get_status_code() < 200:
            return
        if self._answer is None or self._answer.done():
            self.surplus += 1
            return
        if not self._parser.should_keep_alive():
            self.open = False
        reply = Reply(self._parser.get_status_code(), self._headers, b"".join(self._body))
        self._answer.set_result(reply)

    def _fail(self, reason: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(NoAnswer(reason))


@dataclass(slots=True)
class Client:
    """Kept connections to one server; as many as there are requests at a time."""

    host: str
    port: int
    surplus: int = 0
    _idle: list[Connection] = field(default_factory=list)

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Reply:
        """One request; cancelled, it closes its connection, as a client that leaves. Raises `NoAnswer`."""
        connection = await self._connection()
        try:
            reply = await connection.ask(encode_request(method, path, body, headers))
        except BaseException:
            self._drop(connection)
            raise
        if connection.open:
            self._idle.append(connection)
        else:
            self._drop(connection)
        return reply

    def close(self) -> None:
        """Close all idle connections; `surplus` then holds what came on any of them unasked."""
        while self._idle:
            self._drop(self._idle.pop())

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
            self._drop(connection)
        return await Connection.to(self.host, self.port)

    def _drop(self, connection: Connection) -> None:
        self.surplus += connection.surplus
        connection.close()


def encode_request(
    method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    """A whole request as bytes; JSON where there is a body."""
    lines = [f"{method} {path} HTTP/1.1", "host: loopback"]
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def new_request_id() -> str:
    """An id that no other request of this process has."""
    return f"load-{next(_REQUEST_IDS)}"
