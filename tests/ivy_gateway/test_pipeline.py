"""The whole path over several servers: order, all or nothing, overload, deadlines, hang-ups."""

from __future__ import annotations

import asyncio
import random

import grpc
import numpy as np
import pytest

from protos.codec import decode_tensor
from tests.ivy_gateway.fake_tulip import DIMENSIONS, FakeTulip, embedding_row, failure


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def texts_of_mixed_length(count: int) -> list[str]:
    shuffled = random.Random(7)
    long, short = [shuffled.randint(80, 200) for _ in range(count // 4)], [1] * (count - count // 4)
    return [f"item {i} " + "colour " * n for i, n in enumerate(long + short)]


async def test_order_holds_when_chunks_come_back_in_another_order(start_gateway):
    slow, quick = FakeTulip(), FakeTulip()
    slow.gate.clear()
    async with start_gateway(slow, quick, max_chunk_tokens=2000) as gateway:
        texts = texts_of_mixed_length(1037)
        work = asyncio.create_task(gateway.post("/v1/embeddings", input=texts, normalize=False))
        await until(lambda: slow.requests and len(quick.requests) > 3)
        slow.gate.set()
        data = (await work).json()["data"]
        assert [item["index"] for item in data] == list(range(1037))
        for i in random.Random(3).sample(range(1037), 50):
            alone = (await gateway.post("/v1/embeddings", input=texts[i], normalize=False)).json()
            np.testing.assert_allclose(data[i]["embedding"], alone["data"][0]["embedding"], rtol=1e-6)


async def test_two_thousand_inputs_in_one_request(start_gateway):
    async with start_gateway(FakeTulip(), FakeTulip()) as gateway:
        texts = [f"item {i:04d} colour red" for i in range(2000)]
        reply = await gateway.post("/embed", inputs=texts, normalize=False)
        vectors = np.array(reply.json())
        assert vectors.shape == (2000, DIMENSIONS)
        assert len({tuple(v) for v in vectors}) == 2000
        assert all(tulip.requests for tulip in gateway.tulips)
        sizes = [decode_tensor(r.lengths, "l").size for t in gateway.tulips for r in t.requests]
        assert sum(sizes) == 2000
        assert max(sizes) <= 256


async def test_a_small_request_is_one_chunk_and_a_large_one_reaches_every_replica(start_gateway):
    async with start_gateway(FakeTulip(), FakeTulip()) as gateway:
        await gateway.post("/embed", inputs=["a", "b", "c"])
        assert sum(len(tulip.requests) for tulip in gateway.tulips) == 1
        await gateway.post("/embed", inputs=["tea " * 250] * 20)
        assert all(tulip.requests for tulip in gateway.tulips)


async def test_one_failing_chunk_fails_the_request_and_cancels_the_rest(start_gateway):
    tulip = FakeTulip()
    async with start_gateway(tulip, max_chunk_inputs=1) as gateway:
        tulip.gate.clear()
        work = asyncio.create_task(gateway.post("/embed", inputs=["a", "b", "c", "d"]))
        for _ in range(4):
            await tulip.arrived.acquire()
        broken = tulip.requests[2]
        tulip.fail = lambda request: (
            failure(grpc.StatusCode.INVALID_ARGUMENT, "planned", 0) if request == broken else None
        )
        tulip.gate.set()
        reply = await work
        assert reply.status_code == 422
        assert reply.json()["error"] == "input 2: planned"
        assert gateway.pipeline.pool.outstanding_tokens == 0
        tulip.fail = lambda request: None
        assert (await gateway.post("/embed", inputs="a")).status_code == 200


async def test_a_failure_cancels_chunks_that_still_run(start_gateway):
    stuck, broken = FakeTulip(), FakeTulip()
    stuck.gate.clear()
    broken.fail = lambda request: failure(grpc.StatusCode.INVALID_ARGUMENT)
    async with start_gateway(stuck, broken, max_chunk_inputs=1) as gateway:
        reply = await gateway.post("/embed", inputs=["a", "b"])
        assert reply.status_code == 422
        async with asyncio.timeout(20):
            await stuck.cancelled.acquire()
        assert gateway.pipeline.pool.outstanding_tokens == 0


async def test_a_request_survives_the_loss_of_one_replica(start_gateway):
    first, second = FakeTulip(), FakeTulip()
    async with start_gateway(first, second) as gateway:
        first.gate.clear()
        work = asyncio.create_task(gateway.post("/embed", inputs=["tea " * 250] * 20, normalize=False))
        await first.arrived.acquire()
        await first.stop()
        reply = await work
        assert reply.status_code == 200
        assert len({tuple(vector) for vector in reply.json()}) == 1
        assert (await gateway.client.get("/health")).status_code == 200


@pytest.mark.parametrize("bad", [np.nan, np.inf])
async def test_non_finite_rows_are_an_error_naming_the_input(start_gateway, bad):
    tulip = FakeTulip()
    async with start_gateway(tulip) as gateway:
        (poisoned,) = await _ids_sent(gateway, tulip, "poison")

        def row(ids):
            vector = embedding_row(ids)
            return np.full_like(vector, bad) if np.array_equal(ids, poisoned) else vector

        tulip.row = row
        reply = await gateway.post("/v1/embeddings", input=["a", "poison", "b", "poison"])
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "internal_error"
        assert "1, 3" in reply.json()["error"]["message"]
        assert (await gateway.post("/embed", inputs="poison")).status_code == 424
        assert (await gateway.post("/embed", inputs="a")).status_code == 200


async def _ids_sent(gateway, tulip, text: str) -> list[np.ndarray]:
    tulip.requests.clear()
    await gateway.post("/embed", inputs=text)
    return [decode_tensor(request.token_ids, "ids") for request in tulip.requests]


async def test_overload_is_refused_at_once_and_passes(start_gateway):
    tulip = FakeTulip()
    async with start_gateway(tulip, max_waiting_tokens=1000, max_chunk_tokens=500) as gateway:
        tulip.gate.clear()
        large = asyncio.create_task(
            gateway.post("/embed", inputs=["tea " * 250] * 20)
        )  # larger than the queue
        await tulip.arrived.acquire()
        native = await gateway.post("/embed", inputs="a")
        assert (native.status_code, native.json()["error"]) == (429, "Model is overloaded")
        openai = await gateway.post("/v1/embeddings", input="a")
        assert openai.status_code == 429
        assert openai.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(openai.headers["retry-after"]) >= 1
        tulip.gate.set()
        assert (await large).status_code == 200
        assert (await gateway.post("/embed", inputs="a")).status_code == 200


async def test_a_burst_is_answered_completely_and_leaves_nothing_behind(start_gateway):
    tulip = FakeTulip()
    async with start_gateway(tulip, max_waiting_tokens=300, max_chunk_tokens=300) as gateway:
        tulip.gate.clear()
        burst = [asyncio.create_task(gateway.post("/v1/embeddings", input=f"text {i}")) for i in range(300)]
        await until(lambda: sum(request.done() for request in burst) > 200)  # refused while others wait
        tulip.gate.set()
        statuses = [(await request).status_code for request in burst]
        assert set(statuses) == {200, 429}
        assert gateway.pipeline.pool.outstanding_tokens == 0
        assert (await gateway.post("/embed", inputs="a")).status_code == 200


async def test_deadline_passed_is_503(start_gateway):
    tulip = FakeTulip()
    async with start_gateway(tulip, request_timeout=0.05) as gateway:
        tulip.gate.clear()
        native = await gateway.post("/embed", inputs="a")
        assert (native.status_code, native.json()["error_type"]) == (503, "Overloaded")
        openai = await gateway.post("/v1/embeddings", input="a")
        assert (openai.status_code, openai.json()["error"]["code"]) == (503, "timeout")
        assert "retry-after" in openai.headers
        assert gateway.pipeline.pool.outstanding_tokens == 0
        tulip.gate.set()
        assert (await gateway.post("/embed", inputs="a")).status_code == 200


async def test_callers_at_once_get_their_own_vectors_and_indexes(start_gateway):
    async with start_gateway(FakeTulip(), FakeTulip()) as gateway:

        async def ask(number: int) -> None:
            texts = [f"left {number}", f"right {number}"]
            data = (await gateway.post("/v1/embeddings", input=texts)).json()["data"]
            assert [item["index"] for item in data] == [0, 1]
            for text, item in zip(texts, data, strict=True):
                alone = (await gateway.post("/v1/embeddings", input=text)).json()["data"][0]
                assert alone["embedding"] == item["embedding"]

        await asyncio.gather(*(ask(number) for number in range(40)))


async def test_a_client_that_hangs_up_cancels_its_work(start_gateway):
    tulip = FakeTulip()
    async with start_gateway(tulip) as gateway:
        tulip.gate.clear()
        app = gateway.client._transport.app
        gone = asyncio.Event()
        sent: list[dict] = []
        body = [{"type": "http.request", "body": b'{"inputs": "a"}', "more_body": False}]

        async def receive():
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/embed", "raw_path": b"/embed", "query_string": b"",
            "root_path": "", "scheme": "http", "http_version": "1.1", "server": ("ivy", 80),
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        request = asyncio.create_task(app(scope, receive, send))
        await tulip.arrived.acquire()
        gone.set()
        await request
        assert sent[0]["status"] == 499
        async with asyncio.timeout(20):
            await tulip.cancelled.acquire()
        assert gateway.pipeline.pool.outstanding_tokens == 0


async def test_unexpected_exceptions_are_500_in_json_and_logged(start_gateway, caplog):
    async with start_gateway() as gateway:
        gateway.pipeline.embed_as = None
        reply = await gateway.post("/v1/embeddings", input="secret words")
        assert reply.status_code == 500
        assert reply.json()["error"]["type"] == "server_error"
        assert "this is a bug" in caplog.text
        assert "secret words" not in reply.text + caplog.text
