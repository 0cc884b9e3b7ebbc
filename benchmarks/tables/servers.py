"""How each server is started, found healthy, and stopped again.

Knows command lines; nothing of what is asked of a server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.tables import dialects, memory
from benchmarks.tables.dialects import Dialect
from ivy_gateway.local_stack import free_port

START_SECONDS = 900.0  # vLLM takes up to 135 s, a server that compiles everything anew longer
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.02
_MODEL_NAME = "m"
# Everything that the tables send is let in: T3 has four requests of 409,600 tokens under way.
OPEN_DOOR = (
    "--max-waiting-tokens",
    str(4 * 1024 * 1024),
    "--max-queue-seconds",
    "0",
    "--max-bulk-queue-seconds",
    "0",
)


class ServerFailed(RuntimeError):
    """The server ended, or was not healthy in time."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a server is started with."""

    folder: Path
    port: int
    device: str
    extra: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Adapter:
    """One kind of server. `command` is `None` for a server that somebody else started."""

    name: str
    dialect: Dialect
    command: Callable[[Launch], list[str]] | None
    health_path: str = "/health"


@dataclass(frozen=True, slots=True)
class Running:
    """A healthy server."""

    address: tuple[str, int]
    model: str
    start_seconds: float | None  # None: somebody else started it
    pid: int | None
    card_mib_before: int | None

    def held(self) -> dict[str, int | None]:
        """MiB of the host and of the card that it holds now."""
        used = memory.card_mib()
        before = self.card_mib_before
        return {
            "host_mib": None if self.pid is None else memory.host_mib(self.pid),
            "card_mib": None if used is None or before is None else used - before,
        }


def _ours(launch: Launch) -> list[str]:
    stack = [sys.executable, "-m", "ivy_gateway.local", "up", str(launch.folder), "--device", launch.device]
    gateway = ["--port", str(launch.port), "--alias", _MODEL_NAME, "--token-ids", "model"]
    return [*stack, *gateway, *OPEN_DOOR, *launch.extra]


def _fake(launch: Launch) -> list[str]:
    fake = [sys.executable, "-m", "benchmarks.tables.fake", str(launch.folder), "--port", str(launch.port)]
    return [*fake, *launch.extra]


def _echo(launch: Launch) -> list[str]:
    return [sys.executable, "-m", "benchmarks.tables.echo", "--port", str(launch.port)]


def _vllm(launch: Launch) -> list[str]:
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(launch.folder)]
    model = ["--served-model-name", _MODEL_NAME, "--dtype", "bfloat16", "--runner", "pooling"]
    limits = ["--max-model-len", "8192", "--port", str(launch.port), "--disable-uvicorn-access-log"]
    return [*serve, *model, *limits, *launch.extra]


def _sentence_transformers(launch: Launch) -> list[str]:
    module = "benchmarks.tables.sentence_server"
    flags = ["--port", str(launch.port), "--device", launch.device]
    return [sys.executable, "-m", module, str(launch.folder), *flags, *launch.extra]


def _infinity(launch: Launch) -> list[str]:
    model = ["--model-id", str(launch.folder), "--served-model-name", _MODEL_NAME, "--no-bettertransformer"]
    device = "cuda" if launch.device.startswith("cuda") else launch.device
    place = ["--port", str(launch.port), "--device", device, "--dtype", "bfloat16"]
    return ["infinity_emb", "v2", *model, *place, *launch.extra]


ADAPTERS = {
    adapter.name: adapter
    for adapter in (
        Adapter("ours", dialects.OURS, _ours),
        Adapter("vllm", dialects.VLLM, _vllm),
        Adapter("sentence-transformers", dialects.TEXT_ONLY, _sentence_transformers),
        Adapter("infinity", dialects.INFINITY, _infinity),
        Adapter("tei", Dialect(), None),
        Adapter("ours-by-url", dialects.OURS, None),
        Adapter("vllm-by-url", dialects.VLLM, None),
        Adapter("fake", dialects.OURS, _fake),
        Adapter("echo", dialects.OURS, _echo),
    )
}


@contextlib.contextmanager
def running(
    adapter: Adapter,
    folder: Path,
    device: str,
    extra: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """Start the server on a free port and stop it when the block ends; its output goes to `log`.

    Raises `ServerFailed` when it ends early or is not healthy within `START_SECONDS`.
    """
    assert adapter.command is not None, "by URL only: this is a bug of the caller"
    before, port = memory.card_mib(), free_port()
    command = adapter.command(Launch(folder, port, device, tuple(extra)))
    with log.open("wb") as output:
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            _wait_until_healthy(f"http://127.0.0.1:{port}{adapter.health_path}", process, log)
            seconds = time.monotonic() - began
            yield Running(("127.0.0.1", port), _MODEL_NAME, seconds, process.pid, before)
        finally:
            _stop(process)


def by_url(url: str, model: str) -> Running:
    """A server that somebody else runs, at `http://host:port`."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        raise ServerFailed(f"{url}: a URL with a host and a port was expected")
    return Running((parts.hostname, parts.port), model, None, None, None)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            tail = log.read_text(errors="replace")[-2000:]
            raise ServerFailed(f"it ended with exit code {process.returncode}:\n{tail}")
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(_POLL_SECONDS)
    raise ServerFailed(f"it was not healthy after {START_SECONDS:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt as Ctrl-C would; whoever does not end in time is killed with all its children."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
