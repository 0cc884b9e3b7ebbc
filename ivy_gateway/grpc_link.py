"""A link over gRPC, to a server anywhere: `Describe`, then one `InferStream`.

Knows nothing of who waits for a reply.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import NoReturn

import grpc
import grpc.aio

from ivy_gateway.link import DESCRIBE_SECONDS, Deliver, Link, LinkLost
from ivy_gateway.wire import Dispatch, add_cancel, add_chunk
from protos.codec import CHANNEL_OPTIONS, FRAME_BYTES
from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1 import inference_pb2_grpc

# Pings only while a stream is open (it always is): a peer that vanished without a word is noticed in 20 s.
_OPTIONS: tuple[tuple[str, int], ...] = (
    *CHANNEL_OPTIONS,
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),  # one connection per link, never a shared one
)


@contextlib.asynccontextmanager
async def opened(
    address: str, credentials: grpc.ChannelCredentials | None, host: str = ""
) -> AsyncIterator[Link]:
    """A link to `address`; `host` is whom its certificate must name, where that is not the address.

    `credentials` `None`: in the clear.
    """
    # A channel for each link: nothing of a connection that died without a word is kept.
    async with _channel(address, credentials, host) as channel:
        yield _GrpcLink(channel)


def _channel(address: str, credentials: grpc.ChannelCredentials | None, host: str) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    named = (("grpc.ssl_target_name_override", host),) if host else ()
    return grpc.aio.secure_channel(address, credentials, options=(*_OPTIONS, *named))


class _GrpcLink(Link):
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        self._outbox: asyncio.Queue[tuple[int, Dispatch | None]] = asyncio.Queue()  # None: a cancel
        self._with_segments = False

    async def describe(self) -> pb.DescribeReply:
        with _lost_in_words():
            description = await self._stub.Describe(pb.DescribeRequest(), timeout=DESCRIBE_SECONDS)
        self._with_segments = description.num_segments > 1
        return description

    async def carry(self, deliver: Deliver) -> NoReturn:
        with _lost_in_words():
            call = self._stub.InferStream()
            writer = asyncio.create_task(self._write(call))
            try:
                async for frame in call:
                    for reply in frame.replies:
                        deliver(reply)
            finally:
                call.cancel()
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
        raise LinkLost("the stream ended")

    def send(self, correlation_id: int, dispatch: Dispatch) -> None:
        self._outbox.put_nowait((correlation_id, dispatch))

    def cancel(self, correlation_id: int) -> None:
        self._outbox.put_nowait((correlation_id, None))

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.RequestFrame, pb.ReplyFrame]) -> None:
        """Send all that waits as one message, up to a size, again and again."""
        # One task owns all writes: grpc.aio allows one at a time, and a cancelled write ends the stream.
        while True:
            entry, room, frame = await self._outbox.get(), FRAME_BYTES, pb.RequestFrame()
            while True:
                room -= self._add(frame, *entry)
                if room <= 0 or self._outbox.empty():
                    break
                entry = self._outbox.get_nowait()
            await call.write(frame)

    def _add(self, frame: pb.RequestFrame, correlation_id: int, dispatch: Dispatch | None) -> int:
        """Put a chunk, or the cancel of one, into `frame`; the bytes of its ids."""
        if dispatch is None:
            add_cancel(frame, correlation_id)
            return 0
        add_chunk(frame, correlation_id, dispatch, with_segments=self._with_segments)
        return dispatch.num_bytes


@contextlib.contextmanager
def _lost_in_words() -> Iterator[None]:
    """What the library raises for a lost connection, as `LinkLost`."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise LinkLost(f"{error.code().name}: {error.details() or 'no details'}") from error
    except grpc.aio.UsageError as error:
        raise LinkLost(str(error)) from error
    except asyncio.InvalidStateError as error:  # how it says that the call ended under a write
        raise LinkLost("the stream broke") from error
