"""A link over a Unix socket of this machine: frames of `protos.frames`, without gRPC.

Replies are delivered where their bytes come in and chunks written where they are sent: no task, no queue.
Knows nothing of who waits for a reply.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NoReturn, cast

from ivy_gateway.link import DESCRIBE_SECONDS, Deliver, Link, LinkLost
from ivy_gateway.wire import Dispatch, add_cancel, add_chunk
from protos.frames import FrameError, FrameSplitter, framed, parse
from protos.tulip.v1 import inference_pb2 as pb


@contextlib.asynccontextmanager
async def opened(path: str) -> AsyncIterator[Link]:
    """A link to the server that listens at `path`. Raises `LinkLost` where none does."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(DESCRIBE_SECONDS):
            transport, link = await loop.create_unix_connection(_FrameLink, path)
    except TimeoutError:
        raise LinkLost(f"no connection within {DESCRIBE_SECONDS:g} s") from None
    except OSError as error:
        raise LinkLost(f"no connection: {error.strerror or error}") from error
    try:
        yield link
    finally:
        transport.abort()


class _FrameLink(asyncio.Protocol, Link):
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None  # while it is open
        self._splitter = FrameSplitter()
        self._greeting: asyncio.Future[pb.DescribeReply | None] = loop.create_future()  # None: none came
        self._over: asyncio.Future[None] = loop.create_future()
        self._failure: Exception | None = None  # why it ended, where that is known here
        self._deliver: Deliver | None = None
        self._early: list[pb.ReplyFrame] = []  # what came before anybody listened
        self._paused = False
        self._held: dict[int, Dispatch | None] = {}  # while paused; None: a cancel
        self._with_segments = False

    async def describe(self) -> pb.DescribeReply:
        try:
            async with asyncio.timeout(DESCRIBE_SECONDS):
                description = await self._greeting
        except TimeoutError:
            raise LinkLost(f"no greeting within {DESCRIBE_SECONDS:g} s") from None
        if description is None:
            raise self._reason()
        self._with_segments = description.num_segments > 1
        return description

    async def carry(self, deliver: Deliver) -> NoReturn:
        self._deliver, early = deliver, self._early
        for frame in early:
            self._pass_on(frame, deliver)
        early.clear()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        await self._over
        raise self._reason()

    def send(self, correlation_id: int, dispatch: Dispatch) -> None:
        if self._paused:
            self._held[correlation_id] = dispatch
            return
        frame = pb.RequestFrame()
        add_chunk(frame, correlation_id, dispatch, with_segments=self._with_segments)
        self._write(frame)

    def cancel(self, correlation_id: int) -> None:
        if not self._paused:
            frame = pb.RequestFrame()
            add_cancel(frame, correlation_id)
            self._write(frame)
        elif self._held.get(correlation_id) is not None:  # the server has never heard of it
            del self._held[correlation_id]
        else:
            self._held[correlation_id] = None

    def _write(self, frame: pb.RequestFrame) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(frame))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._splitter.feed(data):
                self._take(payload)
        except FrameError as error:
            self._failure = LinkLost(f"the server speaks no frames: {error}")
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        broken = LinkLost(f"the connection broke: {exc}") if isinstance(exc, OSError) else exc
        self._failure = self._failure or broken
        self._transport = None
        self._held.clear()
        if not self._greeting.done():
            self._greeting.set_result(None)
        if not self._over.done():
            self._over.set_result(None)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        while self._held and not self._paused:
            correlation_id = next(iter(self._held))
            dispatch = self._held.pop(correlation_id)
            self.cancel(correlation_id) if dispatch is None else self.send(correlation_id, dispatch)

    def _take(self, payload: bytes) -> None:
        if self._deliver is not None:
            self._pass_on(parse(pb.ReplyFrame, payload), self._deliver)
        elif self._greeting.done():
            self._early.append(parse(pb.ReplyFrame, payload))
        else:
            self._greeting.set_result(parse(pb.DescribeReply, payload))
            assert self._transport is not None
            self._transport.pause_reading()  # until somebody listens

    def _pass_on(self, frame: pb.ReplyFrame, deliver: Deliver) -> None:
        for reply in frame.replies:
            deliver(reply)

    def _reason(self) -> Exception:
        return self._failure or LinkLost("the stream ended")
