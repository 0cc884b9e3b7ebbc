"""One child process: started, awaited, signalled, ended.

Knows the standard library alone, nothing of what runs in the process: `benchmarks.gateway` takes this file
along into the files of other revisions.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

STOP_SECONDS = 60.0
_POLL_SECONDS = 0.02


class Child:
    """A process from `start` to `close`; may be started again after it has ended.

    Its output is added to `log`, or goes where ours goes. `environment` is put over ours. `end_with` is how
    it is asked to end. With `own_group` no Ctrl-C at the terminal reaches it, and when it has ended whatever
    is left of the processes that it started is killed.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        end_with: signal.Signals = signal.SIGTERM,
        own_group: bool = False,
    ) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = {**os.environ, **(environment or {})}
        self._folder = folder
        self._end_with = end_with
        self._own_group = own_group
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0

    @property
    def pid(self) -> int:
        """Of the process that runs, or ran last."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs; a stopped one does."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process; `wait_until` says when it is of use. Raises `OSError` for no such program."""
        assert not self.alive, f"{self.name} runs already"
        with contextlib.ExitStack() as files:
            output = None if self.log is None else files.enter_context(self.log.open("ab"))
            self._started = time.monotonic()
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._folder,
                stdout=output,
                stderr=output,
                start_new_session=self._own_group,
            )

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> float:
        """Ask `ready` again and again; the seconds from the process's start until it was.

        Raises `TimeoutError` after `seconds`, or `RuntimeError` when the process ended.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.alive:
                raise RuntimeError(f"{self.name} ended before it was ready: {self.last_words()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} was not ready after {seconds:g} s")
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - self._started

    def wait_for_file(self, file: Path, seconds: float) -> dict[str, Any]:
        """What the JSON file says that the process writes when it is ready; raises as `wait_until`."""
        self.wait_until(file.exists, seconds)
        content: dict[str, Any] = json.loads(file.read_text())
        return content

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        os.kill(self.pid, number)

    def suspend(self) -> None:
        """SIGSTOP: it does nothing any more, and its connections stay open."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it with SIGKILL, and reap it."""
        self.signal(signal.SIGKILL)
        self.wait()

    def terminate(self) -> int:
        """SIGTERM, and wait until it has ended; the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Wait until it has ended; the exit status. Raises `subprocess.TimeoutExpired`."""
        assert self._process is not None
        return self._process.wait(seconds)

    def ask_to_end(self) -> None:
        """Whatever state it is in, stopped included; nothing happens if it has ended."""
        if self.alive:
            for number in (self._end_with, signal.SIGCONT):
                self.signal(number)

    def close(self) -> None:
        """Wait until it has ended, which it was asked to; kill it if it does not, or the wait is cut."""
        try:
            if self.alive:
                self.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        except BaseException:
            self.kill()
            raise
        finally:
            self._kill_group()

    def _kill_group(self) -> None:
        if self._own_group and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The end of its log."""
        if self.log is None or not self.log.is_file():
            return "its log is not kept"
        return self.log.read_text(errors="replace")[-2000:]

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Suspended for as long as the block lasts."""
        self.suspend()
        try:
            yield
        finally:
            self.resume()


@contextlib.contextmanager
def ended(*children: Child) -> Iterator[None]:
    """Whatever becomes of the block: after it the children that were started have ended."""
    with contextlib.ExitStack() as stack:
        for child in children:
            stack.callback(child.close)
        try:
            yield
        finally:
            for child in children:
                child.ask_to_end()
