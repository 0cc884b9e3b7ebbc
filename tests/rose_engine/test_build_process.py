"""A process beside a start: what it says is read, and it ends with who started it, or in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rose_engine import build_process
from rose_engine.build_process import BuildProcess, BuildReport, log_report, process_seconds, side_by_side


def script(text: str) -> BuildProcess:
    return BuildProcess([sys.executable, "-c", text])


def test_a_report_is_read_from_the_last_line():
    said = {"seconds": {"qkv": 1.5}, "failures": {}, "import_seconds": 2.0, "total_seconds": 3.5}
    report = script(f"print('a word of a library'); print({json.dumps(json.dumps(said))})").report()
    assert report == BuildReport({"qkv": 1.5}, {}, 2.0, 3.5)
    assert str(report) == "1 compiled in 3.5 s, 2.0 of them imports (qkv 1.5)"


def test_what_a_build_gives_is_what_is_read_however_long_that_takes():
    """Longer than to notice that standard input has ended, if it had."""
    build = "lambda: time.sleep(0.5) or BuildReport({'a': 1.0}, {'b': 'x'})"
    begun = script(f"import time; from rose_engine.build_process import BuildReport, run; run({build})")
    assert begun.report() == BuildReport({"a": 1.0}, {"b": "x"})


def test_no_descriptors_are_left_open():
    before = len(list(Path("/proc/self/fd").iterdir()))
    script("pass").report()
    BuildProcess(["/no/such/python"]).report()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_each_failure_is_a_warning(caplog):
    caplog.set_level("INFO")
    log_report("GEMMs", BuildReport(failures={"qkv": "no compiler", "down": "no room"}))
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "GEMMs: not compiled ahead: qkv: no compiler",
        "GEMMs: not compiled ahead: down: no room",
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise SystemExit('no quack here')", "status 1: no quack here"),
        ("import os; os.abort()", "status -6: no message"),
        ("print('{}x')", "status 0: no message"),
        ("print('[]')", "status 0: no message"),
    ],
)
def test_a_process_that_says_nothing_of_use_has_failed(text, why):
    assert script(text).report() == BuildReport(failures={"all": why})


def test_a_process_that_hangs_is_killed_in_time(monkeypatch):
    begun = script("import time; time.sleep(600)")
    process = begun._process
    assert begun.report(seconds=0.2).failures["all"].startswith("not done after")
    assert process.returncode == -signal.SIGKILL
    assert begun.report() == BuildReport(failures={"all": "its report was read before"})
    monkeypatch.setattr(build_process, "COMPILE_SECONDS", 0.2)
    monkeypatch.setattr(build_process, "IMPORT_SECONDS", 0.0)
    assert script("import time; time.sleep(600)").report().failures["all"].startswith("not done after")


def test_what_cannot_be_started_has_failed():
    assert "/no/such/python" in BuildProcess(["/no/such/python"]).report().failures["all"]


def test_the_seconds_of_this_process_go_on():
    before = process_seconds()
    assert 0 < before <= process_seconds() < 24 * 3600


FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def hang() -> None:
    time.sleep(600)


def fail() -> None:
    raise ValueError("no compiler")


@FORKS
def test_jobs_are_done_side_by_side_each_with_its_own_outcome(tmp_path):
    jobs = {name: (tmp_path / name).touch for name in ("a", "b", "c")} | {"broken": fail}
    seconds, failures = side_by_side(jobs, 60, 2)
    assert set(seconds) == {"a", "b", "c"} == {file.name for file in tmp_path.iterdir()}
    assert failures == {"broken": "ValueError: no compiler"}


@FORKS
def test_a_job_that_hangs_fails_alone_and_its_process_is_killed(tmp_path):
    def noted() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        hang()

    seconds, failures = side_by_side({"stuck": noted, "fine": (tmp_path / "fine").touch}, 1.0, 2)
    assert set(seconds) == {"fine"}
    assert failures == {"stuck": "not done in time"}
    wait_until_gone([int((tmp_path / "pid").read_text())])


@FORKS
def test_a_process_that_dies_fails_what_it_had_and_nothing_hangs():
    seconds, failures = side_by_side({"dead": lambda: os._exit(3)}, 60, 1)
    assert not seconds
    assert failures["dead"].startswith("BrokenProcessPool")


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.02)


def running(pid: int) -> bool:
    """A zombie, which nobody reaps where the tests run as a container's first process, has ended."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


SERVER = """
import sys
from rose_engine.build_process import BuildProcess
build = BuildProcess([sys.executable, "-c", sys.argv[1]])
for line in build._process.stdout:
    print(line, end="", flush=True)
"""
HUNG_BUILD = r"""
import os, time
from rose_engine.build_process import end_with_standard_input, side_by_side
def say_pid():
    os.write(1, b"%d\n" % os.getpid())  # in one piece, whoever else writes
def hang():
    say_pid()
    time.sleep(600)
end_with_standard_input()
say_pid()
side_by_side({"a": hang, "b": hang}, 600.0, 2)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_build_ends_with_the_server_however_that_ends(number):
    command = [sys.executable, "-c", SERVER, HUNG_BUILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            pids = [int(server.stdout.readline()) for _ in range(3)]
            assert all(running(pid) for pid in pids)
        finally:
            server.send_signal(number)
    wait_until_gone(pids)
