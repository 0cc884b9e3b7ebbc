"""One replica: a long-lived link to one server, the chunks in flight on it, how it fares, what it serves.

Whether it makes progress is told by its heartbeats and their absence. Knows nothing of its peers, of HTTP or
of texts, nor how a link carries what it carries: chunks of ids go out, rows come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import grpc

from ivy_gateway import frame_link, grpc_link, metrics
from ivy_gateway.ejection import FailureRecord
from ivy_gateway.errors import DeadlineExceeded, Unavailable
from ivy_gateway.jobs import Chunk, Lane, Output
from ivy_gateway.link import Link, LinkLost
from ivy_gateway.wakefulness import ASLEEP, Wakefulness
from ivy_gateway.wire import ChunkRows, Dispatch, to_error, to_rows
from protos.frames import ADDRESS_PREFIX
from protos.stamps import stamp
from protos.tulip.v1 import inference_pb2 as pb

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 1.0
LAST_LOCAL_BACKOFF_SECONDS = 0.1  # where nobody listens on this machine: asking costs nobody anything
# Servers send a heartbeat at least twice a second for as long as they run at all.
SILENCE_SECONDS = 1.5
RECONNECT_SECONDS = 10.0
BULK_SHARE = 0.5  # of a server's queue: the rest is kept for interactive chunks


class ReplicaState(enum.Enum):
    """Where a replica stands: `READY` ones get work, and `EJECTED` ones where nobody else is left."""

    CONNECTING = "connecting"
    READY = "ready"
    EJECTED = "ejected"  # it answers, but mostly with failures
    STALLED = "stalled"  # its stream is silent
    WEDGED = "wedged"  # it says itself that nothing moves
    DRAINING = "draining"  # finishes what it has
    LEAVING = "leaving"  # its address is gone; finishes what it has
    REFUSED = "refused"


_AT_FAULT = frozenset({ReplicaState.EJECTED, ReplicaState.STALLED, ReplicaState.WEDGED})


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How a replica is connected to and when it counts as stopped. `credentials` `None`: in the clear.

    A socket of this machine is always in the clear: whom the file's permissions let in may speak.
    """

    credentials: grpc.ChannelCredentials | None = None
    silence_seconds: float = SILENCE_SECONDS  # without any message: out of rotation
    reconnect_seconds: float = RECONNECT_SECONDS  # without any message: the stream is given up
    wakefulness: Wakefulness = ASLEEP  # touched by chunks that go out and by what answers them


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica as `/info` shows it; `reason` says why it is not ready."""

    address: str
    state: ReplicaState
    reason: str
    outstanding_tokens: int
    description: pb.DescribeReply | None


class ReplicaRefused(Exception):
    """The replica is alive but serves something else than this gateway does; the message says what."""


class Replica:
    """One long-lived link to one server, and the futures of the chunks in flight on it.

    `address` is `frames:/path` for a socket of this machine, and else one for gRPC. `check` raises
    `ReplicaRefused` for a description that this gateway cannot use; `on_change` is called whenever the state
    changes. `host` is whom its certificate must name, where that is not the address.
    """

    def __init__(
        self,
        address: str,
        check: Callable[[pb.DescribeReply], None],
        on_change: Callable[[], None],
        settings: LinkSettings | None = None,
        host: str = "",
    ) -> None:
        self.address = address
        self.reason = "not connected yet"
        self.description: pb.DescribeReply | None = None
        self.accepted = False  # its description was checked, and the connection still stands
        self.failures = FailureRecord(_now)
        self._check = check
        self._on_change = on_change
        self._settings = settings or LinkSettings()
        self._host = host
        self._path = address.removeprefix(ADDRESS_PREFIX) if address.startswith(ADDRESS_PREFIX) else ""
        self._stream_state = ReplicaState.CONNECTING
        self._published: ReplicaState | None = None
        self._leaving = False
        self._outstanding = dict.fromkeys(Lane, 0)
        self._pending: dict[int, asyncio.Future[pb.InferReply]] = {}
        self._link: Link | None = None  # while chunks can go out
        self._next_id = 1
        self._backoff = FIRST_BACKOFF_SECONDS
        self._silence = 0.0  # seconds without a message, of those in which this process ran
        self._stream: asyncio.Timeout | None = None  # around the open stream

    @property
    def state(self) -> ReplicaState:
        """Where it stands now."""
        if self._leaving:
            return ReplicaState.LEAVING
        if self._stream_state is ReplicaState.READY and self.failures.ejected:
            return ReplicaState.EJECTED
        return self._stream_state

    @property
    def outstanding_tokens(self) -> int:
        """Tokens leased to this replica and not yet given back."""
        return sum(self._outstanding.values())

    @property
    def status(self) -> ReplicaStatus:
        """A snapshot for `/info`."""
        reason = "too many failures in a row" if self.state is ReplicaState.EJECTED else self.reason
        return ReplicaStatus(self.address, self.state, reason, self.outstanding_tokens, self.description)

    def has_room(self, cost: int) -> bool:
        """Whether `cost` more tokens fit the server's own queue; an idle replica takes anything.

        One on probation takes one chunk.
        """
        assert self.description is not None
        limit, outstanding = self.description.max_waiting_tokens, self.outstanding_tokens
        if not outstanding:
            return True
        return not self.failures.on_probation and (not limit or outstanding + cost <= limit)

    def has_bulk_room(self, cost: int) -> bool:
        """Whether `cost` more tokens fit the part of the server's queue that bulk chunks may take."""
        assert self.description is not None
        limit, outstanding = BULK_SHARE * self.description.max_waiting_tokens, self._outstanding[Lane.BULK]
        return not (limit and outstanding) or outstanding + cost <= limit

    def charge(self, cost: int, lane: Lane) -> None:
        """Add `cost` (negative: give back) to the outstanding tokens."""
        self._outstanding[lane] += cost
        metrics.replica_outstanding(self.address, self.outstanding_tokens)

    def leave(self) -> None:
        """Take no new chunks; those in flight are finished."""
        self._leaving = True
        self._publish()

    def stay(self) -> None:
        """Take back `leave`."""
        self._leaving = False
        self._publish()

    def tick(self, seconds: float) -> None:
        """Let `seconds` without a message pass, if there was none; what silence means is decided here."""
        self._silence += seconds
        if self._stream is not None and self._silence > self._settings.silence_seconds:
            reason = f"no message for {self._settings.silence_seconds:g} s"
            if self._stream_state not in (ReplicaState.STALLED, ReplicaState.CONNECTING):
                self._change_state(ReplicaState.STALLED, reason)
                self._abandon(reason)
            if self._silence > self._settings.reconnect_seconds and not self._stream.expired():
                self._stream.reschedule(_now())
        self._publish()

    async def infer(self, chunk: Chunk, deadline: float) -> ChunkRows:
        """Send one chunk and wait for its rows until `deadline` on the loop's clock.

        Raises the error that the server's failure maps to, `Unavailable` when the link is lost, and
        `DeadlineExceeded`. Leaving early, for whatever reason, tells the server to drop the chunk.
        """
        loop = asyncio.get_running_loop()
        began, link, reply = loop.time(), self._ready_link(), loop.create_future()
        correlation_id, self._next_id = self._next_id, self._next_id + 1
        self._pending[correlation_id] = reply
        late = loop.call_at(deadline, _end_late, reply)
        try:
            link.send(correlation_id, Dispatch.of(chunk, deadline))
            self._settings.wakefulness.touch()
            stamp("gateway.sent")
            metrics.chunk_sent()
            rows = to_rows(await reply, chunk, self._row_width(chunk.output))
            metrics.phase_ended("wire", max(0.0, loop.time() - began - rows.queue - rows.inference))
            return rows
        except _FailedChunk as failed:
            raise to_error(failed.failure, chunk) from None
        finally:
            late.cancel()
            if self._pending.pop(correlation_id, None) is not None:  # nobody has answered it
                link.cancel(correlation_id)

    def _row_width(self, output: Output) -> int:
        """Values in a row of `output`; 0: the server has not said."""
        assert self.description is not None
        match output:
            case Output.TOKENS:
                return self.description.hidden_size
            case Output.BITS:
                return -(-self.description.dimensions // 8)
            case _:
                return self.description.dimensions

    def _ready_link(self) -> Link:
        if self._stream_state is not ReplicaState.READY or self._link is None:
            raise Unavailable(f"the server at {self.address} was lost")
        return self._link

    async def run(self) -> None:
        """Connect, serve, and connect again after a loss, until cancelled."""
        while True:
            with self._lost_when_left():
                async with self._open_link() as link:
                    await self._connect(link)
                    await self._exchange(link)
            # Spread, so that many gateways do not come back in step.
            await asyncio.sleep(self._backoff * random.uniform(0.5, 1.0))  # noqa: S311
            self._backoff = min(2 * self._backoff, self._last_backoff)

    @property
    def _last_backoff(self) -> float:
        local = self._path and self._stream_state is not ReplicaState.REFUSED
        return LAST_LOCAL_BACKOFF_SECONDS if local else LAST_BACKOFF_SECONDS

    def _open_link(self) -> AbstractAsyncContextManager[Link]:
        if self._path:
            return frame_link.opened(self._path)
        return grpc_link.opened(self.address, self._settings.credentials, self._host)

    @contextlib.contextmanager
    def _lost_when_left(self) -> Iterator[None]:
        """Whatever ends the block, the replica is not ready afterwards and nobody waits for it."""
        state, reason = ReplicaState.CONNECTING, "the stream ended"
        try:
            yield
        except ReplicaRefused as refusal:
            state, reason = ReplicaState.REFUSED, str(refusal)
        except LinkLost as lost:
            reason = str(lost)
        except asyncio.CancelledError:
            reason = "the gateway stops"
            raise
        except TimeoutError:
            reason = f"no message for {self._settings.reconnect_seconds:g} s"
        except Exception as error:  # costs this connection, and not the replica for ever
            reason = f"a bug in the gateway: {error!r}"
            logger.exception("this is a bug: the connection to replica %s", self.address)
        finally:
            self.accepted = False
            self._change_state(state, reason)
            self._fail_pending(reason)

    async def _connect(self, link: Link) -> None:
        self.description = await link.describe()
        self._check(self.description)
        self.accepted = True
        self.failures.clear()

    async def _exchange(self, link: Link) -> None:
        """Carry chunks out and replies in until the link ends; the first heartbeat makes it ready.

        Raises `TimeoutError` when `tick` gives the link up.
        """
        self._silence = 0.0
        self._link = link
        try:
            async with asyncio.timeout(None) as self._stream:
                await link.carry(self._deliver)
        finally:
            self._stream = self._link = None

    def _deliver(self, reply: pb.StreamReply) -> None:
        self._silence = 0.0
        body = reply.WhichOneof("body")
        if body == "heartbeat":
            self._hear(reply.heartbeat)
            return
        self._settings.wakefulness.touch()
        future = self._pending.pop(reply.correlation_id, None)
        if future is None or future.done():  # cancelled or late meanwhile
            return
        if body == "reply":
            stamp("gateway.reply")
            future.set_result(reply.reply)
        else:
            future.set_exception(_FailedChunk(reply.failure))

    def _hear(self, heartbeat: pb.Heartbeat) -> None:
        """Believe what the server says of itself."""
        if heartbeat.wedged:
            reason = "its oldest step never ends"
            if self._stream_state is not ReplicaState.WEDGED:
                logger.debug("oldest step of %s: %.1f s", self.address, heartbeat.oldest_step_us / 1e6)
                self._change_state(ReplicaState.WEDGED, reason)
                self._abandon(reason)
        elif heartbeat.draining:
            self._change_state(ReplicaState.DRAINING, "it is being stopped")
        else:
            self._backoff = FIRST_BACKOFF_SECONDS
            self._change_state(ReplicaState.READY, "")

    def _change_state(self, state: ReplicaState, reason: str) -> None:
        if (state, reason) != (self._stream_state, self.reason):
            self._stream_state, self.reason = state, reason
            self._publish()

    def _publish(self) -> None:
        """Tell everybody, if the state is another one than last time."""
        state, before = self.state, self._published
        if state is before:
            return
        self._published = state
        metrics.replica_state(self.address, state.value)
        if state in _AT_FAULT and before not in _AT_FAULT:
            metrics.replica_ejected(state.value)
        if state is ReplicaState.READY and before in _AT_FAULT:
            metrics.replica_recovered()
        reason = self.status.reason
        first = before is None and state is ReplicaState.CONNECTING  # what it was from the beginning
        level = logging.DEBUG if first else logging.WARNING if state in _AT_FAULT else logging.INFO
        logger.log(level, "replica %s: %s%s", self.address, state.value, reason and f" ({reason})")
        self._on_change()

    def _abandon(self, reason: str) -> None:
        """Let every chunk in flight be tried elsewhere, and tell the server, should it ever read on."""
        if self._link is not None:
            for correlation_id in self._pending:
                self._link.cancel(correlation_id)
        self._fail_pending(reason)

    def _fail_pending(self, reason: str) -> None:
        failure = pb.Failure(
            code=grpc.StatusCode.UNAVAILABLE.value[0],
            message=f"the server at {self.address} was lost: {reason}",
        )
        for future in self._pending.values():
            if not future.done():
                future.set_exception(_FailedChunk(failure))
        self._pending.clear()


class _FailedChunk(Exception):
    """A chunk's failure on its way from the stream to whoever waits."""

    def __init__(self, failure: pb.Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def _end_late(reply: asyncio.Future[pb.InferReply]) -> None:
    if not reply.done():
        reply.set_exception(DeadlineExceeded("the deadline passed before the rows were there"))


def _now() -> float:
    return asyncio.get_running_loop().time()
