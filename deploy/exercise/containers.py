"""A container's life as a process: its command under its user, its health check, SIGTERM, its exit code."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from deploy.exercise.image import Image

_HEALTH_SECONDS = 15.0  # loading Python on a busy machine; a container's own limit is tighter
_POLL_SECONDS = 0.5


class ExerciseError(AssertionError):
    """Something did not behave as a deployment relies on; one line says what."""


class Container:
    """The process that a container of `image` would run, with `settings` as its environment.

    It gets nothing of this machine's environment. Its output goes to `log`.
    """

    def __init__(self, name: str, image: Image, settings: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._image = image
        self._environment = {**image.environment, **settings}
        self._log = log
        self.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def start(self) -> None:
        """Run the command: at first, and again after its end, as a restart policy does."""
        with self._log.open("ab") as output:
            self._process = self._start(self._image.command, output)

    def healthy(self) -> bool:
        """What the image's health check says now."""
        check = self._start(self._image.health_command, subprocess.DEVNULL)
        try:
            return check.wait(_HEALTH_SECONDS) == 0
        except subprocess.TimeoutExpired:
            check.kill()
            check.wait()
            return False

    def until_healthy(self, seconds: float) -> float:
        """Wait; how long it took. Raises `ExerciseError` if the process ends first or time runs out."""
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < seconds:
            if self._process.poll() is not None:
                raise ExerciseError(f"{self.name} ended with {self._process.returncode}: {self.last_words()}")
            if self.healthy():
                return waited
            time.sleep(_POLL_SECONDS)
        raise ExerciseError(f"{self.name} was not healthy after {seconds:.0f} s: {self.last_words()}")

    def signal(self, number: int) -> None:
        """Send a signal, as the container runtime would: to the command itself, not to a shell around it."""
        self._process.send_signal(number)

    def exit_code(self, seconds: float) -> int:
        """Wait for the end. Raises `ExerciseError` when it takes longer than `seconds`."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ExerciseError(f"{self.name} had not stopped after {seconds:.0f} s") from None

    def kill(self) -> None:
        """End it, whatever it does; nothing if it has ended."""
        self._process.kill()
        self._process.wait()

    def last_words(self) -> str:
        """The end of its output."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-600:]

    def _start(self, command: Sequence[str], output: int | IO[bytes]) -> subprocess.Popen[bytes]:
        """A process as the image's user, in its folder, with its environment and nothing else."""
        user = self._image.user
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=self._environment,
            cwd=self._image.working_folder,
            user=user,
            group=user,
            extra_groups=[],
            process_group=0,
        )


def size_mb(folder: Path) -> float:
    """Megabytes (10^6 bytes) of the files below `folder`."""
    return sum(os.lstat(file).st_size for file in folder.rglob("*") if not file.is_symlink()) / 1e6
