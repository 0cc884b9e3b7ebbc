"""Section J: health, metrics, security, start-up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import httpx
import pytest

from ivy_gateway.local_stack import free_port
from tests.cases.client import CONTROL, assert_same, together, wait_for
from tests.cases.fleet import started
from tests.cases.test_order import servers_of

KEYS = ("first-key", "second-key")


def ready(stack) -> bool:
    return stack.get("/health").status_code == 200


def test_bc_096_one_of_two_servers_is_killed(two):
    """Nobody notices: what was in flight is tried again elsewhere."""
    before = servers_of(two)

    async def work(client):
        async def caller(i):
            replies = []
            for turn in range(12):
                body = {"inputs": [f"{i} {turn} {j}" for j in range(8)]}
                replies.append(await client.post("/embed", json=body))
                if i == 0 and turn == 3:
                    os.kill(before[0], signal.SIGKILL)
            return replies

        return [r for replies in await asyncio.gather(*(caller(i) for i in range(6))) for r in replies]

    replies = together(two, work)
    assert {reply.status_code for reply in replies} == {200}
    assert ready(two)
    wait_for(lambda: two.metric("ivy_replica_ready") == 2, 60)
    assert len(servers_of(two)) == 2
    assert servers_of(two) != before


def test_bc_096_all_servers_are_killed(two):
    baseline = two.embed(CONTROL)
    for pid in servers_of(two):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not ready(two), 5)
    for path, field, family in (("/embed", "inputs", "error_type"), ("/v1/embeddings", "input", "error")):
        reply = two.post(path, {field: "x"})
        assert reply.status_code == 503
        assert "retry-after" in reply.headers
        assert family in reply.json()
    assert two.get("/live").status_code == 200
    wait_for(lambda: ready(two), 60)
    assert_same(two.embed(CONTROL), baseline)
    wait_for(lambda: two.metric("ivy_replica_ready") == 2, 60)


def test_bc_098_health_stays_quick_under_load(e, whole):
    seconds, limit = (300, 1.0) if whole else (3, 5.0)

    async def work(client):
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds

        async def saturate():
            body = {"inputs": ["word " * 600] * 16, "truncate": True}
            while loop.time() < deadline:
                assert (await client.post("/embed", json=body)).status_code in (200, 429)

        async def poll(path):
            statuses = []
            while loop.time() < deadline:
                statuses.append((await client.get(path, timeout=limit)).status_code)
                await asyncio.sleep(0.2)
            return statuses

        *_, health, live, metrics = await asyncio.gather(
            *(saturate() for _ in range(8)), poll("/health"), poll("/live"), poll("/metrics")
        )
        return health, live, metrics

    for statuses in together(e, work):
        assert len(statuses) > 3
        assert set(statuses) == {200}


def series_of(stack) -> set[str]:
    lines = stack.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


def test_bc_099_random_paths_make_no_series(e, whole):
    def scan(start, count):
        for i in range(start, start + count):
            method = ("GET", "POST", "PUT", "DELETE", "HEAD", "PROPFIND")[i % 6]
            path = f"/v1/{i}/x%20" if i % 2 else f"/embed/{i}?q={i}"
            assert e.http.request(method, path).status_code in (404, 405)

    scan(0, 12)
    series_of(e)  # the scrape's own series are there only after the first
    before = series_of(e)
    scan(12, 2000 if whole else 200)
    assert series_of(e) == before


def test_bc_101_counters_add_up_under_scrapes(e):
    def counted():
        return e.metric("ivy_requests_total", route="/embed", status="200"), e.metric("ivy_inputs_total")

    requests, inputs = counted()

    async def work(client):
        async def caller(i):
            for turn in range(10):
                assert (await client.post("/embed", json={"inputs": ["x"] * (1 + i)})).status_code == 200
                if turn % 3 == 0:
                    assert (await client.get("/metrics")).status_code == 200

        await asyncio.gather(*(caller(i) for i in range(8)))

    together(e, work)
    assert counted() == (requests + 80, inputs + 10 * sum(range(1, 9)))


def variants(path: str) -> list[str]:
    return [path, path + "/", "/" + path, path.upper(), "/v1" + path, path.replace("/v1", "", 1) or "/"]


def test_bc_102_a_key_on_every_route(reference_e):
    with started(reference_e.folder, key=KEYS[0], IVY_API_KEYS=",".join(KEYS)) as stack, ExitStack() as rest:
        clients = [
            rest.enter_context(httpx.Client(base_url=stack.base, trust_env=False, headers=headers))
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEYS[0]}"})
        ]
        paths = sorted(stack.get("/openapi.json").json()["paths"])
        assert "/embed" in paths
        open_paths = {"/health", "/ping", "/live", "/metrics", "/"}
        for client in clients:
            for path in {v for p in paths if p not in open_paths for v in variants(p)} - open_paths:
                for method in ("GET", "POST", "HEAD", "OPTIONS"):
                    assert client.request(method, path).status_code == 401, (method, path)
            for path in ("/health", "/live"):
                assert client.get(path).status_code == 200
        refusal = clients[0].post("/v1/embeddings", json={"input": "x"})
        assert refusal.headers["www-authenticate"] == "Bearer"
        assert refusal.json()["error"]["code"] == "invalid_api_key"
        other = rest.enter_context(
            httpx.Client(base_url=stack.base, headers={"authorization": f"Bearer {KEYS[1]}"})
        )
        assert other.post("/embed", json={"inputs": "x"}).status_code == 200


def test_bc_102_grpc_listens_on_loopback_by_default():
    from tulip_server.config import ServerConfig

    assert ServerConfig.from_command_line(["--model", "x"], {}).host == "127.0.0.1"


@pytest.fixture
def lone_gateway(reference_e):
    """A gateway whose only server is not there yet: its address, and where the server has to listen."""
    port, server_port = free_port(), free_port()
    replica = ("--replica", f"127.0.0.1:{server_port}")
    command = ("ivy_gateway", "--model", str(reference_e.folder), "--port", str(port), *replica)
    gateway = subprocess.Popen([sys.executable, "-m", *command])
    try:
        yield f"http://127.0.0.1:{port}", server_port
    finally:
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(30) == 0


def test_bc_103_not_ready_until_it_can_serve(lone_gateway, reference_e):
    base, server_port = lone_gateway

    def status(path, body=None):
        try:
            if body is None:
                return httpx.get(base + path, trust_env=False, timeout=10).status_code
            return httpx.post(base + path, json=body, trust_env=False, timeout=10).status_code
        except httpx.ConnectError:
            return None

    wait_for(lambda: status("/live") == 200)
    assert status("/health") == 503
    began = time.monotonic()
    assert status("/embed", {"inputs": "x"}) == 503
    assert time.monotonic() - began < 5, "it hung instead of saying so"
    command = [
        "tulip_server",
        "--model",
        str(reference_e.folder),
        "--port",
        str(server_port),
        "--device",
        "cpu",
    ]
    server = subprocess.Popen([sys.executable, "-m", *command])
    try:
        seen = []
        wait_for(lambda: seen.append(status("/embed", {"inputs": "x"})) or seen[-1] == 200)
        assert set(seen) <= {503, 200}
        assert status("/health") == 200
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
