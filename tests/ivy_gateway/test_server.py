"""The gateway as a process: ready file, signals, workers, and one plain line for what stops it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest

from protos.fingerprint import tokenizer_hash
from tests.ivy_gateway.fake_tulip import FakeTulip, serving

ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("IVY_")}


async def start(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ivy_gateway", *flags, env=ENVIRONMENT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def outcome(process: asyncio.subprocess.Process) -> tuple[int, str]:
    async with asyncio.timeout(60):
        _, stderr = await process.communicate()
    return process.returncode, stderr.decode()


@contextlib.asynccontextmanager
async def gateway_process(minilm: Path, folder: Path, *flags: str):
    """A process in front of a fake server, as (process, base URL); killed if it survives the block."""
    async with serving(FakeTulip(tokenizer_hash=tokenizer_hash(minilm / "tokenizer.json"))) as (tulip,):
        ready = folder / "ready.json"
        model = ("--model", str(minilm), "--replica", tulip.address, "--ready-file", str(ready))
        process = await start(*model, *flags)
        try:
            async with asyncio.timeout(60):
                while not ready.exists():
                    assert process.returncode is None, await outcome(process)
                    await asyncio.sleep(0.02)
            yield process, f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_serves_on_a_free_port_and_ends_cleanly(minilm, tmp_path, number):
    async with gateway_process(minilm, tmp_path, "--port", "0") as (process, base):
        async with httpx.AsyncClient(base_url=base) as client:
            reply = await client.post("/embed", json={"inputs": ["a", "b"]})
            assert len(reply.json()) == 2
            oversized = await client.post("/embed", json={"inputs": "a" * (17 * 1024 * 1024)})
            assert oversized.status_code == 413
            assert str(16 * 1024 * 1024) in oversized.json()["error"]
        process.send_signal(number)
        code, stderr = await outcome(process)
        assert code == 0
        assert "Traceback" not in stderr


async def test_workers_share_the_port_and_their_counters(minilm, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with gateway_process(minilm, tmp_path, "--port", str(port), "--workers", "2") as (process, base):
        for _ in range(20):
            async with httpx.AsyncClient(base_url=base) as client:  # a connection each
                assert (await client.post("/embed", json={"inputs": "a"})).status_code == 200
        counted = 'ivy_requests_total{route="/embed",status="200"} 20.0'
        async with asyncio.timeout(10), httpx.AsyncClient(base_url=base) as client:
            while counted not in (await client.get("/metrics")).text:  # the other worker's are a tick late
                await asyncio.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        code, stderr = await outcome(process)
        assert code == 0
        assert "Traceback" not in stderr


async def test_port_in_use_is_one_line(minilm):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = await start("--model", str(minilm), "--replica", "127.0.0.1:1", "--port", port)
        code, stderr = await outcome(process)
    assert code == 1
    assert stderr.strip().splitlines()[-1].startswith(f"ivy: cannot listen on 127.0.0.1:{port}")
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("flags", "words", "expected"),
    [
        (("--replica", "127.0.0.1:1"), "no model", 1),
        (("--model", "/nowhere", "--replica", "127.0.0.1:1"), "/nowhere", 1),
        (("--modle", "x"), "--model", 2),
        (("--port", "x"), "--port", 2),
    ],
)
async def test_bad_settings_are_one_line(flags, words, expected):
    code, stderr = await outcome(await start(*flags))
    assert code == expected
    assert len(stderr.strip().splitlines()) == 1
    assert words in stderr


NOWHERE = ("--replica", "127.0.0.1:1", "--replica", "frames:/nowhere/at/all")


async def test_a_start_without_servers_takes_requests_in_when_its_patience_ends(minilm, tmp_path):
    ready = tmp_path / "ready.json"
    settings = ("--port", "0", "--start-patience-seconds", "0.1", "--ready-file", str(ready))
    process = await start("--model", str(minilm), *NOWHERE, *settings)
    try:
        async with asyncio.timeout(60):
            while not ready.exists():
                await asyncio.sleep(0.02)
        base = f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"
        async with httpx.AsyncClient(base_url=base) as client:
            assert (await client.get("/live")).status_code == 200
            assert (await client.get("/health")).status_code == 503
    finally:
        process.send_signal(signal.SIGTERM)
    code, stderr = await outcome(process)
    assert code == 0
    assert "127.0.0.1:1: not there yet" in stderr
    assert "frames:/nowhere/at/all: not there yet (no connection: No such file" in stderr


async def test_a_patient_start_ends_when_it_is_told_to(minilm, tmp_path):
    ready = tmp_path / "ready.json"
    settings = ("--port", "0", "--start-patience-seconds", "3600", "--ready-file", str(ready))
    process = await start("--model", str(minilm), *NOWHERE, *settings)
    async with asyncio.timeout(60):
        while b"not there yet" not in await process.stderr.readline():
            pass
    assert not ready.exists()
    process.send_signal(signal.SIGTERM)
    code, stderr = await outcome(process)
    assert code == 0
    assert "Traceback" not in stderr
    assert not ready.exists()
