"""Health from forward progress: in a fake time, and behind a real port."""

from __future__ import annotations

import asyncio
import logging

import grpc
import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from protos.tulip.v1 import inference_pb2 as pb
from rose_engine.batch import Sequence
from rose_engine.fake import FakeEngine
from tests.tulip_server.conftest import expected_rows, infer_request, rows_of, serving, until
from tests.tulip_server.test_batcher import ManualClock
from tests.tulip_server.test_runner import settled
from tests.tulip_server.test_server import Compiling
from tests.tulip_server.test_service import A, B, infer, manual_engine, status
from tulip_server.batcher import BatchBudget, Batcher
from tulip_server.errors import Wedged
from tulip_server.health import INFERENCE_SERVICE, HealthMonitor
from tulip_server.runner import Runner


class Statuses:
    def __init__(self) -> None:
        self.now: dict[str, int] = {}

    async def set(self, service: str, value: int) -> None:
        self.now[service] = value


class Watched:
    """A monitor over a runner whose steps the test completes, in a time that the test moves."""

    def __init__(self, engine: FakeEngine, depth: int = 1) -> None:
        self.clock, self.engine, self.statuses = ManualClock(), engine, Statuses()
        self.heartbeats: list[pb.Heartbeat] = []
        self.batcher = Batcher(BatchBudget(4, 64), 1000, self.clock)
        self.runner = Runner(engine, self.batcher, depth, cold_step_seconds=60.0)
        self.task = asyncio.create_task(self.runner.run())
        self.monitor = HealthMonitor(self.runner, self.batcher, self.statuses, self.heartbeats.append)

    def submit(self) -> None:
        self.batcher.submit((Sequence(np.arange(4, dtype=np.int32)),))

    async def pass_time(self, seconds: float) -> list[bool]:
        """Look ten times a second, as the monitor does; `wedged` after each look."""
        seen = []
        for _ in range(round(10 * seconds)):
            self.clock.seconds += 0.1
            await settled()
            await self.monitor.look()
            seen.append(self.monitor.wedged)
        return seen

    async def one_step(self) -> None:
        """A step of 0.1 s, from which the server learns what such steps take."""
        self.submit()
        await self.pass_time(0.1)
        self.engine.steps[-1].complete()
        await settled()

    async def end(self) -> None:
        self.batcher.close()
        for _ in range(10):
            for step in self.engine.steps:
                step.complete()
            await settled()
        await self.task


async def test_a_step_is_wedged_after_two_seconds_and_not_before():
    watched = Watched(FakeEngine(manual=True))
    await watched.one_step()
    watched.submit()
    await settled()
    seen = await watched.pass_time(3.0)
    assert seen.index(True) in (19, 20)
    assert all(seen[seen.index(True) :])
    with pytest.raises(Wedged):
        watched.submit()
    assert set(watched.statuses.now.values()) == {HealthCheckResponse.NOT_SERVING}
    assert set(watched.statuses.now) == {"", INFERENCE_SERVICE}
    watched.engine.steps[-1].complete()
    assert await watched.pass_time(0.1) == [False]
    assert set(watched.statuses.now.values()) == {HealthCheckResponse.SERVING}
    watched.submit()
    await watched.end()


async def test_one_line_says_that_it_wedged_and_one_that_it_is_back(caplog):
    watched = Watched(FakeEngine(manual=True))
    await watched.one_step()
    watched.submit()
    await settled()
    with caplog.at_level(logging.INFO, "tulip_server.health"):
        await watched.pass_time(5.0)
        watched.engine.steps[-1].complete()
        await watched.pass_time(1.0)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    await watched.end()


async def test_a_first_step_is_busy_for_a_minute():
    watched = Watched(FakeEngine(manual=True))
    watched.submit()
    await settled()
    assert not any(await watched.pass_time(59.0))
    assert (await watched.pass_time(2.0))[-1]
    await watched.end()


async def test_a_step_that_compiles_is_busy_for_a_minute_and_then_wedged():
    engine = Compiling()
    watched = Watched(engine)
    watched.submit()
    await settled()
    await asyncio.to_thread(engine.started.wait)
    assert not any(await watched.pass_time(59.0))
    assert (await watched.pass_time(2.0))[-1]
    engine.compiled.set()
    while watched.runner.num_in_flight:
        await asyncio.sleep(0.001)
    await watched.monitor.look()
    assert not watched.monitor.wedged
    await watched.end()


async def test_steps_one_after_the_other_never_add_up():
    """With two in flight the second waits for the first: its age counts from when the first was back."""
    watched = Watched(FakeEngine(manual=True), depth=2)
    await watched.one_step()
    for _ in range(2):
        watched.submit()
    await settled()
    for number in range(1, 10):
        assert not any(await watched.pass_time(1.5))
        watched.engine.steps[number].complete()
        watched.submit()
    await watched.end()


async def test_a_process_that_was_stopped_is_not_wedged():
    watched = Watched(FakeEngine(manual=True))
    await watched.one_step()
    watched.submit()
    await settled()
    await watched.pass_time(0.3)
    watched.clock.seconds += 1000.0
    assert not any(await watched.pass_time(0.5))
    await watched.end()


async def test_expired_chunks_are_answered_while_nothing_moves():
    watched = Watched(FakeEngine(manual=True))
    watched.submit()
    await settled()
    chunk = watched.batcher.submit((Sequence(np.arange(4, dtype=np.int32)),), timeout=1.0)
    await watched.pass_time(1.1)
    assert chunk.future.done()
    assert watched.batcher.waiting_tokens == 0
    await watched.end()


# -- behind a port


async def test_a_stream_beats_from_its_first_moment_and_goes_on(carrier):
    async with serving(FakeEngine(), carrier) as running:
        stream = running.stream()
        heartbeats = [await stream.heartbeat() for _ in range(4)]
    assert not any(beat.wedged or beat.draining for beat in heartbeats)
    assert [beat.oldest_step_us for beat in heartbeats] == [0] * 4


async def test_a_heartbeat_tells_what_waits_and_how_old_the_oldest_step_is(waiting, carrier):
    engine = manual_engine()
    async with serving(engine, carrier, depth=1) as running:
        stream = running.stream()
        await stream.write(infer(1, A, B))
        await until(lambda: waiting(running) == 4)
        ages = []
        while len(ages) < 3:
            beat = await stream.heartbeat()
            if beat.waiting_tokens == 4 and beat.oldest_step_us:
                ages.append(beat.oldest_step_us)
    assert ages == sorted(ages)
    assert ages[-1] > ages[0]


async def test_wedging_and_coming_back_are_told_at_once(monkeypatch, carrier):
    monkeypatch.setattr("tulip_server.step_clock.SHORTEST_ALLOWANCE", 0.3)
    engine = manual_engine()
    async with serving(engine, carrier, depth=1) as running:
        stream = running.stream()
        health = HealthStub(running.channel)
        await stream.write(infer(1, A))
        await until(lambda: engine.steps)
        engine.steps[0].complete()
        assert (await stream.read()).correlation_id == 1

        await stream.write(infer(2, B))
        while not (await stream.heartbeat()).wedged:
            pass
        check = await health.Check(HealthCheckRequest(service=INFERENCE_SERVICE))
        assert check.status == HealthCheckResponse.NOT_SERVING
        assert running.server.state.wedged
        await stream.write(infer(3, A))
        refused = await stream.read()
        assert (refused.correlation_id, status(refused.failure)) == (3, grpc.StatusCode.UNAVAILABLE)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.Infer(infer_request(A))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

        engine.steps[1].complete()
        np.testing.assert_array_equal(rows_of((await stream.read()).reply), expected_rows(B))
        while (await stream.heartbeat()).wedged:
            pass
        check = await health.Check(HealthCheckRequest(service=INFERENCE_SERVICE))
        assert check.status == HealthCheckResponse.SERVING
        call = running.stub.Infer(infer_request(A))
        await until(lambda: len(engine.steps) == 3)
        engine.steps[2].complete()
        await call


async def test_a_client_that_does_not_read_piles_up_no_heartbeats(monkeypatch, carrier):
    monkeypatch.setattr("tulip_server.health.LOOK_SECONDS", 0.001)
    monkeypatch.setattr("tulip_server.health.LOOKS_A_BEAT", 1)
    async with serving(FakeEngine(dimensions=8192), carrier) as running:
        stream = running.stream()
        for number in range(1, 101):
            await stream.write(infer(number, *([A] * 20)))  # 64 MiB of replies in all
        (served,) = running.server._streams._open
        await until(lambda: not served._in_flight, seconds=30)
        await asyncio.sleep(0.2)
        assert served._answers, "the client's side took everything: nothing was tested"
        ids = [(await stream.read()).correlation_id for _ in range(100)]
        assert ids == list(range(1, 101))
        assert len(stream.heartbeats) < 200
