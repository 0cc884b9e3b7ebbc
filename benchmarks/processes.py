"""Servers and gateways as processes of their own: with ready files, faults, metrics and memory.

Each listens on a loopback port that it keeps over restarts, and writes into a log file of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.child import Child, ended
from ivy_gateway.local_stack import free_port
from protos.frames import ADDRESS_PREFIX

READY_SECONDS = 120.0
_POLL_SECONDS = 0.02
# Threads that spin while they wait would take the cores from the other processes.
_CALM = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

FIXED_RATE_SERVER = "benchmarks.fixed_rate_server"
DIMENSIONS = 16  # of its rows here: few, for it is not JSON that is measured


class Service(Child):
    """One process of a tier, which says in a file that it is ready.

    `command` is a module and its flags, without port and ready file. `log` is where its output goes, if not
    to a file in `folder`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        self.host = host
        self.port = port or free_port()
        self.faults = folder / f"{name}.faults"  # what a file in it does: `tulip_server/faults.py`
        self.faults.mkdir(exist_ok=True)
        self._ready_file = folder / f"{name}.json"
        where = ["--host", host, "--port", str(self.port), "--ready-file", str(self._ready_file)]
        super().__init__(
            name,
            [sys.executable, "-m", *command, *where],
            log=log or folder / f"{name}.log",
            environment={**_CALM, "BOUQUET_FAULTS": str(self.faults), **(environment or {})},
        )

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        """Start the process; `wait_until_ready` says when it serves."""
        self._ready_file.unlink(missing_ok=True)
        super().start()

    def wait_until_ready(self) -> dict[str, Any]:
        """What the ready file says. Raises `TimeoutError`, or `RuntimeError` when the process ended."""
        return self.wait_for_file(self._ready_file, READY_SECONDS)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all series of a server's own metric that carry these labels."""
        port = json.loads(self._ready_file.read_text())["metrics_port"]
        with urllib.request.urlopen(f"http://{self.host}:{port}/metrics", timeout=10) as reply:
            return sum_of_series(reply.read().decode(), name, **labels)

    def inject(self, fault: str) -> None:
        """Let a fault act, in the words of `tulip_server/faults.py`."""
        (self.faults / fault).touch()

    def heal(self) -> None:
        """Take back the faults that have not acted yet, and those that last."""
        for file in self.faults.iterdir():
            file.unlink(missing_ok=True)


class FramedService(Service):
    """A server that listens on a Unix socket too."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, *, log: Path | None = None) -> None:
        self.frames_socket = (folder / f"{name}.sock").absolute()
        super().__init__(name, [*command, "--frames-socket", str(self.frames_socket)], folder, log=log)


@dataclass(frozen=True, slots=True)
class Cluster:
    """One gateway and the servers behind it, each a process."""

    gateway: Service
    tulips: tuple[FramedService, ...]

    @property
    def base(self) -> str:
        """The gateway's URL."""
        return f"http://{self.gateway.address}"

    @property
    def services(self) -> tuple[Service, ...]:
        """All of them."""
        return (self.gateway, *self.tulips)

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a GET; status 0 where nobody answers."""
        try:
            with urllib.request.urlopen(self.base + path, timeout=10) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def info(self) -> dict[str, Any]:
        """The body of `/info`."""
        content: dict[str, Any] = json.loads(self.get("/info")[1])
        return content

    def replicas(self) -> list[dict[str, Any]]:
        """Each replica's address, state and reason; none before one has said what it serves."""
        try:
            found: list[dict[str, Any]] = self.info()["replicas"]
        except (KeyError, ValueError):
            return []
        return found

    def num_ready(self) -> int:
        """Replicas that the gateway gives work to."""
        return sum(replica["state"] == "ready" for replica in self.replicas())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all series of `name` in the gateway's metrics that carry these labels."""
        return sum_of_series(self.get("/metrics")[1], name, **labels)

    def wait_for_replicas(self, count: int, seconds: float = READY_SECONDS) -> float:
        """Wait until `count` replicas are ready; the seconds that it took. Raises `TimeoutError`."""
        began = time.monotonic()
        while self.num_ready() != count:
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"not {count} replicas after {seconds:g} s: {self.replicas()}")
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - began


@contextlib.contextmanager
def running(*services: Service) -> Iterator[None]:
    """All started, and ready, for the block; closed after it."""
    with ended(*services):
        for service in services:
            service.start()
        for service in services:
            service.wait_until_ready()
        yield


def fixed_rate_server(model: Path, tokens_per_second: float) -> list[str]:
    """The command of a server of `model` whose engine sleeps."""
    command = [FIXED_RATE_SERVER, "--tokens-per-second", str(tokens_per_second), "--model", str(model)]
    return [*command, "--dimensions", str(DIMENSIONS), "--metrics-port", "0"]


def own_addresses(tulips: Sequence[Service]) -> list[str]:
    """Where the servers listen, for gRPC."""
    return [tulip.address for tulip in tulips]


def frame_addresses(tulips: Sequence[FramedService]) -> list[str]:
    """Where they listen for frames."""
    return [f"{ADDRESS_PREFIX}{tulip.frames_socket}" for tulip in tulips]


def mixed_addresses(tulips: Sequence[FramedService]) -> list[str]:
    """One over gRPC, the next over frames, and so on."""
    carriers = (own_addresses(tulips), frame_addresses(tulips))
    return [carriers[i % 2][i] for i in range(len(tulips))]


@contextlib.contextmanager
def cluster(
    model: Path,
    folder: Path,
    *gateway_flags: str,
    replicas: int = 2,
    tokens_per_second: float = 20_000.0,
    server_flags: Sequence[str] = (),
    addresses: Callable[[Sequence[FramedService]], Sequence[str]] = own_addresses,
    log: Path | None = None,
) -> Iterator[Cluster]:
    """Servers and a gateway for as long as the block lasts; all replicas are ready when it begins.

    The servers' engines sleep: each gets through `tokens_per_second`. `addresses` says under which names the
    gateway knows the servers. Ready files, and logs unless `log` is another place, go to `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [*fixed_rate_server(model, tokens_per_second), *server_flags]
    tulips = tuple(FramedService(f"tulip-{i}", command, folder, log=log) for i in range(replicas))
    flags = [flag for address in addresses(tulips) for flag in ("--replica", address)]
    command = ["ivy_gateway", "--model", str(model), *flags, *gateway_flags]
    # Looking for faults costs a gateway more than a request may.
    whole = Cluster(Service("gateway", command, folder, {"BOUQUET_FAULTS": ""}, log), tulips)
    with running(*whole.services):
        whole.wait_for_replicas(replicas)
        yield whole


def sum_of_series(exposition: str, name: str, **labels: str) -> float:
    """The sum of all series of `name` that carry these labels, in Prometheus' text format."""
    total = 0.0
    for line in exposition.splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items()):
            total += float(value)
    return total


def descendants(pid: int) -> list[int]:
    """`pid` and the processes below it, as /proc says."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def command_line(pid: int) -> str:
    """Of one process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def resident_bytes(pid: int) -> int:
    """Memory of one process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors(pid: int) -> int:
    """Open file descriptors of one process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
