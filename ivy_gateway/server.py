"""A gateway process around the application: a bound socket, uvicorn, one or several workers, a ready file.

Knows nothing of replicas or routes.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import tempfile
import threading
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ivy_gateway import logs, metrics
from ivy_gateway.app import create_app
from ivy_gateway.config import GatewayConfig
from ivy_gateway.credentials import check_server_certificate
from ivy_gateway.drain import Drain
from ivy_gateway.errors import StartupError
from ivy_gateway.http_protocol import ConnectionLimits, LimitedProtocol, protocol_with

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_RESTART_SECONDS = 1.0
_KEEP_ALIVE_SECONDS = 75  # above the idle time of common load balancers (60 s), so that they close first
_SECOND = 10  # of uvicorn's ticks


def serve(config: GatewayConfig, ready_file: Path | None) -> None:
    """Serve until SIGINT or SIGTERM, then finish what was accepted, within the grace period, and return.

    `ready_file` gets `{"port": n}` once requests are accepted. Raises `StartupError` for a broken model
    folder and for an address that cannot be bound.
    """
    logs.set_up(config.log_level, config.log_format)
    check_server_certificate(config)
    app = create_app(config)
    with _bind(config.host, config.port) as listener:
        if config.workers == 1:
            _serve_alone(app, config, ready_file, listener)
            return
        with tempfile.TemporaryDirectory(prefix="ivy-metrics-") as folder:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # the workers' counters are added up there
            _Workers(config, ready_file, listener).run()


class _Server(uvicorn.Server):
    """Uvicorn's server that writes the ready file when it accepts requests, and goes in two steps.

    At the signal `drain` begins: not ready any more. `delay` seconds later nothing new is taken in.
    """

    def __init__(self, config: uvicorn.Config, ready_file: Path | None, drain: Drain, delay: float) -> None:
        super().__init__(config)
        self._ready_file = ready_file
        self._drain = drain
        self._delay = delay

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then tell."""
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # or a full collection of all that was imported holds up requests for tens of ms
        if self._ready_file is not None and sockets and not self.should_exit:
            _write_ready_file(self._ready_file, sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Show at once that this process goes; a second SIGINT ends it without grace."""
        self._drain.begin()
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Fold the metrics; look after the connections once a second."""
        metrics.fold()
        if counter % _SECOND == 0:
            self._check_connections()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stay for the delay, then refuse what is new and let what was accepted finish."""
        logger.info("stopping: what was accepted is finished")
        await asyncio.sleep(self._delay)
        self._drain.refuse()
        checking = asyncio.create_task(self._keep_checking())
        try:
            await super().shutdown(sockets)
        finally:
            checking.cancel()
            metrics.fold()

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self._check_connections()

    def _check_connections(self) -> None:
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            assert isinstance(connection, LimitedProtocol)
            connection.check(now)


class _Workers:
    """Processes that share one listening socket; one that dies is replaced until all are told to stop."""

    def __init__(self, config: GatewayConfig, ready_file: Path | None, listener: socket.socket) -> None:
        self._arguments = (config, ready_file, listener)
        self._context = multiprocessing.get_context("spawn")
        self._stopping = threading.Event()
        self._processes: list[SpawnProcess] = []

    def run(self) -> None:
        """Start them, keep them, and return when all have ended after SIGINT or SIGTERM."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        self._processes = [self._start() for _ in range(self._arguments[0].workers)]
        while not self._stopping.is_set():
            multiprocessing.connection.wait([process.sentinel for process in self._processes])
            self._replace_dead()
        for process in self._processes:
            process.terminate()  # again: one may have been started while the others were told
            process.join()

    def _start(self) -> SpawnProcess:
        process = self._context.Process(target=_work, args=self._arguments)
        process.start()
        return process

    def _replace_dead(self) -> None:
        for i, process in enumerate(self._processes):
            if process.exitcode is not None and not self._stopping.wait(_RESTART_SECONDS):
                logger.error("worker %s ended with exit code %s; replacing it", process.pid, process.exitcode)
                self._processes[i] = self._start()

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping.set()
        self._arguments[2].close()  # or connections would wait here that nobody accepts
        for process in self._processes:
            process.terminate()


def _work(config: GatewayConfig, ready_file: Path | None, listener: socket.socket) -> None:
    """What one worker process runs."""
    logs.set_up(config.log_level, config.log_format)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    _serve_alone(create_app(config), config, ready_file, listener)


def _end_with_parent() -> None:
    """Drain once the parent is gone: killed, it told nobody, and a worker would keep its port for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _serve_alone(
    app: FastAPI, config: GatewayConfig, ready_file: Path | None, listener: socket.socket
) -> None:
    server = _Server(_settings(app, config), ready_file, app.state.drain, config.drain_delay_seconds)
    # Uvicorn does the same, a while later. After a clean stop it raises the signal again, under the handler
    # that it found at its start.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    server.run([listener])


def _settings(app: FastAPI, config: GatewayConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=protocol_with(ConnectionLimits.of(config), app.state.wakefulness),
        ws="none",
        ssl_certfile=config.tls_certificate,
        ssl_keyfile=config.tls_key,
        lifespan="on",
        log_config=None,
        log_level="debug" if config.log_level == "debug" else "warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody looks at the client's address or scheme
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(config.grace_seconds),
    )


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    listener.set_inheritable(True)
    return listener


def _write_ready_file(path: Path, port: int) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps({"port": port}))
    unfinished.replace(path)
