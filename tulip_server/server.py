"""A server is start, run, drain: engine, queue, runner and gRPC server put together and taken apart.

Knows the parts' order of birth and death, and nothing of what flows through them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from protos import codec
from protos.fingerprint import tokenizer_hash
from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1.inference_pb2_grpc import add_InferenceServicer_to_server
from rose_engine.step_counters import StepCounters
from tulip_server import metrics
from tulip_server.batcher import BatchBudget, Batcher
from tulip_server.config import ServerConfig
from tulip_server.errors import StartupError
from tulip_server.runner import Runner
from tulip_server.self_test import LoadedEngine, check_reference
from tulip_server.service import InferenceService
from tulip_server.wire import RowFormat, to_describe_reply

log = logging.getLogger(__name__)

INFERENCE_SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name

# Under a second of work for a GPU, and room for a burst of large requests anywhere.
_WAITING_BATCHES = 64

# Time for replies that are ready to reach their clients, after the drain.
_FLUSH_SECONDS = 1.0

_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *codec.CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind it
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class ServableEngine(LoadedEngine, Protocol):
    """What the server needs of `rose_engine.engine.Engine`."""

    @property
    def counters(self) -> StepCounters:
        """What became of the steps so far."""
        ...

    def close(self) -> None:
        """Give everything back; no step follows."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Listener:
    """A gRPC server that has its port and does not answer yet."""

    server: grpc.aio.Server
    host: str
    port: int

    @classmethod
    def bind(cls, host: str, port: int) -> Listener:
        """Take the port (0: any free one). Raises `StartupError` when it cannot be had."""
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        try:
            return cls(server, host, server.add_insecure_port(_address(host, port)))
        except RuntimeError as error:
            raise StartupError(
                f"cannot listen on {_address(host, port)}: in use, or not ours to take"
            ) from error

    @property
    def address(self) -> str:
        """What a client dials."""
        return _address(self.host, self.port)


async def serve(config: ServerConfig, load_engine: Callable[[], ServableEngine]) -> None:
    """Start, run until a signal, drain.

    The port is taken before the engine loads, so that one in use is known at once; calls are answered after.
    Raises `StartupError`, also for an engine that fails the model's self-test, what `load_engine` raises, and
    `DeviceLost` when the device goes.
    """
    listener = Listener.bind(config.host, config.port)
    with (
        _metrics_port(config) as metrics_port,
        closing(load_engine()) as engine,
        stop_signals() as stop,
    ):
        reference_cosine = check_reference(engine, config)
        server = Server(engine, config, listener, reference_cosine)
        await server.start()
        ports = {"port": listener.port, "metrics_port": metrics_port}
        with metrics.engine_steps(lambda: engine.counters), ready_file(config.ready_file, ports):
            await server.run(stop)
        await server.drain()


class Server:
    """A loaded engine behind a listener: `start`, `run`, `drain`, once and in this order.

    `reference_cosine` is the outcome of the self-test, where there was one.
    """

    def __init__(
        self,
        engine: ServableEngine,
        config: ServerConfig,
        listener: Listener,
        reference_cosine: float | None = None,
    ) -> None:
        limits = engine.limits
        max_waiting_tokens = config.max_waiting_tokens or _WAITING_BATCHES * limits.max_batch_tokens
        description = _describe(engine, config.model_id, max_waiting_tokens, reference_cosine)
        budget = BatchBudget(limits.max_batch_tokens, limits.max_batch_sequences)
        self._batcher = Batcher(budget, max_waiting_tokens)
        self._runner = Runner(engine, self._batcher, config.depth)
        row_format = RowFormat.of(engine.description)
        self._service = InferenceService(self._batcher, limits, row_format, description)
        self._health = health.aio.HealthServicer()
        self._listener = listener
        self._drain_seconds = config.drain_seconds
        self._summary = f"{description.model_id} on {description.device}, {description.dtype}"

    async def start(self) -> None:
        """Answer calls, healthy from the first one on."""
        grpc_server = self._listener.server
        add_InferenceServicer_to_server(self._service, grpc_server)
        add_HealthServicer_to_server(self._health, grpc_server)
        reflection.enable_server_reflection(
            [INFERENCE_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], grpc_server
        )
        await self._health.set(INFERENCE_SERVICE, HealthCheckResponse.SERVING)
        self._running = asyncio.create_task(self._runner.run(), name="runner")
        await grpc_server.start()
        log.info("ready on %s: %s", self._listener.address, self._summary)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set or the runner fails; `drain` tells which."""
        stopped = asyncio.create_task(stop.wait(), name="stop")
        await asyncio.wait({stopped, self._running}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

    async def drain(self) -> None:
        """Finish what was accepted, for at most `drain_seconds`; refuse the rest; end.

        Raises what ended the runner, where that was an error.
        """
        log.info("draining: %d tokens wait", self._batcher.waiting_tokens)
        await self._health.enter_graceful_shutdown()
        self._batcher.close()
        await asyncio.wait({self._running}, timeout=self._drain_seconds)
        if self._running.cancel():
            log.warning("not finished within %g s: giving up the rest", self._drain_seconds)
            await asyncio.wait({self._running})
        self._service.end_streams()
        await self._listener.server.stop(_FLUSH_SECONDS)
        await self._runner.close()
        if not self._running.cancelled():
            self._running.result()
        log.info("stopped")


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set, while the context lasts. Further ones change nothing."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@contextmanager
def ready_file(path: Path | None, content: Mapping[str, int | None]) -> Iterator[None]:
    """Keep a JSON file at `path`, whole from its first moment, while the context lasts; none if `None`.

    Raises `StartupError` when it cannot be written.
    """
    if path is None:
        yield
        return
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(content))
        unfinished.replace(path)
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _metrics_port(config: ServerConfig) -> Iterator[int | None]:
    """The port the metrics are served on while the context lasts; `None` if nobody asked."""
    if config.metrics_port is None:
        yield None
        return
    with ExitStack() as stack:
        try:
            port = stack.enter_context(metrics.exposed(config.host, config.metrics_port))
        except OSError as error:
            where = _address(config.host, config.metrics_port)
            raise StartupError(f"cannot serve metrics on {where}: {error.strerror}") from error
        log.info("metrics on %s", _address(config.host, port))
        yield port


def _describe(
    engine: ServableEngine, model_id: str | None, max_waiting_tokens: int, reference_cosine: float | None
) -> pb.DescribeReply:
    """What `Describe` answers. Raises `StartupError` for a tokenizer file that is none."""
    tokenizer_file = engine.description.tokenizer_file
    try:
        fingerprint = "" if tokenizer_file is None else tokenizer_hash(tokenizer_file)
    except (OSError, ValueError) as error:
        raise StartupError(str(error)) from error
    return to_describe_reply(
        engine.description,
        engine.limits,
        model_id=model_id or engine.description.model_id,
        max_waiting_tokens=max_waiting_tokens,
        tokenizer_hash=fingerprint,
        reference_cosine=reference_cosine,
    )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
