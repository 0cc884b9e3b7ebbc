"""The pool of replicas: least outstanding tokens, leases, admission, one retry elsewhere.

Costs are counted in tokens. Knows nothing of how a replica is spoken to.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from ivy_gateway import metrics
from ivy_gateway.errors import DeadlineExceeded, InferenceFailed, Overloaded, StartupError, Unavailable
from ivy_gateway.jobs import Chunk
from ivy_gateway.replica import ChunkRows, Replica, ReplicaRefused, ReplicaState, ReplicaStatus
from protos.tulip.v1 import inference_pb2 as pb

logger = logging.getLogger(__name__)

_WORTH_A_RETRY = (Unavailable, InferenceFailed)


@dataclass(slots=True)
class _Waiter:
    """A chunk that waits, in order of arrival, for a replica with room."""

    cost: int
    avoid: Replica | None
    granted: asyncio.Future[Replica] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class ReplicaPool:
    """All replicas of one model, seen from one gateway worker.

    `tokenizer_hash` is the gateway's own: a replica with another one is refused. `max_waiting_tokens`
    bounds the tokens of all admitted requests (0 = no bound).
    """

    def __init__(self, addresses: Sequence[str], tokenizer_hash: str, max_waiting_tokens: int) -> None:
        self._tokenizer_hash = tokenizer_hash
        self._max_waiting_tokens = max_waiting_tokens
        self._admitted_tokens = 0
        self._waiting: collections.deque[_Waiter] = collections.deque()
        self._replicas = [Replica(address, self._check, self._grant) for address in addresses]
        self._last_description: pb.DescribeReply | None = None
        self._first_ready = asyncio.Event()
        if not addresses:
            raise StartupError("no replicas given: name at least one inference server")

    @property
    def outstanding_tokens(self) -> int:
        """Tokens leased to all replicas together."""
        return sum(replica.outstanding_tokens for replica in self._replicas)

    @property
    def num_ready(self) -> int:
        """Replicas that can take work now."""
        return len(self._ready())

    @property
    def healthy(self) -> bool:
        """Whether at least one replica is ready and not stuck."""
        return any(not replica.stuck for replica in self._ready())

    @property
    def description(self) -> pb.DescribeReply:
        """What the pool serves, as the last accepted replica said. Raises `Unavailable` before that."""
        if self._last_description is None:
            raise Unavailable("no inference server is ready yet", retry_after=2.0)
        return self._last_description

    def statuses(self) -> list[ReplicaStatus]:
        """Every replica's state, in the order of the configuration."""
        return [replica.status for replica in self._replicas]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep all streams up for as long as the block lasts."""
        tasks = [asyncio.create_task(replica.run(), name=replica.address) for replica in self._replicas]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def first_ready(self) -> None:
        """Wait until some replica has been ready once."""
        await self._first_ready.wait()

    def check_admission(self) -> None:
        """Raise `Overloaded` when the requests admitted so far already fill the queue."""
        if 0 < self._max_waiting_tokens <= self._admitted_tokens:
            raise Overloaded("Model is overloaded")

    @contextlib.contextmanager
    def admitted(self, cost: int) -> Iterator[None]:
        """Count a whole request of `cost` tokens for as long as the block lasts.

        A request is refused for what is already there, never for its own size: the bound is overshot by at
        most one request, and a large one never starves.
        """
        self.check_admission()
        self._admitted_tokens += cost
        try:
            yield
        finally:
            self._admitted_tokens -= cost

    async def infer(self, chunk: Chunk, deadline: float) -> ChunkRows:
        """Rows for `chunk` from the least loaded replica, with one retry, elsewhere where possible."""
        failed: list[Replica] = []
        try:
            return await self._infer_once(chunk, deadline, failed)
        except _WORTH_A_RETRY as error:
            if not failed:  # there was nobody to ask
                raise
            logger.warning("retrying a chunk of %d tokens: %s", chunk.num_tokens, error.message)
        metrics.chunk_retried()
        return await self._infer_once(chunk, deadline, failed)

    async def _infer_once(self, chunk: Chunk, deadline: float, failed: list[Replica]) -> ChunkRows:
        async with self.lease(chunk.num_tokens, deadline, failed[0] if failed else None) as replica:
            failed.append(replica)
            return await replica.infer(chunk, deadline)

    @contextlib.asynccontextmanager
    async def lease(self, cost: int, deadline: float, avoid: Replica | None = None) -> AsyncIterator[Replica]:
        """A replica with room for `cost` tokens, charged for as long as the block lasts.

        Waits in order of arrival while every ready replica is full. `avoid` is taken only when it is the
        last one. Raises `Unavailable` when none is ready and `DeadlineExceeded` when none had room in time.
        """
        replica = await self._acquire(_Waiter(cost, avoid), deadline)
        try:
            yield replica
        finally:
            self._release(replica, cost)

    async def _acquire(self, waiter: _Waiter, deadline: float) -> Replica:
        self._waiting.append(waiter)
        self._grant()
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
            self._release(granted.result(), waiter.cost)
        elif waiter in self._waiting:
            self._waiting.remove(waiter)
            self._grant()

    def _release(self, replica: Replica, cost: int) -> None:
        replica.charge(-cost)
        self._grant()

    def _grant(self) -> None:
        """Hand free room to the waiting chunks, first come first served."""
        ready = self._ready()
        if ready:
            self._first_ready.set()
        while self._waiting and not (ready and self._replica_for(self._waiting[0], ready) is None):
            waiter = self._waiting.popleft()
            if waiter.granted.done():
                continue
            replica = self._replica_for(waiter, ready)
            if replica is None:
                waiter.granted.set_exception(Unavailable("no inference server is ready", retry_after=2.0))
            else:
                replica.charge(waiter.cost)
                waiter.granted.set_result(replica)

    @staticmethod
    def _replica_for(waiter: _Waiter, ready: list[Replica]) -> Replica | None:
        """The least loaded replica with room; stuck ones, and the one to avoid, only as a last resort."""
        candidates = [r for r in ready if r is not waiter.avoid and not r.stuck] or ready
        with_room = [replica for replica in candidates if replica.has_room(waiter.cost)]
        return min(with_room, key=lambda replica: replica.outstanding_tokens, default=None)

    def _ready(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.state is ReplicaState.READY]

    def _check(self, description: pb.DescribeReply) -> None:
        """Refuse a replica whose ids mean something else, or whose vectors would differ from its peers'."""
        if description.tokenizer_hash != self._tokenizer_hash:
            theirs, ours = description.tokenizer_hash, self._tokenizer_hash
            raise ReplicaRefused(f"its tokenizer is {theirs or 'unknown'}, the gateway's is {ours}")
        ready = self._ready()
        peer = ready[0].description if ready else None
        if peer is not None and description.weights_hash != peer.weights_hash:
            raise ReplicaRefused(
                f"its weights are {description.weights_hash}, those of {ready[0].address} {peer.weights_hash}"
            )
        self._last_description = description
