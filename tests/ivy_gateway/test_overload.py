"""Lanes and admission through the whole gateway, and clients that leave early by the thousand."""

from __future__ import annotations

import asyncio
import random

import pytest

from ivy_gateway import request_context
from ivy_gateway.errors import IvyError
from ivy_gateway.jobs import EmbedJob, Lane
from ivy_gateway.request_context import RequestContext
from protos.tulip.v1 import inference_pb2 as pb
from tests.ivy_gateway.fake_tulip import FakeTulip


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_lanes_follow_the_size_of_a_request_unless_its_client_says_otherwise(start_gateway):
    async with start_gateway(bulk_inputs=3, bulk_tokens=50) as gateway:
        (tulip,) = gateway.tulips

        async def lane_of(body: dict, header: str | None = None) -> int:
            headers = {} if header is None else {"x-bouquet-lane": header}
            reply = await gateway.client.post("/embed", json=body, headers=headers)
            assert reply.status_code == 200, reply.text
            return tulip.requests[-1].lane

        few, many, long = {"inputs": ["a"] * 3}, {"inputs": ["a"] * 4}, {"inputs": "word " * 100}
        assert await lane_of(few) == pb.LANE_INTERACTIVE
        assert await lane_of(many) == pb.LANE_BULK
        assert await lane_of(long) == pb.LANE_BULK
        assert await lane_of(few, "bulk") == pb.LANE_BULK
        assert await lane_of(many, "Interactive") == pb.LANE_INTERACTIVE


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings"])
async def test_other_lanes_are_a_clients_mistake(start_gateway, path):
    async with start_gateway() as gateway:
        body = {"inputs": "a", "input": "a"}
        reply = await gateway.client.post(path, json=body, headers={"x-bouquet-lane": "fast"})
        assert reply.status_code == 400
        assert "x-bouquet-lane must be interactive or bulk" in reply.text
        assert not gateway.tulips[0].requests


async def test_a_large_request_never_has_many_chunks_at_a_server(start_gateway):
    tulip = FakeTulip(max_waiting_tokens=100_000)
    async with start_gateway(tulip, max_chunk_inputs=10, bulk_window=2) as gateway:
        tulip.gate.clear()
        large = asyncio.create_task(gateway.post("/embed", inputs=[f"text {i}" for i in range(500)]))
        await until(lambda: len(tulip.requests) == 2)
        small = asyncio.create_task(gateway.post("/embed", inputs="query"))
        await until(lambda: len(tulip.requests) == 3)  # it need not wait for the other 48 chunks
        assert tulip.requests[-1].lane == pb.LANE_INTERACTIVE
        tulip.gate.set()
        assert len((await large).json()) == 500
        assert (await small).status_code == 200
        assert len(tulip.requests) == 51


async def test_refused_before_the_body_is_parsed(start_gateway):
    async with start_gateway(max_waiting_tokens=100, max_chunk_tokens=100) as gateway:
        gateway.tulips[0].gate.clear()
        first = asyncio.create_task(gateway.post("/embed", inputs="word " * 200))
        await gateway.tulips[0].arrived.acquire()
        headers = {"content-type": "application/json"}
        refused = await gateway.client.post("/embed", content=b"{ no JSON", headers=headers)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        tokens = await gateway.client.post("/tokenize", json={"inputs": "a"})
        assert tokens.status_code == 200  # no server is needed for that
        gateway.tulips[0].gate.set()
        assert (await first).status_code == 200


async def test_ten_thousand_requests_that_are_given_up_leave_nothing_behind(start_gateway):
    chance = random.Random(3)
    async with start_gateway(FakeTulip(max_waiting_tokens=200)) as gateway:
        pipeline, (tulip,) = gateway.pipeline, gateway.tulips
        tulip.gate.clear()
        tasks_before = len(asyncio.all_tasks())

        async def work() -> None:
            request_context.enter(RequestContext(lane=chance.choice((None, Lane.BULK))))
            texts = tuple("word " * chance.randint(1, 8) for _ in range(chance.randint(1, 3)))
            deadline = asyncio.get_running_loop().time() + chance.choice((0.01, 60.0))
            await pipeline.embed(EmbedJob(texts, "inputs", deadline))

        for _ in range(100):
            works = [asyncio.create_task(work()) for _ in range(100)]
            for _ in range(chance.randint(0, 3)):
                await asyncio.sleep(0)
            for task in works:
                task.cancel()
            ends = await asyncio.gather(*works, return_exceptions=True)
            assert all(isinstance(end, (asyncio.CancelledError, IvyError)) for end in ends)
            assert pipeline.pool.outstanding_tokens == 0
            assert pipeline.pool.num_waiting == 0
            assert (pipeline.admission.tokens, pipeline.admission.num_requests) == (0, 0)
        await until(lambda: len(asyncio.all_tasks()) <= tasks_before)
        tulip.gate.set()
        assert (await gateway.post("/embed", inputs="still here")).status_code == 200
