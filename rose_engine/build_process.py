"""A process beside a start that compiles something into a cache on disk, in processes forked from it.

It ends with the process that started it, however that ends; what goes wrong in it is told, and costs nothing
but the time to compile on first use. Knows nothing of what is compiled.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

COMPILE_SECONDS = 90.0  # until jobs that are not done by then count as failed
IMPORT_SECONDS = 60.0  # on top of that, for the process to get so far
_NICENESS = 5  # the start that is helped comes first


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What became of the jobs of one build."""

    seconds: Mapping[str, float] = field(default_factory=dict)  # job -> what it took
    failures: Mapping[str, str] = field(default_factory=dict)  # job -> why it was not done
    import_seconds: float = 0.0  # from the start of the process
    total_seconds: float = 0.0  # those included

    def __str__(self) -> str:
        each = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        took = f"{self.total_seconds:.1f} s, {self.import_seconds:.1f} of them imports"
        return f"{len(self.seconds)} compiled in {took} ({each or 'none'})"


class BuildProcess:
    """The process, from its start until its report is read.

    In a group of its own; its standard input, which nobody writes, ends with this process.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._failed: str | None = None
        self._process: subprocess.Popen[str] | None = None
        # A pipe of our own: Popen's is closed by `communicate` before it waits.
        theirs, self._held = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own modules
                command,
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._failed = str(error)
            os.close(self._held)
        finally:
            os.close(theirs)

    def report(self, seconds: float | None = None) -> BuildReport:
        """Wait, as a rule as long as a build may take, and read the report; what is left then is killed."""
        process = self._process
        if process is None:
            return BuildReport(failures={"all": self._failed or "its report was read before"})
        self._process = None
        with process:
            try:
                limit = COMPILE_SECONDS + IMPORT_SECONDS if seconds is None else seconds
                output, errors = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired as error:
                return BuildReport(failures={"all": f"not done after {error.timeout:.0f} s"})
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                os.close(self._held)
        try:
            return BuildReport(**json.loads(output.splitlines()[-1]))
        except (IndexError, TypeError, ValueError):
            last_line = (errors.strip().splitlines() or ["no message"])[-1]
            return BuildReport(failures={"all": f"status {process.returncode}: {last_line}"})


def log_report(what: str, report: BuildReport) -> None:
    """One line for the build, and a warning for each job that failed."""
    log.info("beside the start: %s: %s", what, report)
    for name, why in report.failures.items():
        log.warning("%s: not compiled ahead: %s: %s", what, name, why)


def process_seconds() -> float:
    """Seconds since this process was started (proc_pid_stat(5), field 22)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def run(build: Callable[[], BuildReport]) -> None:
    """What a `BuildProcess` does: build until its standard input ends, and print the report."""
    os.nice(_NICENESS)
    end_with_standard_input()
    report = build()
    sys.stdout.write("\n" + json.dumps(asdict(report)) + "\n")
    sys.stdout.flush()


def end_with_standard_input() -> None:
    """Kill this process's group when its standard input ends, as it does when who started it is gone."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="watch", daemon=True).start()


Jobs = Mapping[str, Callable[[], object]]


def side_by_side(
    jobs: Jobs, timeout: float = COMPILE_SECONDS, processes: int | None = None
) -> tuple[dict[str, float], dict[str, str]]:
    """Do `jobs` in forked processes: seconds that each took, and why each of the others failed.

    As a rule in half as many processes as there are cores: the start that is helped needs some too. Jobs
    that are not done after `timeout` seconds have failed, and their processes are killed.
    """
    most = max(1, len(os.sched_getaffinity(0)) // 2) if processes is None else processes
    context: Any = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(most, len(jobs)) or 1, context, initializer=_JOBS.update, initargs=(jobs,))
    futures = {name: pool.submit(_timed, name) for name in jobs}
    wait(futures.values(), timeout)
    outcomes = {name: _outcome(future) for name, future in futures.items()}
    _end(pool)
    seconds = {name: took for name, took in outcomes.items() if isinstance(took, float)}
    return seconds, {name: why for name, why in outcomes.items() if isinstance(why, str)}


_JOBS: dict[str, Callable[[], object]] = {}  # of a forked process: handed over by memory, whatever they hold


def _timed(name: str) -> float:
    began = time.perf_counter()
    _JOBS[name]()
    return time.perf_counter() - began


def _outcome(future: Future[float]) -> float | str:
    if not future.done():
        return "not done in time"
    error = future.exception()
    return future.result() if error is None else f"{type(error).__name__}: {error}"


def _end(pool: ProcessPoolExecutor) -> None:
    """End the pool without waiting for what hangs."""
    left = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in left:
        process.kill()
