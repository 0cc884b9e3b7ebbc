"""The same requests through aiohttp, with which peers' stated figures were made: to compare the clients.

Costs some hundred microseconds a request, which is why it is not the client of the tables.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator

import aiohttp

from benchmarks.tables.closed_loop import RequestFailed, Timings

_TIMEOUT = aiohttp.ClientTimeout(total=300)


def drive(
    address: tuple[str, int], requests: Iterable[bytes], concurrency: int, seconds: float | None = None
) -> Timings:
    """As `closed_loop.drive`."""
    return asyncio.run(_drive(address, iter(requests), concurrency, seconds or _TIMEOUT.total or 0.0))


async def _drive(
    address: tuple[str, int], waiting: Iterator[bytes], concurrency: int, seconds: float
) -> Timings:
    timings = Timings()
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as session:
        deadline = time.perf_counter() + seconds
        workers = (_send_all(session, address, waiting, deadline, timings) for _ in range(concurrency))
        await asyncio.gather(*workers)
    return timings


async def _send_all(
    session: aiohttp.ClientSession,
    address: tuple[str, int],
    waiting: Iterator[bytes],
    deadline: float,
    timings: Timings,
) -> None:
    for request in waiting:
        head, _, body = request.partition(b"\r\n\r\n")
        path = head.split(b" ", 2)[1].decode()
        sent = time.perf_counter_ns()
        url = f"http://{address[0]}:{address[1]}{path}"
        async with session.post(url, data=body, headers={"content-type": "application/json"}) as reply:
            text = await reply.read()
        received = time.perf_counter_ns()
        if reply.status != 200:
            raise RequestFailed(f"{reply.status} {text[:300]!r}")
        timings.sent.append(sent)
        timings.received.append(received)
        if time.perf_counter() > deadline:
            return
