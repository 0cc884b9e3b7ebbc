"""The HTTP/1.1 client of every measurement: raw sockets, kept alive, one request at a time on each.

It is cheap enough to share two cores with what it measures, and it counts what no client library tells:
replies that nobody asked for. A `Connection` is waited for by whoever holds it (`tables.closed_loop` holds
many), a `Client`'s by an event loop. Knows HTTP as far as servers of JSON need it, and nothing of what bodies
mean.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

_RECEIVE_BYTES = 1 << 20
_FEW_BYTES = (
    1 << 16
)  # an event loop comes again for the rest; a buffer of a megabyte costs it as much as a reply
_TIMEOUT_SECONDS = 300.0
_END_OF_HEAD = b"\r\n\r\n"
_LENGTH, _CHUNKED = b"\r\ncontent-length:", b"\r\ntransfer-encoding:chunked"
_WITHOUT_BODY = (204, 304)
_REQUEST_IDS = itertools.count(1)


class NoAnswer(ConnectionError):
    """The connection could not be made, ended before the answer did, or carried something else than HTTP."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def encode_request(
    method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    """A whole request as bytes; JSON where there is a body."""
    lines = [f"{method} {path} HTTP/1.1", "host: loopback", "accept: */*"]
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def new_request_id() -> str:
    """An id that no other request of this process has."""
    return f"load-{next(_REQUEST_IDS)}"


class ReplyReader:
    """Replies out of the bytes of one connection, as they come.

    A body has a length, comes in chunks, or is none (204, 304); 1xx replies are passed over.
    """

    __slots__ = ("_body_at", "_chunk_at", "_data", "_whole_at", "status")

    def __init__(self) -> None:
        self._data = bytearray()
        self.clear()

    def clear(self) -> None:
        """Drop all that came."""
        self._data.clear()
        self._begin()

    def _begin(self) -> None:
        self.status = 0  # until the head is there
        self._body_at = 0
        self._chunk_at = 0  # where the next chunk begins; 0: no chunks
        self._whole_at = 0  # bytes of the whole reply, once that is known

    def feed(self, data: bytes) -> bool:
        """Take in bytes; whether a reply is whole. Raises `NoAnswer` for what is no such HTTP."""
        self._data += data
        if not self.status:
            self._read_head()
        if self._chunk_at and not self._whole_at:
            self._pass_chunks()
        return 0 < self._whole_at <= len(self._data)

    def take(self) -> Reply:
        """The whole reply; what came after it stays."""
        lines = self._data[: self._body_at].decode("latin-1").split("\r\n")[1:-2]
        fields = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in fields}
        body = bytes(self._data[self._body_at : self._whole_at])
        reply = Reply(self.status, headers, _joined(body) if self._chunk_at else body)
        del self._data[: self._whole_at]
        self._begin()
        return reply

    def _read_head(self) -> None:
        end = self._data.find(_END_OF_HEAD)
        if end < 0:
            return
        head = self._data[:end].lower()
        try:
            status = int(head[len(b"http/1.1 ") :][:3])
            at = head.find(_LENGTH)
            length = int(head[at + len(_LENGTH) :].partition(b"\r\n")[0]) if at >= 0 else None
        except ValueError:
            raise NoAnswer(f"not HTTP: {bytes(self._data[:end])!r}") from None
        if status < 200:
            del self._data[: end + len(_END_OF_HEAD)]
            self._read_head()
            return
        self.status, self._body_at = status, end + len(_END_OF_HEAD)
        if length is not None:
            self._whole_at = self._body_at + length
        elif _CHUNKED in head.replace(b" ", b""):
            self._chunk_at = self._body_at
        elif status in _WITHOUT_BODY:
            self._whole_at = self._body_at
        else:
            raise NoAnswer(f"a reply without a length: {bytes(self._data[:end])!r}")

    def _pass_chunks(self) -> None:
        """Go on to the last chunk, which is empty, as far as they are there."""
        while (end := self._data.find(b"\r\n", self._chunk_at)) >= 0:
            try:
                length = int(self._data[self._chunk_at : end].partition(b";")[0], 16)
            except ValueError:
                raise NoAnswer(f"not a chunk: {bytes(self._data[self._chunk_at : end])!r}") from None
            self._chunk_at = end + 2 + length + 2
            if not length:
                self._whole_at = self._chunk_at
                return


def _joined(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size.partition(b";")[0], 16)
        parts.append(body[:length])
        body = body[length + 2 :]
    return b"".join(parts)


class Connection:
    """One connection with at most one request under way."""

    __slots__ = ("_reader", "_socket", "sent_ns")

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._reader = ReplyReader()
        self.sent_ns = 0  # when the last request went out, on the machine's own clock

    @classmethod
    def to(cls, address: tuple[str, int]) -> Connection:
        """Connect, and wait for that. Raises `OSError`."""
        return cls(socket.create_connection(address, timeout=_TIMEOUT_SECONDS))

    def fileno(self) -> int:
        """For whoever waits for several."""
        return self._socket.fileno()

    @property
    def status(self) -> int:
        """Of the reply under way; 0 until its head is there."""
        return self._reader.status

    def send(self, request: bytes) -> None:
        """Put the whole request on its way; what is left of earlier replies is dropped."""
        self._reader.clear()
        self.sent_ns = time.perf_counter_ns()
        self._socket.sendall(request)

    def send_some(self, request: memoryview) -> memoryview:
        """Of a request as much as goes without waiting; the rest."""
        try:
            return request[self._socket.send(request) :]
        except BlockingIOError:
            return request

    def receive(self, most: int = _RECEIVE_BYTES) -> bool:
        """Take in what is there, up to `most` bytes; whether a reply is whole.

        Raises `NoAnswer`, or other `OSError`.
        """
        data = self._socket.recv(most)
        if not data:
            raise NoAnswer("closed by the server")
        return self._reader.feed(data)

    def take(self) -> Reply:
        """The whole reply."""
        return self._reader.take()

    def another(self) -> bool:
        """Whether behind the reply that was taken another one is whole."""
        return self._reader.feed(b"")

    def ask(self, request: bytes) -> Reply:
        """Send, and wait for the reply."""
        self.send(request)
        while not self.receive():
            pass
        return self.take()

    def close(self) -> None:
        """Hang up, whatever is under way."""
        self._socket.close()


class _Watched:
    """A connection that the running event loop watches; `surplus` counts replies beyond those asked for."""

    def __init__(self, connection: Connection) -> None:
        self.open = True
        self.surplus = 0
        self._connection = connection
        self._answer: asyncio.Future[Reply] | None = None
        self._unsent = memoryview(b"")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection.fileno(), self._receive)

    @classmethod
    async def to(cls, host: str, port: int) -> _Watched:
        """Connect. Raises `NoAnswer`."""
        endpoint = socket.socket()
        endpoint.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(endpoint, (host, port))
            return cls(Connection(endpoint))
        except OSError as error:
            endpoint.close()
            raise NoAnswer(f"cannot connect: {error}") from None
        except BaseException:
            endpoint.close()
            raise

    async def ask(self, request: bytes) -> Reply:
        """Send one whole request and wait for its answer. Raises `NoAnswer`."""
        if not self.open:
            raise NoAnswer("the connection is closed")
        self._answer = self._loop.create_future()
        self._send(memoryview(request))
        if self._unsent:
            self._loop.add_writer(self._connection.fileno(), self._send_rest)
        try:
            return await self._answer
        finally:
            self._answer = None

    def close(self, reason: str = "by us") -> None:
        """Close it, whatever is under way."""
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_writer(self._connection.fileno())
        self._connection.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(NoAnswer(f"closed before the answer was there: {reason}"))

    def _send(self, request: memoryview) -> None:
        """A server that stops reading may have answered: what it said is still to be received."""
        try:
            self._unsent = self._connection.send_some(request)
        except OSError:
            self._unsent = memoryview(b"")

    def _send_rest(self) -> None:
        self._send(self._unsent)
        if not self._unsent:
            self._loop.remove_writer(self._connection.fileno())

    def _receive(self) -> None:
        try:
            whole = self._connection.receive(_FEW_BYTES)
            while whole and self.open:
                self._deliver(self._connection.take())
                whole = self._connection.another()
        except BlockingIOError:
            return
        except OSError as error:
            self.close(str(error))

    def _deliver(self, reply: Reply) -> None:
        if self._answer is None or self._answer.done():
            self.surplus += 1
            return
        self._answer.set_result(reply)
        if reply.headers.get("connection", "").lower() == "close":
            self.close()


@dataclass(slots=True)
class Client:
    """Kept connections to one server; as many as there are requests at a time."""

    host: str
    port: int
    surplus: int = 0
    _idle: list[_Watched] = field(default_factory=list)

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

    async def _connection(self) -> _Watched:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
            self._drop(connection)
        return await _Watched.to(self.host, self.port)

    def _drop(self, connection: _Watched) -> None:
        self.surplus += connection.surplus
        connection.close()
