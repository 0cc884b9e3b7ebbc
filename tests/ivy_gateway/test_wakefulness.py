"""A loop that goes on turning: how long, at whose cost, and not where nobody asked."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from ivy_gateway.config import GatewayConfig
from ivy_gateway.wakefulness import ASLEEP, Wakefulness
from tests.ivy_gateway.fake_tulip import FakeTulip
from tests.ivy_gateway.test_frame_link import on_uvloop
from tests.ivy_gateway.test_http_protocol import request, served
from tests.ivy_gateway.test_replicas import LinkSettings, chunk, pool_of, soon


class Counted(Wakefulness):
    """Counts its turns and the touches."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.turns = self.touches = 0

    def touch(self) -> None:
        self.touches += 1
        super().touch()

    def _turn(self) -> None:
        self.turns += 1
        super()._turn()


async def rest(wakefulness: Counted) -> None:
    """Wait until it turns no more."""
    async with asyncio.timeout(20):
        while wakefulness._turning:
            await asyncio.sleep(0.01)


@on_uvloop
async def test_it_turns_while_touched_and_then_stops():
    wakefulness = Counted(0.05)
    began = time.monotonic()
    wakefulness.touch()
    await rest(wakefulness)
    assert time.monotonic() - began >= 0.05
    assert wakefulness.turns > 5
    turns = wakefulness.turns
    await asyncio.sleep(0.05)
    assert wakefulness.turns == turns


@on_uvloop
async def test_a_touch_meanwhile_is_counted_from_then_and_doubles_nothing():
    wakefulness = Counted(0.05)
    for _ in range(5):
        last = time.monotonic()
        wakefulness.touch()
        await asyncio.sleep(0.02)
    before = wakefulness.turns
    for _ in range(10):
        await asyncio.sleep(0)  # a turn of the loop
    assert wakefulness.turns - before <= 11
    await rest(wakefulness)
    assert time.monotonic() - last >= 0.05


@on_uvloop
async def test_everything_else_that_is_ready_has_its_turn():
    wakefulness = Counted(60.0)
    wakefulness.touch()
    reader, writer = os.pipe()
    arrived, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(reader, arrived.set)
    try:
        for _ in range(20):  # of each turn of the loop, all others have their part
            before = wakefulness.turns
            await asyncio.sleep(0)
            assert wakefulness.turns - before <= 2
        async with asyncio.timeout(20):
            loop.call_soon_threadsafe(os.write, writer, b"x")
            await arrived.wait()
            await loop.run_in_executor(None, sum, range(1000))
            await asyncio.sleep(0.01)
    finally:
        loop.remove_reader(reader)
        os.close(reader)
        os.close(writer)
    wakefulness._until = 0.0
    await rest(wakefulness)


async def test_off_nothing_turns():
    wakefulness = Counted(0.0)
    wakefulness.touch()
    assert wakefulness.turns == 0
    assert GatewayConfig(model=Path("m"), replicas=("h:1",)).awake_ms == 0


@on_uvloop
async def test_chunks_and_their_rows_touch_and_heartbeats_do_not():
    wakefulness = Counted(0.001)
    async with pool_of(tulip := FakeTulip(), link=LinkSettings(wakefulness=wakefulness)) as pool:
        beats = len(tulip.streams)
        await asyncio.sleep(0.2)  # four heartbeats
        assert beats == 1
        assert wakefulness.touches == 0
        await pool.infer(chunk(3), soon())
        assert wakefulness.touches == 2
        await rest(wakefulness)


@on_uvloop
async def test_an_idle_gateway_sleeps_and_bytes_of_a_request_wake_it(minilm):
    for milliseconds, wakes in ((10.0, True), (0.0, False)):
        async with served(minilm, awake_ms=milliseconds) as gateway:
            wakefulness = gateway.server.config.http_protocol_class.wakefulness
            assert not wakefulness._until
            assert (await gateway.ask(request({"inputs": ["a"]})))[0] == 200
            assert bool(wakefulness._until) is wakes
            await rest(wakefulness)
    assert not ASLEEP._turning
