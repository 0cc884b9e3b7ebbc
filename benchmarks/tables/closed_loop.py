"""A closed loop: each connection sends its next request when the reply to the last one is whole.

One process drives all its connections from one epoll; requests were made ready before the clock started, so
that its own cost is a few microseconds a request.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.http_client import Connection, Reply

_TIMEOUT_SECONDS = 300.0


class RequestFailed(RuntimeError):
    """A reply that is not a 200, or none: it ends the measurement."""


@dataclass(slots=True)
class Timings:
    """When requests went out and their replies were complete, nanoseconds on the machine's own clock."""

    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    @property
    def milliseconds(self) -> list[float]:
        """Latencies in order of completion."""
        return [(end - start) / 1e6 for start, end in zip(self.sent, self.received, strict=True)]


def body_of(reply: Reply) -> bytes:
    """The body of a 200; raises `RequestFailed` for anything else."""
    if reply.status != 200:
        raise RequestFailed(f"{reply.status} {reply.body[:600].decode(errors='replace')}")
    return reply.body


def drive(
    address: tuple[str, int], requests: Iterable[bytes], concurrency: int, seconds: float | None = None
) -> Timings:
    """Send `requests`, `concurrency` at once, until they are used up or `seconds` have passed.

    What is under way then is still waited for. Raises `RequestFailed` for the first reply that is no 200 and
    for a server that is silent, `OSError` for a connection that broke.
    """
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(contextlib.closing(Connection.to(address))) for _ in range(concurrency)
        ]
        return _drive(connections, iter(requests), seconds or _TIMEOUT_SECONDS)


def _drive(connections: Sequence[Connection], waiting: Iterator[bytes], seconds: float) -> Timings:
    timings = Timings()
    deadline = time.perf_counter_ns() + int(1e9 * seconds)
    by_number = {connection.fileno(): connection for connection in connections}
    with select.epoll() as poll:
        for number in by_number:
            poll.register(number, select.EPOLLIN)
        busy = sum(_send_next(connection, waiting) for connection in connections)
        while busy:
            ready = poll.poll(_TIMEOUT_SECONDS)
            if not ready:
                raise RequestFailed(f"no reply within {_TIMEOUT_SECONDS:.0f} s")
            for number, _ in ready:
                connection = by_number[number]
                if not connection.receive():
                    continue
                now = time.perf_counter_ns()
                if connection.status != 200:
                    body_of(connection.take())
                timings.sent.append(connection.sent_ns)
                timings.received.append(now)
                busy -= not (now < deadline and _send_next(connection, waiting))
    return timings


def _send_next(connection: Connection, waiting: Iterator[bytes]) -> bool:
    request = next(waiting, None)
    if request is None:
        return False
    connection.send(request)
    return True
