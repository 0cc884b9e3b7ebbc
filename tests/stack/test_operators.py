"""What an operator meets: wrong settings, broken folders, dead children, signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ivy_gateway.local_stack import StackError, free_port, running_stack

FAST = {"OMP_NUM_THREADS": "1"}


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env={**os.environ, **FAST, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def assert_one_plain_line(result, *needles):
    assert result.returncode != 0
    assert "Traceback" not in result.stderr + result.stdout
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert lines, "nothing was said"
    for needle in needles:
        assert needle in lines[-1], result.stderr


@pytest.fixture
def broken_copy(minilm, tmp_path):
    """The real folder, copied by name and link, ready to be damaged."""

    def copy(without: str | None = None) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(minilm, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        (folder / "model.safetensors").symlink_to(minilm / "model.safetensors")
        if without:
            (folder / without).unlink()
        return folder

    return copy


TULIP = ("tulip_server",)
IVY = ("ivy_gateway", "--replica", "127.0.0.1:50051")


@pytest.mark.parametrize("tier", [TULIP, IVY], ids=lambda tier: tier[0])
def test_an_unknown_folder(tier):
    assert_one_plain_line(run(*tier, "--model", "/nonexistent/model"), "/nonexistent/model")


def test_ivy_up_with_an_unknown_folder():
    assert_one_plain_line(run("ivy_gateway.local", "up", "/nonexistent/model"), "/nonexistent/model")


def test_weights_missing(broken_copy):
    folder = broken_copy(without="model.safetensors")
    assert_one_plain_line(run("tulip_server", "--model", str(folder), "--port", "0"), "safetensors")


def test_half_a_checkpoint(broken_copy, minilm):
    import safetensors.torch

    folder = broken_copy(without="model.safetensors")
    tensors = safetensors.torch.load_file(minilm / "model.safetensors")
    tensors = {name: t for name, t in tensors.items() if "layer.3.attention.self.key" not in name}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    result = run("tulip_server", "--model", str(folder), "--port", "0")
    assert_one_plain_line(result, "layers.3.attention.key.weight is missing")


def test_the_tokenizer_missing(broken_copy):
    folder = broken_copy(without="tokenizer.json")
    assert_one_plain_line(run(*IVY, "--model", str(folder)), "tokenizer.json")


@pytest.mark.parametrize("tier", [TULIP, IVY], ids=lambda tier: tier[0])
def test_the_port_is_in_use(tier, minilm):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_one_plain_line(run(*tier, "--model", str(minilm), "--port", port), port)


@pytest.mark.parametrize(("tier", "key"), [("tulip_server", "TULIP_DEVCE"), ("ivy_gateway", "IVY_PROT")])
def test_an_unknown_environment_key(tier, key, minilm):
    assert_one_plain_line(run(tier, "--model", str(minilm), **{key: "1"}), key)


@pytest.mark.parametrize("module", ["tulip_server", "ivy_gateway", "ivy_gateway.local"])
def test_help_reads_well(module):
    result = run(module, "--help")
    assert result.returncode == 0
    assert "usage" in result.stdout.lower()


def children(pid: int) -> dict[int, str]:
    """Command lines of all descendants of `pid`."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if int(stat[1]) == pid and stat[0] != "Z":
            found[int(entry.name)] = command
            found |= children(int(entry.name))
    return found


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_a_dead_server_is_started_again_and_nothing_is_left_behind():
    from tests.stack.conftest import Client

    impatient = FAST | {"IVY_REPLICA_PATIENCE_SECONDS": "0.2"}  # far less than a server takes to start again
    with running_stack("demo", "--device", "cpu", environment=impatient) as stack:
        client = Client(stack)
        before = client.embed(["still here"])
        servers = [pid for pid, command in children(stack.pid).items() if "tulip_server" in command]
        assert servers
        for pid in servers:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: client.call("/health")[0] == 503, 20)
        status, headers, body = client.call("/embed", {"inputs": "x"})
        assert status == 503
        assert "retry-after" in {name.lower() for name in headers}
        assert body["error_type"] == "Unhealthy"
        wait_for(lambda: client.call("/health")[0] == 200)
        assert (client.embed(["still here"]) == before).all()
        family = set(children(stack.pid)) | {stack.pid}
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family), 10)


def test_a_hub_id_from_a_cache_without_network(minilm, tmp_path):
    repository = tmp_path / "hub" / "models--bouquet-tests--minilm"
    snapshot = repository / "snapshots" / ("a" * 40)
    shutil.copytree(minilm, snapshot, ignore=shutil.ignore_patterns("*.safetensors"))
    (snapshot / "model.safetensors").symlink_to(minilm / "model.safetensors")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    offline = {**FAST, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    from tests.stack.conftest import Client

    with running_stack("bouquet-tests/minilm", "--device", "cpu", environment=offline) as stack:
        client = Client(stack)
        assert client.embed(["hello"]).shape == (1, 384)
        assert client.call("/v1/models")[2]["data"][0]["id"] == "bouquet-tests/minilm"


def test_a_hub_id_that_is_not_cached_is_one_line(tmp_path):
    result = run(
        "ivy_gateway.local", "up", "bouquet-tests/absent", HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1"
    )
    assert_one_plain_line(result, "bouquet-tests/absent")


def test_a_stack_that_cannot_start_says_so(tmp_path):
    with (
        pytest.raises(StackError, match="ended with exit code"),
        running_stack(str(tmp_path), environment=FAST),
    ):
        pytest.fail("it must not start")


def test_the_demo_runs_to_its_end():
    result = run("ivy_gateway.demo")
    assert result.returncode == 0, result.stderr
    assert "Photosynthesis" in result.stdout
    assert "Stopped cleanly." in result.stdout


def test_one_tier_alone_and_then_the_other(minilm, tmp_path):
    ready, port = tmp_path / "ready.json", free_port()
    command = [
        sys.executable,
        "-m",
        "tulip_server",
        "--model",
        str(minilm),
        "--port",
        "0",
        "--ready-file",
        str(ready),
    ]
    server = subprocess.Popen(command, env={**os.environ, **FAST})
    try:
        wait_for(ready.exists)
        address = f"127.0.0.1:{json.loads(ready.read_text())['port']}"
        command = [
            sys.executable,
            "-m",
            "ivy_gateway",
            "--model",
            str(minilm),
            "--port",
            str(port),
            "--replica",
            address,
        ]
        gateway = subprocess.Popen(command)
        try:
            from ivy_gateway.local_stack import LocalStack
            from tests.stack.conftest import Client

            client = Client(LocalStack(f"http://127.0.0.1:{port}", gateway.pid, 0.0))
            wait_for(lambda: up(client))
            assert client.embed(["a"]).shape == (1, 384)
        finally:
            gateway.send_signal(signal.SIGTERM)
            assert gateway.wait(30) == 0
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def up(client) -> bool:
    try:
        return client.call("/health")[0] == 200
    except OSError:
        return False
