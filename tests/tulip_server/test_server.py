"""Start, run, drain: in this process with a fake engine, and as the real command with real weights."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from protos.fingerprint import tokenizer_hash
from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1.inference_pb2_grpc import InferenceStub
from rose_engine.batch import Batch
from rose_engine.errors import DeviceLost
from rose_engine.fake import FakeEngine
from rose_engine.lazy_tensor import LazyTensor
from tests.tulip_server.conftest import (
    ChunkStream,
    expected_rows,
    infer_request,
    remaining,
    rows_of,
    serving,
    until,
)
from tests.tulip_server.test_service import A, B, C, infer, manual_engine, status
from tulip_server.config import ServerConfig
from tulip_server.errors import DeviceHung, StartupError, StoppedWhileLoading
from tulip_server.health import INFERENCE_SERVICE
from tulip_server.listener import Listener
from tulip_server.server import Server, ready_file, serve

# -- health and reflection


@pytest.mark.parametrize("service", ["", INFERENCE_SERVICE])
async def test_health_is_serving_and_turns_with_the_drain(service):
    engine = manual_engine()
    async with serving(engine) as running:
        health = HealthStub(running.channel)
        watch = health.Watch(HealthCheckRequest(service=service))
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        call = running.stub.Infer(infer_request(A))
        await until(lambda: engine.steps)
        drain = asyncio.create_task(running.server.drain())
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        assert not call.done()
        engine.steps[0].complete()
        await call
        await drain


async def test_reflection_names_the_services():
    async with serving(FakeEngine()) as running:
        call = ServerReflectionStub(running.channel).ServerReflectionInfo()
        await call.write(ServerReflectionRequest(list_services=""))
        await call.done_writing()
        reply = await call.read()
    assert {service.name for service in reply.list_services_response.service} == {
        "tulip.v1.Inference",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


# -- drain


async def test_a_drain_finishes_what_was_accepted_and_refuses_the_rest(waiting):
    engine = manual_engine()
    async with serving(engine, depth=1) as running:
        stream = running.stream()
        await stream.write(infer(1, A))
        await stream.write(infer(2, B))
        call = running.stub.Infer(infer_request(C))
        await until(lambda: waiting(running) == 8 and engine.steps)

        drain = asyncio.create_task(running.server.drain())
        await until(lambda: running.server._batcher.closed)
        await stream.write(infer(3, A))
        refused = await stream.read()
        assert refused.correlation_id == 3
        assert status(refused.failure) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.Infer(infer_request(A))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

        for number in range(3):
            await until(lambda number=number: len(engine.steps) > number)
            engine.steps[number].complete()
        assert [reply.correlation_id for reply in await remaining(stream)] == [1, 2]
        assert await stream.ended_well()
        np.testing.assert_array_equal(rows_of(await call), expected_rows(C))
        await drain


async def test_a_drain_out_of_time_answers_what_it_cannot_finish():
    engine = manual_engine()
    async with serving(engine, depth=1, drain_seconds=0.0) as running:
        stream = running.stream()
        await stream.write(infer(1, A))
        await stream.write(infer(2, B))
        await until(lambda: engine.steps and running.server._batcher.waiting_tokens == 4)
        await running.server.drain()
        replies = await remaining(stream)
        assert {reply.correlation_id for reply in replies} == {1, 2}
        assert {status(reply.failure) for reply in replies} == {grpc.StatusCode.UNAVAILABLE}


class Compiling(FakeEngine):
    """An engine whose every step compiles until the test says that it has."""

    def __init__(self) -> None:
        super().__init__(blocks=True)
        self.started, self.compiled = threading.Event(), threading.Event()

    def step(self, batch: Batch) -> LazyTensor:
        self.started.set()
        self.compiled.wait()
        return super().step(batch)


async def test_clients_are_told_of_a_drain_at_once_and_streams_end_after_their_last_reply(carrier):
    engine = manual_engine()
    async with serving(engine, carrier, depth=1) as running:
        streams = [running.stream() for _ in range(3)]
        for stream, sequence in zip(streams, (A, B, C), strict=True):
            await stream.write(infer(1, sequence))
        await until(lambda: running.server.state.streams == 3 and len(engine.steps) == 1)
        await until(lambda: running.server._batcher.waiting_tokens == 8)
        drain = asyncio.create_task(running.server.drain())
        for stream in streams:
            while not (await stream.heartbeat()).draining:
                pass
        assert running.server.state.draining
        for number in range(3):
            await until(lambda number=number: len(engine.steps) > number)
            engine.steps[number].complete()
        for stream, sequence in zip(streams, (A, B, C), strict=True):
            (reply,) = await remaining(stream)
            np.testing.assert_array_equal(rows_of(reply.reply), expected_rows(sequence))
            assert await stream.ended_well()
        await drain


async def test_a_client_that_reads_slowly_gets_all_its_replies_within_the_drain(carrier):
    """More replies than fit on the way, and a client that begins to read long after the last was computed."""
    async with serving(FakeEngine(dimensions=8192), carrier, drain_seconds=20) as running:
        stream = running.stream()
        for number in range(100):
            await stream.write(infer(number, *([A] * 20)))
        (served,) = running.server._streams._open
        await until(lambda: len(served._answers) and not served._in_flight, seconds=30)
        drain = asyncio.create_task(running.server.drain())
        await asyncio.sleep(1.5)
        assert not drain.done()
        assert [reply.correlation_id async for reply in stream] == list(range(100))
        assert await stream.ended_well()
        await drain


async def test_a_stream_opened_at_the_end_of_a_drain_ends_at_once(carrier):
    async with serving(FakeEngine(), carrier) as running:
        await running.server._streams.end(1.0)
        stream = running.stream()
        assert await remaining(stream) == []


async def test_the_engine_stays_until_a_cold_step_has_returned():
    engine = Compiling()
    async with serving(engine, drain_seconds=0.0) as running:
        call = running.stub.Infer(infer_request(A))
        await until(engine.started.is_set)
        drain = asyncio.create_task(running.server.drain())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not drain.done()
        engine.compiled.set()
        await drain


async def test_a_step_that_never_returns_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr("tulip_server.server._RETURN_SECONDS", 0.2)
    engine = Compiling()
    listener = Listener.bind("127.0.0.1", 0)
    await listener.open()
    server = Server(engine, ServerConfig(model=Path("fake"), drain_seconds=0.2), listener)
    await server.start()
    async with grpc.aio.insecure_channel(listener.address) as channel:
        stream = ChunkStream(InferenceStub(channel))
        await stream.write(infer(1, A))
        await stream.write(infer(2, B))
        await until(engine.started.is_set)
        with pytest.raises(DeviceHung):
            await server.drain()
        replies = await remaining(stream)
    assert {status(reply.failure) for reply in replies} == {grpc.StatusCode.UNAVAILABLE}
    assert {reply.correlation_id for reply in replies} == {1, 2}
    engine.compiled.set()


async def test_other_calls_are_answered_while_a_step_compiles():
    engine = Compiling()
    async with serving(engine) as running:
        call = running.stub.Infer(infer_request(A))
        await until(engine.started.is_set)
        await running.stub.Describe(pb.DescribeRequest())
        engine.compiled.set()
        np.testing.assert_array_equal(rows_of(await call), expected_rows(A))


async def test_a_lost_device_ends_the_run_and_is_reported():
    engine = manual_engine()
    listener = Listener.bind("127.0.0.1", 0)
    await listener.open()
    server = Server(engine, ServerConfig(model=Path("fake")), listener)
    await server.start()
    async with grpc.aio.insecure_channel(listener.address) as channel:
        call = InferenceStub(channel).Infer(infer_request(A))
        await until(lambda: engine.steps)
        engine.steps[0].fail(DeviceLost("fell off the bus"))
        await server.run(asyncio.Event())
        with pytest.raises(DeviceLost, match="fell off the bus"):
            await server.drain()
        with pytest.raises(grpc.aio.AioRpcError, match="fell off the bus") as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_without_a_heart_ends():
    """A server whose heartbeats have stopped gets no work: better that it is started again."""
    listener = Listener.bind("127.0.0.1", 0)
    await listener.open()
    server = Server(FakeEngine(), ServerConfig(model=Path("fake")), listener)
    server._health.beat = lambda: 1 / 0
    await server.start()
    await asyncio.wait_for(server.run(asyncio.Event()), 10)
    server._health.beat = lambda: None
    with pytest.raises(ZeroDivisionError):
        await server.drain()


# -- start


@asynccontextmanager
async def served(engine, tmp_path: Path, **settings):
    """`serve` itself; gives the content of its ready file."""
    path = tmp_path / "ready.json"
    config = ServerConfig(model=Path("fake"), port=0, ready_file=path, **settings)
    task = asyncio.create_task(serve(config, lambda: engine))
    await until(lambda: path.exists() or task.done())
    yield json.loads(path.read_text()), task
    await asyncio.wait_for(task, 10)
    assert not path.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_closes_the_engine(tmp_path, number):
    engine = FakeEngine()
    async with served(engine, tmp_path) as (ready, _):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ready['port']}") as channel:
            reply = await InferenceStub(channel).Infer(infer_request(A))
            np.testing.assert_array_equal(rows_of(reply), expected_rows(A))
        assert not engine.closed
        os.kill(os.getpid(), number)
    assert engine.closed
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_while_the_engine_loads_calls_are_told_so(tmp_path):
    loaded = threading.Event()

    def load_engine() -> FakeEngine:
        assert loaded.wait(20)
        return FakeEngine()

    path = tmp_path / "server.sock"
    config = ServerConfig(model=Path("fake"), socket=path, ready_file=tmp_path / "ready.json")
    task = asyncio.create_task(serve(config, load_engine))
    await until(path.exists)
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        health, stub = HealthStub(channel), InferenceStub(channel)
        for service in ("", INFERENCE_SERVICE):
            check = await health.Check(HealthCheckRequest(service=service), wait_for_ready=True)
            assert check.status == HealthCheckResponse.NOT_SERVING
        stream = stub.InferStream()
        for call in (stub.Describe(pb.DescribeRequest()), stub.Infer(infer_request(A)), stream.read()):
            with pytest.raises(grpc.aio.AioRpcError, match="loading") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not config.ready_file.exists()
        loaded.set()
        await until(config.ready_file.exists)
        check = await health.Check(HealthCheckRequest(service=INFERENCE_SERVICE))
        assert check.status == HealthCheckResponse.SERVING
        np.testing.assert_array_equal(rows_of(await stub.Infer(infer_request(A))), expected_rows(A))
        os.kill(os.getpid(), signal.SIGTERM)
        await task


async def test_a_signal_while_the_engine_loads_ends_the_server_at_once():
    begun, loaded = threading.Event(), threading.Event()

    def load_engine() -> FakeEngine:
        begun.set()
        loaded.wait(20)
        return FakeEngine()

    task = asyncio.create_task(serve(ServerConfig(model=Path("fake"), port=0), load_engine))
    await until(begun.is_set)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(StoppedWhileLoading):
        await asyncio.wait_for(task, 10)
    loaded.set()


async def test_metrics_have_their_own_port(tmp_path):
    async with served(FakeEngine(), tmp_path, metrics_port=0) as (ready, _):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ready['port']}") as channel:
            await InferenceStub(channel).Infer(infer_request(A))
        url = f"http://127.0.0.1:{ready['metrics_port']}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        os.kill(os.getpid(), signal.SIGTERM)
    for name in (
        "tulip_batches_total",
        "tulip_batch_tokens_bucket",
        "tulip_batch_sequences_bucket",
        'tulip_waiting_tokens{lane="interactive"} 0.0',
        'tulip_waiting_tokens{lane="bulk"} 0.0',
        'tulip_waiting_sequences{lane="bulk"} 0.0',
        "tulip_batches_in_flight 0.0",
        "tulip_oldest_step_seconds 0.0",
        "tulip_wedged 0.0",
        "tulip_draining 0.0",
        "tulip_streams 0.0",
        'tulip_step_seconds_bucket{kind="hot",le="0.0005"}',
        'tulip_chunks_total{outcome="ok"}',
        'tulip_queue_seconds_bucket{lane="interactive",le="0.0005"}',
        "tulip_compute_seconds_bucket",
        'tulip_engine_steps_total{outcome="eager"} 1.0',
        "tulip_graph_bytes 0.0",
    ):
        assert name in text


async def test_a_port_in_use_is_known_before_the_engine_loads():
    def load_engine() -> FakeEngine:
        raise AssertionError("loaded in vain")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}: in use"):
            await serve(ServerConfig(model=Path("fake"), port=port), load_engine)
        with pytest.raises(StartupError, match=f"metrics on 127.0.0.1:{port}"):
            await serve(ServerConfig(model=Path("fake"), port=0, metrics_port=port), load_engine)


async def test_a_ready_file_that_cannot_be_written_stops_the_start(tmp_path):
    path = tmp_path / "absent" / "ready.json"
    with pytest.raises(StartupError, match="absent"), ready_file(path, {"port": 1}):
        pass
    engine = FakeEngine()
    with pytest.raises(StartupError, match="absent"):
        await serve(ServerConfig(model=Path("fake"), port=0, ready_file=path), lambda: engine)
    assert engine.closed


# -- the command


def command(*arguments: object) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TULIP_")}
    return subprocess.Popen(
        [sys.executable, "-m", "tulip_server", *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )


def refusal(*arguments: object) -> tuple[int, str]:
    """Exit status and standard error of a command that must not start."""
    with command("--log-level=error", *arguments) as process:
        _, text = process.communicate(timeout=60)
    return process.returncode, text


async def use_and_stop(process: subprocess.Popen[str], path: Path, model: Path) -> None:
    """What a client sees of a server with real weights, up to the signal that ends it."""
    await until(lambda: path.exists() or process.poll() is not None, seconds=60)
    assert process.poll() is None, process.stderr.read()
    port = json.loads(path.read_text())["port"]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        health = await HealthStub(channel).Check(HealthCheckRequest(service=INFERENCE_SERVICE))
        assert health.status == HealthCheckResponse.SERVING
        stub = InferenceStub(channel)
        description = await stub.Describe(pb.DescribeRequest())
        assert (description.dimensions, description.task) == (384, pb.TASK_EMBED)
        assert description.tokenizer_hash == tokenizer_hash(model / "tokenizer.json")
        stream = ChunkStream(stub)
        await stream.write(infer(1, [101, 7592, 2088, 102], [101, 102]))
        rows = rows_of((await stream.read()).reply)
        assert rows.shape == (2, 384)
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
        process.send_signal(signal.SIGTERM)
        assert await remaining(stream) == []


async def test_the_command_serves_real_weights_until_sigterm(minilm, tmp_path):
    path = tmp_path / "ready.json"
    with command("--model", minilm, "--port", 0, "--ready-file", path, "--threads", 1) as process:
        try:
            await use_and_stop(process, path, minilm)
            _, log = await asyncio.to_thread(process.communicate, timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "ready on 127.0.0.1:" in log
    assert "Traceback" not in log
    assert not path.exists()


def test_an_unknown_folder_is_one_plain_line(tmp_path):
    code, text = refusal("--model", tmp_path / "nowhere", "--port", 0)
    assert code == 1
    assert text.startswith("tulip_server: error: ")
    assert "nowhere" in text
    assert text.count("\n") == 1


def test_half_a_checkpoint_is_one_plain_line(tmp_path, minilm):
    folder = tmp_path / "model"
    shutil.copytree(minilm, folder)
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1_000_000])
    code, text = refusal("--model", folder, "--port", 0)
    assert code == 1
    assert text.startswith("tulip_server: error: ")
    assert text.count("\n") == 1


def test_a_port_in_use_is_one_plain_line(minilm):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, text = refusal("--model", minilm, "--port", taken.getsockname()[1])
    assert code == 1
    assert text.startswith("tulip_server: error: cannot listen on 127.0.0.1:")
    assert text.count("\n") == 1


def test_a_bad_flag_is_one_plain_line():
    code, text = refusal("--model", "x", "--port", "http")
    assert code == 2
    assert text == "tulip_server: error: argument --port: invalid int value: 'http'\n"


def test_debug_shows_the_traceback(tmp_path):
    code, text = refusal("--model", tmp_path / "nowhere", "--port", 0, "--debug")
    assert code == 1
    assert "Traceback" in text
