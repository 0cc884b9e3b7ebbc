"""A server is start, run, drain: engine, queue, runner and gRPC server put together and taken apart.

Knows the parts' order of birth and death, and nothing of what flows through them.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from protos.fingerprint import tokenizer_hash
from protos.tulip.v1 import inference_pb2 as pb
from rose_engine.step_counters import StepCounters
from tulip_server import metrics
from tulip_server.batcher import BatchBudget, Batcher
from tulip_server.config import ServerConfig
from tulip_server.daemon import on_daemon_thread
from tulip_server.errors import DeviceHung, StartupError, StoppedWhileLoading
from tulip_server.faults import Faults, SpoilableFormat
from tulip_server.frames_socket import FramesSocket, frames_socket
from tulip_server.health import HealthMonitor
from tulip_server.intake import ChunkTracer, Intake
from tulip_server.listener import Listener, address, bound
from tulip_server.runner import Runner
from tulip_server.self_test import LoadedEngine, check_reference
from tulip_server.service import InferenceService
from tulip_server.streams import Streams
from tulip_server.tracing import tracing
from tulip_server.wire import RowFormat, to_describe_reply

log = logging.getLogger(__name__)

# Under a second of work for a GPU, and room for a burst of large requests anywhere.
_WAITING_BATCHES = 64
# Of what may wait, as much again may be interactive, so that a full bulk lane never shuts the door.
_RESERVED_SHARE = 4

# Time for replies that are ready to reach their clients, where the drain took all of its own, and for calls.
_FLUSH_SECONDS = 1.0
# Time for steps that nobody waits for any more to come back, before they count as hung.
_RETURN_SECONDS = 5.0


class ServableEngine(LoadedEngine, Protocol):
    """What the server needs of `rose_engine.engine.Engine`."""

    @property
    def counters(self) -> StepCounters:
        """What became of the steps so far."""
        ...

    def close(self) -> None:
        """Give everything back; no step follows."""
        ...


async def serve(config: ServerConfig, load_engine: Callable[[], ServableEngine]) -> None:
    """Start, run until a signal, drain.

    Ports and sockets are taken before the engine loads, on a thread, so that one in use is known at once.
    Until it is loaded, calls are told so and health is NOT_SERVING.
    Raises `StoppedWhileLoading`, `StartupError`, also for an engine that fails the model's self-test, what
    `load_engine` raises, `DeviceLost` when the device goes, and `DeviceHung` when it held a step to the end.
    """
    with stop_signals() as stop, bound(config) as listener, _metrics_port(config) as metrics_port:
        async with _answering(listener), frames_socket(config) as frames:
            loading = on_daemon_thread(lambda: _load(config, load_engine), "load")
            if not await _first_of(stop, loading):
                raise StoppedWhileLoading("stopped while the engine was loading")
            engine, reference_cosine = loading.result()
            async with _closing(engine), tracing(config.otlp_endpoint, time.monotonic) as tracer:
                server = Server(engine, config, listener, reference_cosine, tracer, frames)
                await _serve(server, engine, config, _places(config, listener, metrics_port), stop)


async def _serve(
    server: Server,
    engine: ServableEngine,
    config: ServerConfig,
    places: Mapping[str, int | str | None],
    stop: asyncio.Event,
) -> None:
    """Start, run, drain, around an engine that is loaded."""
    await server.start()
    gc.collect()
    gc.freeze()  # or a full collection of torch's objects holds up a step for a tenth of a second
    with metrics.observed(lambda: server.state, lambda: engine.counters):
        with ready_file(config.ready_file, places):
            await server.run(stop)
        await server.drain()


def _places(
    config: ServerConfig, listener: Listener, metrics_port: int | None
) -> dict[str, int | str | None]:
    """Where the server is found, as the ready file says it."""
    sockets = {"socket": config.socket, "frames_socket": config.frames_socket}
    paths = {name: None if path is None else str(path) for name, path in sockets.items()}
    return {"port": listener.port, "metrics_port": metrics_port, **paths}


@asynccontextmanager
async def _answering(listener: Listener) -> AsyncIterator[None]:
    """Answer calls while the context lasts, be it that the engine loads."""
    await listener.open()
    try:
        yield
    finally:
        await listener.server.stop(None)


def _load(
    config: ServerConfig, load_engine: Callable[[], ServableEngine]
) -> tuple[ServableEngine, float | None]:
    """The engine, and the outcome of its self-test."""
    engine = load_engine()
    try:
        return engine, check_reference(engine, config)
    except BaseException:
        engine.close()
        raise


@dataclass(frozen=True, slots=True)
class WaitingRoom:
    """Tokens that may wait: in all, and on top of that for interactive chunks alone."""

    max_tokens: int
    reserved_tokens: int

    @classmethod
    def of(cls, config: ServerConfig, max_batch_tokens: int) -> WaitingRoom:
        """What the configuration says, or what suits batches of so many tokens."""
        max_tokens, reserved = config.max_waiting_tokens, config.reserved_tokens
        if max_tokens is None:
            max_tokens = _WAITING_BATCHES * max_batch_tokens
        return cls(max_tokens, max_tokens // _RESERVED_SHARE if reserved is None else reserved)


class Server:
    """A loaded engine behind an open listener: `start`, `run`, `drain`, once and in this order.

    `reference_cosine` is the outcome of the self-test, where there was one; `frames` a socket beside the
    listener, where one was asked for.
    """

    def __init__(
        self,
        engine: ServableEngine,
        config: ServerConfig,
        listener: Listener,
        reference_cosine: float | None = None,
        tracer: ChunkTracer | None = None,
        frames: FramesSocket | None = None,
    ) -> None:
        room = WaitingRoom.of(config, engine.limits.max_batch_tokens)
        self._description = _describe(engine, config.model_id, room, reference_cosine)
        self._batcher = Batcher(
            BatchBudget(engine.limits.max_batch_tokens, engine.limits.max_batch_sequences),
            room.max_tokens,
            reserved_tokens=room.reserved_tokens,
            bulk_patience=config.bulk_patience_seconds,
        )
        self._runner = Runner(engine, self._batcher, config.depth, config.cold_step_seconds)
        intake = Intake(self._batcher, engine.limits, _row_format(engine), tracer)
        self._streams = Streams(intake)
        self._service = InferenceService(intake, self._streams, self._description)
        self._health = HealthMonitor(self._runner, self._batcher, listener.health, self._streams.beat)
        self._listener = listener
        self._frames = frames
        self._drain_seconds = config.drain_seconds

    @property
    def state(self) -> metrics.ServerState:
        """What the gauges show."""
        lines = self._batcher.lines.items()
        return metrics.ServerState(
            waiting_tokens={lane.value: line.waiting_tokens for lane, line in lines},
            waiting_sequences={lane.value: line.waiting_sequences for lane, line in lines},
            batches_in_flight=self._runner.num_in_flight,
            oldest_step_seconds=self._health.step_age,
            wedged=self._health.wedged,
            draining=self._health.draining,
            streams=len(self._streams),
        )

    async def start(self) -> None:
        """Let calls in, healthy from the first one on."""
        self._running = asyncio.create_task(self._runner.run(), name="runner")
        self._watching = asyncio.create_task(self._health.run(), name="health")
        self._listener.gate.open(self._service)
        if self._frames is not None:
            self._frames.serve(self._streams, self._description)
        await self._health.serve()
        model = self._description
        log.info(
            "ready on %s: %s on %s, %s", self._listener.address, model.model_id, model.device, model.dtype
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, or until runner or health monitor fails; `drain` tells which."""
        await _first_of(stop, self._running, self._watching)

    async def drain(self) -> None:
        """Finish what was accepted, for at most `drain_seconds`; refuse the rest; end.

        Clients are told first. A stream ends after its last reply, so a client that reads slowly gets them
        all within the same time. Raises what ended the runner, where that was an error, and `DeviceHung`.
        """
        log.info("draining: %d tokens wait", self._batcher.waiting_tokens)
        end = asyncio.get_running_loop().time() + self._drain_seconds
        self._batcher.close()
        await self._health.drain()
        await asyncio.wait({self._running}, timeout=self._drain_seconds)
        if self._running.cancel():
            log.warning("not finished within %g s: giving up the rest", self._drain_seconds)
            await asyncio.wait({self._running})
        left = end - asyncio.get_running_loop().time()
        await self._streams.end(max(left, _FLUSH_SECONDS))
        await self._listener.server.stop(_FLUSH_SECONDS)
        self._watching.cancel()
        await asyncio.wait({self._watching})
        if not await self._runner.close(_RETURN_SECONDS):
            raise _hung()
        for task in (self._running, self._watching):
            if not task.cancelled():
                task.result()
        log.info("stopped")


async def _first_of(stop: asyncio.Event, *tasks: asyncio.Future[Any]) -> bool:
    """Wait for `stop` or for one of `tasks`; whether one of them is done."""
    stopped = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    return any(task.done() for task in tasks)


@asynccontextmanager
async def _closing(engine: ServableEngine) -> AsyncIterator[None]:
    """Close the engine at the end, unless the end is that it hangs. Raises `DeviceHung` if closing does."""
    try:
        yield
    except DeviceHung:
        raise
    except BaseException:
        await _close(engine)
        raise
    await _close(engine)


async def _close(engine: ServableEngine) -> None:
    closed = on_daemon_thread(engine.close, "close")
    await asyncio.wait({closed}, timeout=_RETURN_SECONDS)
    if not closed.done():
        raise _hung()
    closed.result()


def _hung() -> DeviceHung:
    return DeviceHung(
        f"a step has not returned {_RETURN_SECONDS:g} s after everything had ended: ending without it"
    )


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
def ready_file(path: Path | None, content: Mapping[str, int | str | None]) -> Iterator[None]:
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
            where = address(config.host, config.metrics_port)
            raise StartupError(f"cannot serve metrics on {where}: {error.strerror}") from error
        log.info("metrics on %s", address(config.host, port))
        yield port


def _describe(
    engine: ServableEngine, model_id: str | None, room: WaitingRoom, reference_cosine: float | None
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
        max_waiting_tokens=room.max_tokens,
        reserved_tokens=room.reserved_tokens,
        tokenizer_hash=fingerprint,
        reference_cosine=reference_cosine,
    )


def _row_format(engine: ServableEngine) -> RowFormat:
    if (faults := Faults.from_environment()) is not None:
        return replace(SpoilableFormat.of(engine.description), faults=faults)
    return RowFormat.of(engine.description)
