"""The pool of replicas: who belongs to it, least outstanding tokens, leases, one retry elsewhere.

Costs are counted in tokens. Knows nothing of how a replica is spoken to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ivy_gateway import metrics
from ivy_gateway.config import GatewayConfig
from ivy_gateway.credentials import replica_credentials
from ivy_gateway.errors import (
    DeadlineExceeded,
    InferenceFailed,
    IvyError,
    Overloaded,
    StartupError,
    Unavailable,
)
from ivy_gateway.jobs import Chunk, Lane
from ivy_gateway.lanes import LaneQueue
from ivy_gateway.replica import (
    LinkSettings,
    Replica,
    ReplicaRefused,
    ReplicaState,
    ReplicaStatus,
)
from ivy_gateway.resolver import Resolver
from ivy_gateway.wakefulness import ASLEEP, Wakefulness
from ivy_gateway.wire import ChunkRows
from protos.tulip.v1 import inference_pb2 as pb

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
# The part of a tick's lateness that counts as a server's silence: the rest is this process's own.
_MAX_TICK_SECONDS = 1.5 * TICK_SECONDS


# Whose weights a newcomer must have: those that serve, or are about to.
_PEERS = frozenset({ReplicaState.READY, ReplicaState.EJECTED, ReplicaState.CONNECTING})


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """How a pool behaves; all times in seconds."""

    resolve_seconds: float = 5.0  # between two lookups of DNS names
    patience_seconds: float = 5.0  # how long work waits after the last replica went
    bulk_patience_seconds: float = 0.5  # how long a bulk chunk steps back
    link: LinkSettings = field(default_factory=LinkSettings)

    @classmethod
    def of(cls, config: GatewayConfig, wakefulness: Wakefulness = ASLEEP) -> PoolSettings:
        """Those that `config` asks for. Raises `StartupError` for certificates that cannot be used."""
        return cls(
            resolve_seconds=config.resolve_seconds,
            patience_seconds=config.replica_patience_seconds,
            bulk_patience_seconds=config.bulk_patience_seconds,
            link=LinkSettings(
                credentials=replica_credentials(config),
                silence_seconds=config.replica_silence_seconds,
                reconnect_seconds=config.replica_reconnect_seconds,
                wakefulness=wakefulness,
            ),
        )


@dataclass(slots=True, eq=False)
class _Waiter:
    """A chunk that waits, in order of arrival in its lane, for a replica with room."""

    cost: int
    lane: Lane
    avoid: Replica | None
    arrival: float
    granted: asyncio.Future[Replica] = field(init=False)  # made once it has to wait


class ReplicaPool:
    """All replicas of one model, seen from one gateway worker.

    `names` are addresses, or DNS names that stand for those found there while the pool runs.
    `tokenizer_hash` is the gateway's own: a replica with another one is refused.
    """

    def __init__(
        self, names: Sequence[str], tokenizer_hash: str, settings: PoolSettings | None = None
    ) -> None:
        if not names:
            raise StartupError("no replicas given: name at least one inference server")
        self._tokenizer_hash = tokenizer_hash
        self._settings = settings or PoolSettings()
        self._resolver = Resolver(names)
        self._waiting: LaneQueue[_Waiter] = LaneQueue(self._settings.bulk_patience_seconds)
        self._replicas: dict[str, Replica] = {}
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._last_description: pb.DescribeReply | None = None
        self._first_ready = asyncio.Event()
        self._lost_one = asyncio.Event()
        self._last_rotation = -math.inf  # when somebody could last take work
        for address, host in self._resolver.known().items():
            self._add(address, host)

    @property
    def outstanding_tokens(self) -> int:
        """Tokens leased to all replicas together."""
        return sum(replica.outstanding_tokens for replica in self._replicas.values())

    @property
    def num_ready(self) -> int:
        """Replicas that can take work now."""
        return len(self._rotation())

    @property
    def num_waiting(self) -> int:
        """Chunks that wait for a replica with room."""
        return len(self._waiting)

    @property
    def healthy(self) -> bool:
        """Whether at least one replica makes progress, or could."""
        return bool(self._rotation())

    @property
    def description(self) -> pb.DescribeReply:
        """What the pool serves, as the last accepted replica said. Raises `Unavailable` before that."""
        if self._last_description is None:
            raise Unavailable("no inference server is ready yet", retry_after=2.0)
        return self._last_description

    def statuses(self) -> list[ReplicaStatus]:
        """Every replica's state, in the order in which they came."""
        return [replica.status for replica in self._replicas.values()]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep all streams up for as long as the block lasts."""
        for replica in self._replicas.values():
            self._start(replica)
        keepers = [asyncio.create_task(_kept(self._watch))]
        if self._resolver.changes:
            keepers.append(asyncio.create_task(_kept(self._follow_names)))
        try:
            yield
        finally:
            tasks = [*keepers, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def first_ready(self) -> None:
        """Wait until some replica has been ready once."""
        await self._first_ready.wait()

    async def infer(self, chunk: Chunk, deadline: float) -> ChunkRows:
        """Rows for `chunk` from the least loaded replica, with one retry, elsewhere where possible.

        Rows follow from the ids alone, so that a chunk may always be computed again; it is, where that may
        help: after a lost stream, a refusal, or a failed step that a neighbour may have been the reason for.
        """
        tried: list[Replica] = []
        try:
            return await self._infer_once(chunk, deadline, tried)
        except (Unavailable, InferenceFailed, Overloaded) as error:
            if not tried or not self._may_help(error, tried[0]):
                raise
            answered = tried[0].state is ReplicaState.READY and not isinstance(error, Overloaded)
            logger.warning("retrying a chunk of %d tokens: %s", chunk.num_tokens, error.message)
            metrics.chunk_retried(type(error).__name__)
        rows = await self._infer_once(chunk, deadline, tried)
        # The chunk was good, so the replica was not: a poisoned one fails everywhere and puts nobody out.
        if answered and tried[0] is not tried[-1]:
            tried[0].failures.failed()
        return rows

    def _may_help(self, error: IvyError, failed: Replica) -> bool:
        """Whether a second attempt may end better: on a full server's own queue it would not."""
        return not isinstance(error, Overloaded) or any(r is not failed for r in self._rotation())

    async def _infer_once(self, chunk: Chunk, deadline: float, tried: list[Replica]) -> ChunkRows:
        avoid = tried[0] if tried else None
        async with self.lease(chunk.num_tokens, deadline, avoid, chunk.lane) as replica:
            tried.append(replica)
            rows = await replica.infer(chunk, deadline)
            replica.failures.succeeded()
            return rows

    def lease(
        self, cost: int, deadline: float, avoid: Replica | None = None, lane: Lane = Lane.INTERACTIVE
    ) -> _Lease:
        """A replica with room for `cost` tokens, charged for as long as the block lasts.

        Waits in line while every replica is full, and for a while when the last one has just gone. `avoid` is
        taken only when it is the last one. Raises `Unavailable` when there is nobody to wait for and
        `DeadlineExceeded` when nobody had room in time.
        """
        return _Lease(self, _Waiter(cost, lane, avoid, time.monotonic()), deadline)

    async def _acquire(self, waiter: _Waiter, deadline: float) -> Replica:
        if not self._waiting and (replica := _replica_for(waiter, self._rotation())) is not None:
            self._last_rotation = waiter.arrival
            replica.charge(waiter.cost, waiter.lane)
            return replica
        waiter.granted = asyncio.get_running_loop().create_future()
        self._waiting.push(waiter)
        self._grant()
        if waiter.granted.done():
            return waiter.granted.result()
        try:
            async with asyncio.timeout_at(deadline):
                return await waiter.granted
        except TimeoutError:
            self._withdraw(waiter)
            raise DeadlineExceeded("the deadline passed before a server had room") from None
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise

    def _withdraw(self, waiter: _Waiter) -> None:
        """The waiter is gone; a lease that was granted in the same moment goes back."""
        granted = waiter.granted
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            self._release(granted.result(), waiter.cost, waiter.lane)
        elif self._waiting.discard(waiter):
            self._grant()

    def _release(self, replica: Replica, cost: int, lane: Lane) -> None:
        replica.charge(-cost, lane)
        if self._waiting:
            self._grant()

    def _grant(self) -> None:
        """Hand free room to the waiting chunks; fail them when nobody has been there for too long."""
        rotation, now = self._rotation(), time.monotonic()
        if rotation:
            self._first_ready.set()
            self._last_rotation = now
        elif now - self._last_rotation < self._settings.patience_seconds:
            return
        while self._waiting and self._grant_one(rotation):
            pass

    def _grant_one(self, rotation: list[Replica]) -> bool:
        """Let the next chunk go, if it can; whether one went."""
        for waiter in self._waiting.heads():
            if not rotation:
                self._waiting.discard(waiter)
                if not waiter.granted.done():
                    failure = Unavailable("no inference server is ready", retry_after=2.0)
                    waiter.granted.set_exception(failure)
                return True
            if waiter.lane is Lane.BULK and not any(r.has_bulk_room(waiter.cost) for r in rotation):
                continue  # held back by its own lane only: nobody else waits for that
            replica = _replica_for(waiter, rotation)
            if replica is None:
                return False
            self._waiting.discard(waiter)
            if not waiter.granted.done():
                replica.charge(waiter.cost, waiter.lane)
                waiter.granted.set_result(replica)
            return True
        return False

    def _rotation(self) -> list[Replica]:
        """Who may get work: the ready ones, else those that were put out for their failures."""
        replicas = self._replicas.values()
        ready = [replica for replica in replicas if replica.state is ReplicaState.READY]
        return ready or [replica for replica in replicas if replica.state is ReplicaState.EJECTED]

    def _changed(self) -> None:
        """A replica's state is another one."""
        if any(replica.state is ReplicaState.CONNECTING for replica in self._replicas.values()):
            self._lost_one.set()
        self._grant()

    async def _watch(self) -> None:
        """Let time pass for the replicas: only as much as this loop was turning, whatever the clock says."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            seconds, last = min(time.monotonic() - last, _MAX_TICK_SECONDS), time.monotonic()
            for replica in list(self._replicas.values()):
                replica.tick(seconds)
            await self._retire()
            self._grant()

    async def _follow_names(self) -> None:
        """Look the DNS names up again and again, at once when a replica is lost."""
        while True:
            self._lost_one.clear()
            self._update(await self._resolver.resolve())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.resolve_seconds):
                    await self._lost_one.wait()
            await asyncio.sleep(TICK_SECONDS)  # not faster than this, whatever is lost

    def _update(self, addresses: Mapping[str, str]) -> None:
        """Take in new addresses, and let those that vanished leave."""
        for address, replica in self._replicas.items():
            if (address in addresses) == (replica.state is ReplicaState.LEAVING):
                replica.stay() if address in addresses else replica.leave()
        for address in addresses.keys() - self._replicas.keys():
            logger.info("replica %s joins", address)
            self._start(self._add(address, addresses[address]))

    def _add(self, address: str, host: str) -> Replica:
        replica = Replica(address, self._check, self._changed, self._settings.link, host)
        self._replicas[address] = replica
        return replica

    def _start(self, replica: Replica) -> None:
        self._tasks[replica] = asyncio.create_task(replica.run(), name=replica.address)

    async def _retire(self) -> None:
        """End those that leave and owe nothing any more."""
        for address, replica in list(self._replicas.items()):
            if replica.state is ReplicaState.LEAVING and not replica.outstanding_tokens:
                del self._replicas[address]
                task = self._tasks.pop(replica)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                metrics.replica_gone(address)

    def _check(self, description: pb.DescribeReply) -> None:
        """Refuse a replica whose ids mean something else, or whose vectors would differ from its peers'."""
        if description.tokenizer_hash != self._tokenizer_hash:
            theirs, ours = description.tokenizer_hash, self._tokenizer_hash
            raise ReplicaRefused(f"its tokenizer is {theirs or 'unknown'}, the gateway's is {ours}")
        for peer in self._replicas.values():
            weights = peer.description.weights_hash if peer.description is not None else None
            if peer.accepted and peer.state in _PEERS and weights != description.weights_hash:
                raise ReplicaRefused(
                    f"its weights are {description.weights_hash}, those of {peer.address} {weights}"
                )
        self._last_description = description


class _Lease:
    """What `ReplicaPool.lease` gives; no generator, as each chunk has one."""

    __slots__ = ("_deadline", "_pool", "_replica", "_waiter")

    _replica: Replica

    def __init__(self, pool: ReplicaPool, waiter: _Waiter, deadline: float) -> None:
        self._pool = pool
        self._waiter = waiter
        self._deadline = deadline

    async def __aenter__(self) -> Replica:
        self._replica = await self._pool._acquire(self._waiter, self._deadline)
        return self._replica

    async def __aexit__(self, *_: object) -> None:
        self._pool._release(self._replica, self._waiter.cost, self._waiter.lane)


def _replica_for(waiter: _Waiter, rotation: list[Replica]) -> Replica | None:
    """The least loaded replica with room; the one to avoid only as a last resort."""
    candidates = [replica for replica in rotation if replica is not waiter.avoid] or rotation
    with_room = [replica for replica in candidates if replica.has_room(waiter.cost)]
    if waiter.lane is Lane.BULK:
        with_room = [replica for replica in with_room if replica.has_bulk_room(waiter.cost)]
    return min(with_room, key=lambda replica: replica.outstanding_tokens, default=None)


async def _kept(work: Callable[[], Awaitable[None]]) -> None:
    """Run `work`, which has no end, and again should it fail: without it nothing is noticed any more."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("looking after the replicas failed; it begins anew")
            await asyncio.sleep(TICK_SECONDS)
