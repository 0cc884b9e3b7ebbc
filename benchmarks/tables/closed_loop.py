"""The client of every server: raw sockets, keep-alive, requests made ready before the clock starts.

One process drives all its connections from one epoll loop; its own cost is a few microseconds a request.
Knows HTTP/1.1 as far as servers of JSON need it, and nothing of what bodies mean.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_RECEIVE_BYTES = 1 << 20
_TIMEOUT_SECONDS = 300.0
_END_OF_HEAD = b"\r\n\r\n"
_END_OF_CHUNKS = b"0\r\n\r\n"


class RequestFailed(RuntimeError):
    """A reply that is not a 200, or a connection that broke: it ends the measurement."""


@dataclass(slots=True)
class Timings:
    """When requests went out and their replies were complete, nanoseconds on the machine's own clock."""

    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    @property
    def milliseconds(self) -> list[float]:
        """Latencies in order of completion."""
        return [(end - start) / 1e6 for start, end in zip(self.sent, self.received, strict=True)]


def request_bytes(address: tuple[str, int], path: str, body: bytes) -> bytes:
    """A POST of JSON, ready to send."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nContent-Type: application/json\r\n"
        f"Accept: */*\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection:
    """One keep-alive connection with at most one request under way."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=_TIMEOUT_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reply = bytearray()
        self._complete_at = 0  # bytes of the whole reply, once its head is here
        self.sent_ns = 0

    def fileno(self) -> int:
        """For epoll."""
        return self._socket.fileno()

    def send(self, request: bytes) -> None:
        """Put the whole request on its way."""
        self._reply.clear()
        self._complete_at = 0
        self.sent_ns = time.perf_counter_ns()
        self._socket.sendall(request)

    def receive(self) -> bool:
        """Take in what is there; whether the reply is complete. Raises `RequestFailed` unless it is a 200."""
        data = self._socket.recv(_RECEIVE_BYTES)
        if not data:
            raise RequestFailed("the server closed the connection")
        self._reply += data
        if not self._complete_at:
            self._read_head()
        if self._complete_at < 0:
            return self._reply.endswith(_END_OF_CHUNKS)
        return 0 < self._complete_at <= len(self._reply)

    def ask(self, request: bytes) -> bytes:
        """Send, wait, and hand over the reply's body."""
        self.send(request)
        while not self.receive():
            pass
        body = bytes(self._reply[self._reply.index(_END_OF_HEAD) + len(_END_OF_HEAD) :])
        return body if self._complete_at > 0 else _joined_chunks(body)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _read_head(self) -> None:
        end = self._reply.find(_END_OF_HEAD)
        if end < 0:
            return
        head = bytes(self._reply[:end]).lower()
        if not head.startswith(b"http/1.1 200"):
            raise RequestFailed(bytes(self._reply[:600]).decode(errors="replace"))
        at = head.find(b"content-length:")
        if at < 0:
            self._complete_at = -1
        else:
            length = int(head[at + len(b"content-length:") :].partition(b"\r\n")[0])
            self._complete_at = end + len(_END_OF_HEAD) + length


def _joined_chunks(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        parts.append(body[:length])
        body = body[length + 2 :]
    return b"".join(parts)


def drive(
    address: tuple[str, int], requests: Iterable[bytes], concurrency: int, seconds: float | None = None
) -> Timings:
    """Send `requests`, `concurrency` at once, until they are used up or `seconds` have passed.

    What is under way then is still waited for. Raises `RequestFailed` for the first reply that is no 200.
    """
    waiting, timings = iter(requests), Timings()
    deadline = time.perf_counter_ns() + int(1e9 * (seconds or _TIMEOUT_SECONDS))
    connections = [Connection(address) for _ in range(concurrency)]
    poll = select.epoll()
    by_number = {connection.fileno(): connection for connection in connections}
    for number in by_number:
        poll.register(number, select.EPOLLIN)
    busy = sum(_send_next(connection, waiting) for connection in connections)
    while busy:
        for number, _ in poll.poll(_TIMEOUT_SECONDS):
            connection = by_number[number]
            if not connection.receive():
                continue
            now = time.perf_counter_ns()
            timings.sent.append(connection.sent_ns)
            timings.received.append(now)
            busy -= not (now < deadline and _send_next(connection, waiting))
    poll.close()
    for connection in connections:
        connection.close()
    return timings


def _send_next(connection: Connection, waiting: Iterator[bytes]) -> bool:
    request = next(waiting, None)
    if request is None:
        return False
    connection.send(request)
    return True
