"""The server as a process, over the engine of fixed rate: exit statuses, whatever device and logs do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from benchmarks.fixed_rate_server import expected_row
from protos.tulip.v1.inference_pb2_grpc import InferenceStub
from tests.tulip_server.conftest import ChunkStream, infer_request, remaining, rows_of, until
from tests.tulip_server.test_service import A, B, infer, status


@contextmanager
def server(tmp_path: Path, *flags: str, stderr=subprocess.PIPE, rate: int = 1_000_000, **environment: str):
    """A process that ends with the block at the latest."""
    command = ("-m", "benchmarks.fixed_rate_server", f"--tokens-per-second={rate}", "--port=0")
    ready = f"--ready-file={tmp_path / 'ready.json'}"
    process = subprocess.Popen(
        [sys.executable, *command, f"--model={tmp_path}", ready, *flags],
        stderr=stderr,
        env={key: value for key, value in os.environ.items() if not key.startswith("TULIP_")} | environment,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


async def client(process, tmp_path: Path) -> grpc.aio.Channel:
    ready = tmp_path / "ready.json"
    await until(lambda: ready.exists() or process.poll() is not None, seconds=60)
    return grpc.aio.insecure_channel(f"127.0.0.1:{json.loads(ready.read_text())['port']}")


async def ended(process) -> tuple[int, str]:
    """Exit status and log."""
    _, log = await asyncio.to_thread(process.communicate, timeout=60)
    return process.returncode, (log or b"").decode()


async def test_a_hung_device_does_not_keep_the_process(tmp_path):
    """Everybody is answered, the file is gone, and the exit status says that something was wrong."""
    flags = ("--drain-seconds=0.5", "--depth=1", "--log-format=json")
    with server(tmp_path, *flags, BOUQUET_FAULTS=str(tmp_path)) as process:
        async with await client(process, tmp_path) as channel:
            stream = ChunkStream(InferenceStub(channel))
            (tmp_path / "hang.1").touch()
            await stream.write(infer(1, A))
            await until(lambda: not (tmp_path / "hang.1").exists())
            await stream.write(infer(2, B))
            while not (await stream.heartbeat()).wedged:
                pass
            await stream.write(infer(3, B))
            assert (await stream.read()).correlation_id == 3
            for _ in range(3):
                process.send_signal(signal.SIGTERM)
            replies = await remaining(stream)
        code, log = await ended(process)
    assert {reply.correlation_id for reply in replies} == {1, 2}
    assert {status(reply.failure) for reply in replies} == {grpc.StatusCode.UNAVAILABLE}
    assert code == 1
    *lines, last = log.splitlines()
    assert last.startswith("tulip_server: error: a step has not returned")
    messages = [json.loads(line)["message"] for line in lines]
    assert sum(message.startswith("wedged") for message in messages) == 1
    assert not (tmp_path / "ready.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
async def test_a_full_disk_for_logs_changes_nothing(tmp_path):
    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        server(tmp_path, "--log-level=debug", stderr=full) as process,
    ):
        async with await client(process, tmp_path) as channel:
            for _ in range(20):
                reply = await InferenceStub(channel).Infer(infer_request(A))
                np.testing.assert_array_equal(rows_of(reply)[0], expected_row(A))
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
        assert (await ended(process))[0] == 0


async def test_signals_after_the_first_change_nothing(tmp_path):
    """Chunks of two seconds are finished, however often somebody asks."""
    with server(tmp_path, rate=4) as process:
        async with await client(process, tmp_path) as channel:
            stream = ChunkStream(InferenceStub(channel))
            await stream.write(infer(1, A))
            await stream.write(infer(2, B))
            while not (await stream.heartbeat()).oldest_step_us:
                pass
            process.send_signal(signal.SIGTERM)
            while not (await stream.heartbeat()).draining:
                pass
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                process.send_signal(number)
            rows = [rows_of(reply.reply)[0] for reply in await remaining(stream)]
        code, log = await ended(process)
    np.testing.assert_array_equal(rows, [expected_row(A), expected_row(B)])
    assert code == 0
    assert log.count("draining") == 1
    assert "Traceback" not in log
