"""One launcher of processes: they are awaited, told apart from dead ones, and gone after the block."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from benchmarks import child
from benchmarks.child import Child, ended
from benchmarks.processes import command_line

READY = (
    "import pathlib, sys, time; file = pathlib.Path(sys.argv[1]);"
    "part = file.with_suffix('.part'); part.write_text('{}'); part.replace(file); "
)
WAITS = READY + "time.sleep(60)"
IS_DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITS
IN_TURN = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[2], sys.argv[1]]); "


@pytest.fixture
def make(tmp_path):
    """`make(code, *arguments)`: a child of this Python whose first argument is the file it writes."""

    def begin(code, *arguments, **settings):
        command = [sys.executable, "-c", code, str(tmp_path / "ready"), *arguments]
        return Child("it", command, log=tmp_path / "log", **settings)

    return begin


@pytest.fixture
def ready(tmp_path):
    return tmp_path / "ready"


def test_a_child_lives_for_the_block(make, ready):
    one = make(WAITS)
    assert not one.alive
    with ended(one):
        one.start()
        assert one.wait_for_file(ready, 30) == {}
        assert one.alive
        pid = one.pid
    assert not one.alive
    assert not command_line(pid)


def test_it_starts_again(make, ready):
    one = make(WAITS)
    with ended(one):
        one.start()
        first = one.pid
        assert one.terminate() == -signal.SIGTERM
        ready.unlink(missing_ok=True)
        one.start()
        one.wait_for_file(ready, 30)
        assert one.pid != first


def test_one_that_ends_early_says_why(make, ready):
    one = make("raise SystemExit('the port is taken')")
    with ended(one):
        one.start()
        with pytest.raises(RuntimeError, match="the port is taken"):
            one.wait_for_file(ready, 30)


def test_one_that_is_never_ready(make):
    one = make(WAITS)
    with ended(one):
        one.start()
        with pytest.raises(TimeoutError, match=r"after 0\.2 s"):
            one.wait_until(lambda: False, 0.2)
    assert not one.alive


def test_a_stopped_one_ends(make, ready):
    one = make(WAITS)
    with ended(one):
        one.start()
        one.wait_for_file(ready, 30)
        one.suspend()
    assert one.wait() == -signal.SIGTERM


def test_a_deaf_one_is_killed(make, ready, monkeypatch):
    monkeypatch.setattr(child, "STOP_SECONDS", 0.2)
    one = make(IS_DEAF)
    with ended(one):
        one.start()
        one.wait_for_file(ready, 30)
    assert one.wait() == -signal.SIGKILL


@pytest.mark.parametrize("last", ["pass", "import time; time.sleep(60)"], ids=["ended", "alive"])
def test_what_it_started_goes_with_it(make, ready, last):
    """Also where it has ended by itself before."""
    one = make(IN_TURN + last, IS_DEAF, own_group=True)
    with ended(one):
        one.start()
        wait_for(ready.exists)
        family = [pid for pid in group_of(one.pid) if pid != one.pid]
        assert family
    wait_for(lambda: not any(command_line(pid) for pid in family))  # killed; reaped by whoever adopted them


def group_of(leader: int) -> list[int]:
    found = []
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == leader:
                found.append(pid)
    return found


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_are_ended_where_one_does_not_start(make, ready):
    good, bad = make(WAITS), Child("bad", ["/nowhere/at/all"])
    with ended(good, bad):
        good.start()
        with pytest.raises(FileNotFoundError):
            bad.start()
    assert not good.alive
