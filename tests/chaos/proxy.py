"""A TCP proxy that cuts, delays and swallows what goes through it, on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

_PIECE = 64 * 1024


class Proxy:
    """Stands in front of one port. Everything but `port` may be changed while it runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: int) -> None:
        self.port = 0
        self.delay = 0.0  # seconds, of everything that the server says
        self.black_hole = False  # takes everything, passes nothing on, and says nothing
        self._loop = loop
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_connections(self) -> int:
        return len(self._writers) // 2

    def cut(self) -> None:
        """Reset every connection."""

        async def abort() -> None:
            for writer in self._writers:
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(abort(), self._loop).result(5)

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, up_writer}
        self._writers |= both
        try:
            # Cancelled when the proxy ends, of which asyncio's streams would complain.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(
                    self._pass(reader, up_writer, False), self._pass(up_reader, writer, True)
                )
        finally:
            self._writers -= both
            for one in both:
                one.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, back: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(_PIECE):
                if back and self.delay:
                    await asyncio.sleep(self.delay)
                while self.black_hole:
                    await asyncio.sleep(0.02)
                writer.write(piece)
                await writer.drain()
        writer.transport.abort()


@contextlib.contextmanager
def proxies(targets: list[int]) -> Iterator[list[Proxy]]:
    """A proxy in front of each port, for as long as the block lasts."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="proxies")
    thread.start()
    made = [Proxy(loop, target) for target in targets]
    servers = [asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(5) for proxy in made]
    try:
        yield made
    finally:
        asyncio.run_coroutine_threadsafe(_close(servers), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _close(servers: list[asyncio.Server]) -> None:
    for server in servers:
        server.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
