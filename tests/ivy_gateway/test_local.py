"""`ivy up`: what it would run, how it keeps its children, and one whole real stack."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import httpx
import pytest

from ivy_gateway import host, local
from ivy_gateway.errors import StartupError
from ivy_gateway.local import Child, find_model, main


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for key in list(os.environ):
        if key.startswith(("IVY_", "TULIP_")):
            monkeypatch.delenv(key)


def plan(*argv: str, workspace: Path = Path("/tmp/ivy-x")) -> local.Plan:
    arguments, rest = local._parser().parse_known_args(["up", *argv])
    return local.make_plan(arguments, rest, workspace)


def flags(command: tuple[str, ...], name: str) -> list[str]:
    return [command[i + 1] for i, word in enumerate(command) if word == name]


def test_one_server_per_device_in_turn(minilm):
    made = plan(str(minilm), "--device", "cuda:0,cuda:1", "--replicas", "3", "--dtype", "bfloat16")
    assert [flags(c, "--device") for c in made.server_commands] == [["cuda:0"], ["cuda:1"], ["cuda:0"]]
    assert all(flags(c, "--dtype") == ["bfloat16"] for c in made.server_commands)
    ports = [flags(c, "--port")[0] for c in made.server_commands]
    assert len(set(ports)) == 3
    sockets = [flags(c, "--frames-socket")[0] for c in made.server_commands]
    assert len(set(sockets)) == 3
    assert flags(made.gateway_command, "--replica") == [f"frames:{path}" for path in sockets]
    assert not any("--threads" in command for command in made.server_commands)


def test_cpu_servers_share_the_cores(minilm):
    cores = len(os.sched_getaffinity(0))
    for count in (1, 2, 4 * cores):
        made = plan(str(minilm), "--device", "cpu", "--replicas", str(count))
        assert len(made.server_commands) == count
        threads = {int(flags(command, "--threads")[0]) for command in made.server_commands}
        assert threads == {max(1, cores // count)}


def test_other_flags_reach_the_gateway_and_are_checked_before_anything_starts(minilm):
    made = plan(str(minilm), "--port", "1234", "--alias", "short", "--no-auto-truncate")
    assert flags(made.gateway_command, "--port") == ["1234"]
    assert "--no-auto-truncate" in made.gateway_command
    for wrong, words in (
        (("--prot", "1"), "--prot"),
        (("--port", "x"), "--port"),
        (("--replicas", "0"), "above"),
    ):
        with pytest.raises(StartupError, match=words):
            plan(str(minilm), *wrong)


def test_a_folder_too_deep_for_sockets_leaves_the_ports(minilm):
    for depth, fits in ((80, True), (100, False)):
        workspace = Path("/" + depth * "d")
        made = plan(str(minilm), "--replicas", "2", workspace=workspace)
        replicas = flags(made.gateway_command, "--replica")
        if fits:
            assert replicas == [f"frames:{workspace}/server-{i}.sock" for i in range(2)]
        else:
            assert replicas == [f"127.0.0.1:{flags(c, '--port')[0]}" for c in made.server_commands]
            assert not any("--frames-socket" in command for command in made.server_commands)


def test_in_front_of_a_gpu_the_gateway_has_more_of_the_machine(minilm, monkeypatch):
    monkeypatch.setattr(host, "has_gpu", lambda: False)

    def gateway(cores: int, *argv: str) -> tuple[int, float]:
        monkeypatch.setattr(host, "num_cores", lambda: cores)
        config = local._gateway_config(plan(str(minilm), *argv))
        return config.workers, config.awake_ms

    one_gpu = ("--device", "cuda:0")
    assert gateway(2, *one_gpu) == (1, 0)
    assert gateway(8, *one_gpu) == (2, 3)
    assert gateway(16, *one_gpu) == (4, 3)
    assert gateway(128, "--device", "cuda:0,cuda:1", "--replicas", "8") == (4, 3)
    assert gateway(32, "--device", "cuda:0,cuda:1", "--replicas", "8") == (4, 0)
    assert gateway(128, "--device", "cpu") == gateway(128) == (1, 0)
    monkeypatch.setattr(host, "has_gpu", lambda: True)
    assert gateway(16) == (4, 3)
    assert gateway(128, "--device", "cpu") == (1, 0)
    # What the user says counts.
    assert gateway(16, "--workers", "2") == (2, 3)
    assert gateway(16, "--awake-ms", "0") == (4, 0)
    assert gateway(16, "--port", "0") == (1, 3), "a free port needs one worker"
    monkeypatch.setenv("IVY_WORKERS", "3")
    monkeypatch.setenv("IVY_AWAKE_MS", "0.5")
    assert gateway(16) == (3, 0.5)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000", 64),
        ("800000 100000", 8),
        ("50000 100000", 1),
        ("9900000 100000", 64),
        ("odd", 64),
        (None, 64),
    ],
)
def test_cores_are_those_that_a_container_may_use(monkeypatch, tmp_path, limit, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(host, "_CPU_LIMIT", tmp_path / "cpu.max")
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit + "\n")
    assert host.num_cores() == expected


def test_names(minilm):
    assert flags(plan("demo").gateway_command, "--served-model-name") == ["demo"]
    assert plan(str(minilm)).name == minilm.name
    assert find_model("demo") == minilm


def test_what_is_no_model_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model in ("./nowhere/at/all", "nobody/no-such-model"):
        assert main(["up", model]) == 1
        stderr = capsys.readouterr().err
        assert len(stderr.strip().splitlines()) == 1
        assert model in stderr


@pytest.mark.parametrize("flag", [("--prot", "1"), ("--port", "x"), ("--replicas", "0"), ("--workers",)])
def test_flags_that_cannot_be_read_are_one_line_and_2(minilm, capsys, flag):
    assert main(["up", str(minilm), *flag]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_help_and_version(capsys):
    for argv in (["--help"], ["up", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 0
    assert re.search(r"^\d+\.\d+", capsys.readouterr().out, re.MULTILINE)


# Children that are small scripts: the ready file's path is the last argument but for a restarted one's port.
STEADY = """
import json, os, pathlib, signal, sys
ready = pathlib.Path(sys.argv[sys.argv.index("--ready-file") + 1])
print("argv", *sys.argv[1:], flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
pathlib.Path(str(ready) + ".tmp").write_text(json.dumps({"port": 7}))
os.replace(str(ready) + ".tmp", ready)
signal.sigwait({signal.SIGTERM})
print("goodbye", flush=True)
"""


NEVER_READY = STEADY.replace("os.replace", "print")


def stack_of(folder: Path, *, server: str, gateway: str) -> local.Plan:
    """A plan of two scripts."""
    commands = [(sys.executable, "-c", script) for script in (server, gateway)]
    return local.Plan(folder, "m", folder, (commands[0],), commands[1])


async def line_count(capsys, seen: list[str], words: str, count: int) -> None:
    async with asyncio.timeout(30):
        while "".join(seen).count(words) < count:
            seen.append(capsys.readouterr().out)
            await asyncio.sleep(0.02)


async def test_a_child_that_dies_comes_back_under_its_port(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(local, "_FIRST_BACKOFF_SECONDS", 0.01)
    child = Child("thing", (sys.executable, "-c", STEADY), tmp_path / "ready.json")
    seen: list[str] = []
    child.start()
    await child.first_ready()
    assert child.port == 7
    await line_count(capsys, seen, "[thing] argv", 1)
    child._process.kill()
    await line_count(capsys, seen, "[thing] argv", 2)
    await child.stop()
    seen.append(capsys.readouterr().out)
    text = "".join(seen)
    assert "thing: ended with exit code -9; again in" in text
    assert "--port 7" in text.rpartition("[thing] argv")[2].splitlines()[0]
    assert child._process.returncode is not None


async def test_a_stopped_child_may_finish_and_stays_down(tmp_path, capsys):
    child = Child("thing", (sys.executable, "-c", STEADY), tmp_path / "ready.json")
    child.start()
    await child.first_ready()
    await child.stop()
    assert child._process.returncode == 0
    output = capsys.readouterr().out
    assert "[thing] goodbye" in output
    assert "again in" not in output


async def test_a_child_that_hangs_is_killed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(local, "_STOP_SECONDS", 0.05)
    deaf = STEADY.replace("signal.sigwait({signal.SIGTERM})", "signal.pause()")
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + deaf
    child = Child("thing", (sys.executable, "-c", deaf), tmp_path / "ready.json")
    child.start()
    await child.first_ready()
    await child.stop()
    assert child._process.returncode == -signal.SIGKILL


async def test_a_child_that_ends_before_it_is_ready_is_an_error(tmp_path, capsys):
    child = Child("thing", (sys.executable, "-c", "raise SystemExit('no such device')"), tmp_path / "r.json")
    child.start()
    with pytest.raises(StartupError, match="thing ended with exit code 1 before it was ready"):
        await child.first_ready()
    await child.stop()
    assert "[thing] no such device" in capsys.readouterr().out


async def test_the_order_to_stop_counts_while_the_stack_starts(tmp_path, capsys):
    stop = asyncio.Event()
    starting = local._stack(stack_of(tmp_path, server=NEVER_READY, gateway=NEVER_READY), stop)
    entering = asyncio.create_task(starting.__aenter__())
    seen: list[str] = []
    await line_count(capsys, seen, "[server 0] argv", 1)
    await line_count(capsys, seen, "[gateway] argv", 1)  # it did not wait for the server
    stop.set()
    with pytest.raises(local._StopRequested):
        await entering
    assert "".join((*seen, capsys.readouterr().out)).count("goodbye") == 2


@pytest.mark.parametrize("dies", ["server 0", "gateway"])
async def test_one_that_dies_while_the_others_load_stops_them(tmp_path, capsys, dies):
    dead = "raise SystemExit('no such device')"
    server, gateway = (dead, NEVER_READY) if dies == "server 0" else (NEVER_READY, dead)
    starting = local._stack(stack_of(tmp_path, server=server, gateway=gateway), asyncio.Event())
    with pytest.raises(StartupError, match=f"{dies} ended with exit code 1 before it was ready"):
        await starting.__aenter__()
    said = capsys.readouterr().out
    assert f"[{dies}] no such device" in said
    assert "again in" not in said


async def test_a_child_stopped_while_it_is_started_goes_too(tmp_path, capsys):
    child = Child("thing", (sys.executable, "-c", "import time; time.sleep(600)"), tmp_path / "ready.json")
    child.start()
    await asyncio.sleep(0)  # the process is being made
    async with asyncio.timeout(30):
        await child.stop()
    assert child._process is None or child._process.returncode == -signal.SIGTERM


async def test_children_end_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(STEADY)
    parent = f"""
import asyncio, pathlib, sys
from ivy_gateway.local import Child
async def main():
    child = Child("thing", (sys.executable, {str(script)!r}), pathlib.Path({str(tmp_path / "r.json")!r}))
    child.start()
    await child.first_ready()
    print("pid", child._process.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE
    )
    pid = int((await Stack(process).line(r"^pid (\d+)"))[1])
    assert is_alive(pid)
    process.kill()
    await process.communicate()
    async with asyncio.timeout(30):
        while is_alive(pid):
            await asyncio.sleep(0.02)


class Stack:
    """`ivy up` as a process whose lines can be awaited."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def line(self, pattern: str) -> re.Match:
        """The next line that matches; fails with everything seen when the output ends first."""
        async with asyncio.timeout(120):
            async for raw in self.process.stdout:
                self.lines.append(raw.decode())
                if match := re.search(pattern, self.lines[-1]):
                    return match
        raise AssertionError("".join(self.lines))


def is_alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.slow
async def test_a_whole_stack_serves_survives_a_death_and_leaves_nothing(minilm):
    pytest.importorskip("torch", reason="the servers of a whole stack need torch")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ivy_gateway.local", "up", "demo", "--replicas", "2", "--device", "cpu",
        "--port", "0", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    stack = Stack(process)
    try:
        base = (await stack.line(r"^ready: (http://\S+)"))[1]
        children = _children_of(process.pid)
        assert len(children) == 3
        assert all("frames:" in c or "--frames-socket" in c for c in map(_command_of, children))
        async with httpx.AsyncClient(base_url=base, timeout=60) as client:
            before = (await client.post("/embed", json={"inputs": ["plum jam", "oak shelf"]})).json()
            victim = next(pid for pid in children if "tulip_server" in _command_of(pid))
            os.kill(victim, signal.SIGKILL)
            await stack.line("ended with exit code -9")
            for _ in range(5):
                reply = await client.post("/embed", json={"inputs": ["plum jam", "oak shelf"]})
                assert reply.json() == before
            await stack.line(r"\[gateway\].*: ready")
            states = [r["state"] for r in (await client.get("/info")).json()["replicas"]]
            assert states == ["ready", "ready"]
        children = _children_of(process.pid)
        process.send_signal(signal.SIGINT)
        await stack.line("^stopped")
        assert await process.wait() == 0
        assert not [pid for pid in children if is_alive(pid)]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def _children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def _command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def test_a_reference_gap_is_allowed_to_all_or_none():
    allowed, refused = plan("demo", "--replicas", "2", "--allow-reference-gap"), plan("demo")
    for command in (*allowed.server_commands, allowed.gateway_command):
        assert command.count("--allow-reference-gap") == 1
    for command in (*refused.server_commands, refused.gateway_command):
        assert "--allow-reference-gap" not in command
