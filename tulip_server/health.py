"""Health from forward progress: watches the oldest step, and tells whoever asks or listens.

Knows steps as their age and what they may take; nothing of chunks. Runs on the event loop that serves, so
that a heartbeat says that this loop turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from grpc_health.v1.health_pb2 import HealthCheckResponse

from protos.tulip.v1 import inference_pb2 as pb
from tulip_server.batcher import Batcher
from tulip_server.runner import Runner
from tulip_server.step_clock import Step

log = logging.getLogger(__name__)

INFERENCE_SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
SERVICES = ("", INFERENCE_SERVICE)  # "" is the server as a whole

LOOK_SECONDS = 0.1
LOOKS_A_BEAT = 4
# Between two looks, a step grows older by no more than this: a process that was stopped, or starved, did not
# see its device stand still for as long.
_LONGEST_LOOK = 1.0


class Statuses(Protocol):
    """The gRPC health service."""

    async def set(self, service: str, status: HealthCheckResponse.ServingStatus) -> None:
        """What a service's health is from now on."""
        ...

    async def enter_graceful_shutdown(self) -> None:
        """Nothing serves any more, whatever is set later."""
        ...


class HealthMonitor:
    """One server's health: serving, wedged while the oldest step is far older than such steps get, draining.

    While wedged, new chunks are refused and not queued: another replica can answer them at once, and here
    they would only grow old. Those that were taken in stay, and are computed if the step returns.
    `announce` sends a heartbeat to every client.
    """

    def __init__(
        self,
        runner: Runner,
        batcher: Batcher,
        statuses: Statuses,
        announce: Callable[[pb.Heartbeat], None],
    ) -> None:
        self.draining = False
        self.step_age = 0.0  # of the oldest step; 0: there is none
        self._runner = runner
        self._batcher = batcher
        self._statuses = statuses
        self._announce = announce
        self._step: Step | None = None
        self._looked = batcher.now()

    @property
    def wedged(self) -> bool:
        """Whether nothing moves; nothing is taken in meanwhile."""
        return self._batcher.wedged

    async def run(self) -> None:
        """Look, and send heartbeats, until cancelled."""
        looks = 0
        while True:
            changed = await self.look()
            if changed or looks % LOOKS_A_BEAT == 0:
                self.beat()
            looks += 1
            await asyncio.sleep(LOOK_SECONDS)

    async def serve(self) -> None:
        """Healthy from now on."""
        await self._set(HealthCheckResponse.SERVING)

    async def drain(self) -> None:
        """Not healthy from now on, whatever happens; every client is told at once."""
        self.draining = True
        self.beat()
        await self._statuses.enter_graceful_shutdown()

    async def look(self) -> bool:
        """Judge the oldest step, drop what expired in the queue; whether `wedged` has changed."""
        self._batcher.expire()
        self.step_age = self._age()
        allowance = 0.0 if self._step is None else self._runner.step_clock.allowance(self._step)
        wedged = self.step_age > allowance
        if wedged == self._batcher.wedged:
            return False
        self._batcher.wedged = wedged
        if wedged:
            log.error(
                "wedged: a step has not returned for %.1f s, %.1f s is what it may take; nothing is taken in",
                self.step_age,
                allowance,
            )
        else:
            log.warning("the step that hung has returned: serving again")
        await self._set(HealthCheckResponse.NOT_SERVING if wedged else HealthCheckResponse.SERVING)
        return True

    def beat(self) -> None:
        """Send a heartbeat."""
        heartbeat = pb.Heartbeat(
            waiting_tokens=self._batcher.waiting_tokens,
            oldest_step_us=round(1e6 * self.step_age),
            wedged=self.wedged,
            draining=self.draining,
        )
        self._announce(heartbeat)

    def _age(self) -> float:
        now = self._batcher.now()
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK), now
        step, known = self._runner.oldest_step, self._step
        self._step = step
        if step is None:
            return 0.0
        return self.step_age + passed if step is known else min(passed, self._runner.step_age(step, now))

    async def _set(self, status: HealthCheckResponse.ServingStatus) -> None:
        for service in SERVICES:
            await self._statuses.set(service, status)
