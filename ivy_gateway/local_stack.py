"""A whole stack as a child process for as long as a block lasts: for the demo, benchmarks and tests.

Knows the command line of `ivy up` and `/health`; nothing of what runs inside.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

START_SECONDS = 120.0
STOP_SECONDS = 45.0
_POLL_SECONDS = 0.1


class StackError(RuntimeError):
    """The stack did not start, or did not stop as it should; one line says why."""


@dataclass(frozen=True, slots=True)
class LocalStack:
    """A running stack: its base URL, its supervisor's process id, and how long it took to be healthy."""

    base: str
    pid: int
    start_seconds: float


@contextlib.contextmanager
def running_stack(
    model: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[LocalStack]:
    """Run `ivy up MODEL ...` on a free loopback port; interrupt it as Ctrl-C would when the block ends.

    Raises `StackError` when it is not healthy within `START_SECONDS`, ends early, or does not stop by
    itself, with exit code 0, within `STOP_SECONDS`.
    """
    port = free_port()
    command = [sys.executable, "-m", "ivy_gateway.local", "up", model, "--port", str(port), *arguments]
    begin = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, **(environment or {})})  # noqa: S603 - our own module
    try:
        base = f"http://127.0.0.1:{port}"
        _wait_until_healthy(base, process)
        yield LocalStack(base, process.pid, time.monotonic() - begin)
    except BaseException:
        _stop(process)
        raise
    if (code := _stop(process)) != 0:
        raise StackError(f"the stack stopped with exit code {code}")


def free_port() -> int:
    """A loopback port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_healthy(base: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StackError(f"the stack ended with exit code {process.returncode} before it was ready")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{base}/health", timeout=2):  # noqa: S310
            return
        time.sleep(_POLL_SECONDS)
    raise StackError(f"the stack was not ready after {START_SECONDS:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> int:
    """Interrupt and wait; the exit code. A stack that hangs is killed, which is an error too."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise StackError(f"the stack did not stop within {STOP_SECONDS:.0f} s") from None
