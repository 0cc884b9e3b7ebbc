"""A Unix socket for gateways on this machine: the frames of `InferStream` without gRPC (see `protos.frames`).

Knows bytes and frames; what they ask for is the streams' business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

from protos.frames import FrameError, FrameSplitter, framed, parse
from protos.tulip.v1 import inference_pb2 as pb
from tulip_server.config import ServerConfig
from tulip_server.errors import StartupError
from tulip_server.socket_file import created_with, make_room
from tulip_server.streams import Streams

log = logging.getLogger(__name__)

_FLAG = "--frames-socket"


class FramesSocket:
    """A socket that has its place. It closes what connects, as if it had refused it, until it serves."""

    def __init__(self, place: socket.socket, path: Path) -> None:
        self.path = path
        self._place = place
        self._connections: set[Connection] = set()
        self._streams: Streams | None = None
        self._greeting = b""

    @classmethod
    def bind(cls, path: Path, mode: int) -> FramesSocket:
        """Take a place that only those may connect to whom `mode` allows.

        One that a dead server left behind is replaced. Raises `StartupError` for one in use, or for a file
        that is none.
        """
        make_room(_FLAG, path)
        place = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with created_with(mode):
                place.bind(str(path))
            place.listen()
        except OSError as error:
            place.close()
            raise StartupError(f"{_FLAG}: {path}: {error.strerror}") from error
        return cls(place, path)

    def serve(self, streams: Streams, description: pb.DescribeReply) -> None:
        """Greet with `description`, and answer, whoever connects from now on."""
        self._streams, self._greeting = streams, framed(description)
        log.info("frames on %s", self.path)

    async def open(self) -> asyncio.Server:
        """Accept connections."""
        return await asyncio.get_running_loop().create_unix_server(self._connected, sock=self._place)

    def abort(self) -> None:
        """Cut every connection."""
        for connection in tuple(self._connections):
            connection.abort()

    def _connected(self) -> asyncio.Protocol:
        if self._streams is None:
            return _Refusal()
        return Connection(self._streams, self._greeting, self._connections)


@contextlib.asynccontextmanager
async def frames_socket(config: ServerConfig) -> AsyncIterator[FramesSocket | None]:
    """The socket that the configuration asks for, accepting; its file is gone when the context ends.

    Raises `StartupError` for a place that cannot be had.
    """
    path = config.frames_socket
    if path is None:
        yield None
        return
    listening = FramesSocket.bind(path, int(config.socket_mode, 8))
    server = await listening.open()
    try:
        yield listening
    finally:
        server.close()
        listening.abort()
        path.unlink(missing_ok=True)
        await asyncio.sleep(0)  # connections that were cut are closed in the loop's next turn


class Connection(asyncio.Protocol):
    """A client's stream over its socket: what comes is taken at once, and what waits is sent at once.

    What comes to wait in one turn of the event loop goes together: with the last rows that the client waits
    for, or in the next turn. While the socket takes no
    more, answers wait in the stream; while too many wait there, nothing is read.
    """

    def __init__(self, streams: Streams, greeting: bytes, connections: set[Connection]) -> None:
        self._streams = streams
        self._greeting = greeting
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._splitter = FrameSplitter()
        self._send_is_due = False
        self._writable = True
        self._reading = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        transport = cast("asyncio.Transport", transport)  # uvloop's are, but do not inherit from it
        # Paused from the first byte that the socket does not take: what waits is counted in one place, the
        # stream. And then uvloop writes at once what it else would at the end of the loop's turn.
        transport.set_write_buffer_limits(high=0)
        self._transport = transport
        self._connections.add(self)
        transport.write(self._greeting)
        self._stream = self._streams.open(self._wake)

    def data_received(self, data: bytes) -> None:
        """Bytes have come, of as many frames as there may be."""
        try:
            for payload in self._splitter.feed(data):
                self._stream.take(parse(pb.RequestFrame, payload))
        except FrameError as error:
            log.warning("a connection to the frames' socket is cut: %s", error)
            self._transport.abort()
            return
        if not self._stream.has_room:
            self._pace_reading()

    def eof_received(self) -> None:
        """The client has closed: nobody reads what is still to be sent."""
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The connection is gone, whoever ended it."""
        self._connections.discard(self)
        self._streams.close(self._stream)

    def pause_writing(self) -> None:
        """The socket takes no more."""
        self._writable = False

    def resume_writing(self) -> None:
        """It takes some again."""
        self._writable = True
        self._send()

    def abort(self) -> None:
        """Cut it, whatever is still to be sent."""
        self._transport.abort()

    def _wake(self, last: bool) -> None:
        if last:
            self._send()
        elif not self._send_is_due:
            self._send_is_due = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        """Send what waits, as far as the socket takes it; at the end close."""
        self._send_is_due = False
        transport, stream = self._transport, self._stream
        if transport.is_closing():
            return
        while self._writable and (frame := stream.next_frame()) is not None:
            transport.write(framed(frame))
        if stream.over:
            transport.close()
        elif not self._reading:
            self._pace_reading()

    def _pace_reading(self) -> None:
        """Read if the client reads."""
        if self._stream.has_room == self._reading:
            return
        self._reading = not self._reading
        if self._reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()


class _Refusal(asyncio.Protocol):
    """Nothing is served yet."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody was too early."""
        cast("asyncio.Transport", transport).abort()
