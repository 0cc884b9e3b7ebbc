"""How each server is started, found healthy, and stopped again.

Knows command lines; nothing of what is asked of a server.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.child import Child, ended
from benchmarks.tables import dialects, memory
from benchmarks.tables.dialects import Dialect
from ivy_gateway.local_stack import free_port

START_SECONDS = 900.0  # vLLM takes up to 135 s, a server that compiles everything anew longer
_ROOT = Path(__file__).resolve().parents[2]
_HOST = "127.0.0.1"
_MODEL_NAME = "m"
_ALONE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}  # no server asks or tells anybody outside
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
    """What a server is started with: `python` is the interpreter that it is installed for."""

    folder: Path
    longest: int  # tokens of an input
    device: str
    python: str = sys.executable
    extra: Sequence[str] = ()
    port: int = field(default_factory=free_port)

    @property
    def on_card(self) -> bool:
        """Whether it runs in bfloat16; float32 otherwise."""
        return self.device.startswith("cuda")


@dataclass(frozen=True, slots=True)
class Adapter:
    """One kind of server. `command` is `None` for a server that somebody else started."""

    name: str
    dialect: Dialect
    command: Callable[[Launch], list[str]] | None
    packages: tuple[str, ...] = ()  # whose versions are told beside the figures


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
    stack = ["-m", "ivy_gateway.local", "up", str(launch.folder), "--device", launch.device]
    gateway = ["--port", str(launch.port), "--alias", _MODEL_NAME, "--token-ids", "model"]
    return [launch.python, *stack, *gateway, *OPEN_DOOR, *launch.extra]


def _fake(launch: Launch) -> list[str]:
    fake = ["-m", "benchmarks.tables.fake", str(launch.folder), "--port", str(launch.port)]
    return [launch.python, *fake, *launch.extra]


def _echo(launch: Launch) -> list[str]:
    return [launch.python, "-m", "benchmarks.tables.echo", "--port", str(launch.port)]


def _vllm(launch: Launch) -> list[str]:
    serve = ["-m", "vllm.entrypoints.cli.main", "serve", str(launch.folder)]
    dtype = "bfloat16" if launch.on_card else "float32"
    model = ["--served-model-name", _MODEL_NAME, "--dtype", dtype, "--runner", "pooling"]
    limits = ["--max-model-len", str(min(8192, launch.longest)), "--disable-uvicorn-access-log"]
    return [launch.python, *serve, *model, *limits, *_place(launch), *launch.extra]


def _sentence_transformers(launch: Launch) -> list[str]:
    serve = ["-m", "benchmarks.tables.sentence_server", str(launch.folder)]
    flags = ["--port", str(launch.port), "--device", launch.device]
    return [launch.python, *serve, *flags, *launch.extra]


def _infinity(launch: Launch) -> list[str]:
    serve = ["-m", "infinity_emb.cli", "v2", "--model-id", str(launch.folder)]
    model = ["--served-model-name", _MODEL_NAME, "--no-bettertransformer"]
    dtype = "bfloat16" if launch.on_card else "float32"
    device = ["--device", "cuda" if launch.on_card else launch.device, "--dtype", dtype]
    return [launch.python, *serve, *model, *device, *_place(launch), *launch.extra]


def _place(launch: Launch) -> list[str]:
    return ["--host", _HOST, "--port", str(launch.port)]


ADAPTERS = {
    adapter.name: adapter
    for adapter in (
        Adapter("ours", dialects.OURS, _ours, ("torch",)),
        Adapter("vllm", dialects.VLLM, _vllm, ("vllm", "torch")),
        Adapter(
            "sentence-transformers",
            dialects.TEXT_ONLY,
            _sentence_transformers,
            ("sentence-transformers", "transformers", "torch"),
        ),
        Adapter(
            "infinity",
            dialects.INFINITY,
            _infinity,
            ("infinity-emb", "sentence-transformers", "transformers", "torch"),
        ),
        Adapter("tei", dialects.TEI, None),
        Adapter("tei-native", dialects.TEI_NATIVE, None),
        Adapter("ours-by-url", dialects.OURS, None),
        Adapter("vllm-by-url", dialects.VLLM, None),
        Adapter("fake", dialects.OURS, _fake),
        Adapter("echo", dialects.OURS, _echo),
    )
}


@contextlib.contextmanager
def running(
    adapter: Adapter, launch: Launch, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Start the server and interrupt it, as Ctrl-C would, when the block ends; its output goes to `log`.

    Raises `ServerFailed` when it cannot be started, ends early or is not healthy within `START_SECONDS`.
    """
    assert adapter.command is not None, "by URL only: this is a bug of the caller"
    log.unlink(missing_ok=True)
    server = Child(
        adapter.name,
        adapter.command(launch),
        log=log,
        environment={**_ALONE, **(environment or {})},
        folder=_ROOT,
        end_with=signal.SIGINT,
        own_group=True,
    )
    address, before = (_HOST, launch.port), memory.card_mib()
    with ended(server):
        seconds = _start(server, f"http://{_HOST}:{launch.port}/health")
        yield Running(address, _MODEL_NAME, seconds, server.pid, before)


def _start(server: Child, url: str) -> float:
    """Seconds until it was healthy."""
    try:
        server.start()
        return server.wait_until(lambda: _is_healthy(url), START_SECONDS)
    except (OSError, RuntimeError) as error:  # a `TimeoutError` is an `OSError`
        raise ServerFailed(str(error)) from error


def _is_healthy(url: str) -> bool:
    with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=2):
        return True
    return False


def versions(adapter: Adapter, python: str) -> str:
    """Of the adapter's packages, as `python` has them: `infinity-emb 0.0.78, torch 2.13.0`."""
    asking = (
        "import importlib.metadata as m, sys;"
        "have = {d.name.lower().replace('_', '-'): d.version for d in m.distributions()};"
        "print(', '.join(f'{name} {have[name]}' for name in sys.argv[1:] if name in have))"
    )
    command = [python, "-c", asking, *adapter.packages]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def by_url(url: str, model: str) -> Running:
    """A server that somebody else runs, at `http://host:port`."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        raise ServerFailed(f"{url}: a URL with a host and a port was expected")
    return Running((parts.hostname, parts.port), model, None, None, None)
