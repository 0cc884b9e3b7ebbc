"""Section H: order, index, usage, names."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.cases.client import assert_refused, assert_same, together
from tests.stack.test_operators import children


def test_bc_077_index_starts_at_0_for_every_caller(e, whole):
    rounds = 200 if whole else 4
    pairs = [[f"first of {i}", f"second, longer, of caller {i}"] for i in range(40)]
    alone = [np.concatenate([e.embed(text) for text in pair]) for pair in pairs]

    async def work(client):
        async def caller(i):
            for _ in range(rounds):
                reply = await client.post("/v1/embeddings", json={"input": pairs[i]})
                assert reply.status_code == 200, reply.text
                data = reply.json()["data"]
                assert [item["index"] for item in data] == [0, 1]
                assert_same(np.array([item["embedding"] for item in data]), alone[i])

        await asyncio.gather(*(caller(i) for i in range(40)))

    together(e, work)


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """Let the process run only every other moment."""
    done = threading.Event()

    def pulse():
        while not done.is_set():
            os.kill(pid, signal.SIGSTOP)
            done.wait(0.05)
            os.kill(pid, signal.SIGCONT)
            done.wait(0.02)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def servers_of(stack) -> list[int]:
    """Process ids of the stack's inference servers."""
    return sorted(pid for pid, command in children(stack.pid).items() if "-m tulip_server" in command)


def test_bc_078_order_across_chunks_and_replicas(two, e):
    chance = random.Random(5)
    lengths = sorted((chance.choice([2, 5, 20, 90, 160]) for _ in range(1037)), reverse=True)
    texts = [f"{i} " + " ".join(["word"] * length) for i, length in enumerate(lengths)]
    with slowed(servers_of(two)[0]):
        data = two.openai(texts)["data"]
    assert [item["index"] for item in data] == list(range(1037))
    spots = chance.sample(range(1037), 50)
    rows = np.array([data[i]["embedding"] for i in spots])
    assert_same(rows, np.concatenate([e.embed(texts[i]) for i in spots]))


def test_bc_080_usage_of_reranking_and_scoring(b, reference_b):
    documents = ["cup", "green tea", "road"]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/score"):
        reply = b.post(path, query="tea", documents=documents)
        assert reply.status_code == 200, reply.text
        # <cls> tea <sep> one or two words <sep>
        assert {"prompt_tokens": 16, "total_tokens": 16}.items() <= reply.json()["usage"].items()
        assert all(type(value) is int for value in reply.json()["usage"].values())


@pytest.mark.parametrize("name", ["nope", "", "e"])
def test_bc_082_an_unknown_model_name(e, name):
    served = e.get("/v1/models").json()["data"]
    assert [item["id"] for item in served] == ["E", "e-alias"]
    reply = e.post("/v1/embeddings", input="tea", model=name)
    assert_refused(reply, "E", "e-alias", status=[404])
    assert reply.json()["error"]["code"] == "model_not_found"
    assert e.post("/embed", inputs="tea", model=name).status_code == 200


@pytest.mark.parametrize("fields", [{}, {"model": "E"}, {"model": "e-alias"}], ids=str)
def test_bc_082_names_that_are_served(e, fields):
    assert e.openai("tea", **fields)["model"] == "E"
