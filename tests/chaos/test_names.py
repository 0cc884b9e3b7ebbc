"""A DNS name whose addresses come and go: servers join and leave under load, and nobody is told."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.processes import Cluster, Service, fixed_rate_server, running
from ivy_gateway.local_stack import free_port
from tests.chaos.checks import assert_none_failed, under_load, wait_for

NAME = "tulips.chaos.test"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs 127.0.0.2 and 127.0.0.3")


@pytest.fixture
def named(minilm, tmp_path):
    """Three servers with one port and an address each, a gateway that knows the name, and what sets it."""
    names, port = tmp_path / "names.json", free_port()

    def publish(*hosts):
        unfinished = names.with_suffix(".new")
        unfinished.write_text(json.dumps({NAME: hosts} if hosts else {}))
        unfinished.replace(names)

    publish("127.0.0.1")
    command = fixed_rate_server(minilm, 20_000)
    tulips = tuple(
        Service(f"tulip-{i}", command, tmp_path, host=f"127.0.0.{i}", port=port) for i in range(1, 4)
    )
    flags = ["--model", str(minilm), "--replica", f"dns:{NAME}:{port}", "--resolve-seconds", "0.3"]
    gateway = Service("gateway", ["tests.chaos.named_gateway", *flags], tmp_path, {"CHAOS_NAMES": str(names)})
    stack = Cluster(gateway, tulips)
    with running(*stack.services):
        stack.wait_for_replicas(1)
        yield stack, publish


def test_servers_join_and_leave(named, questions):
    stack, publish = named
    first, second, third = stack.tulips

    def event():
        publish(first.host, second.host)
        stack.wait_for_replicas(2, 20)
        wait_for(lambda: second.metric("tulip_chunks_total", outcome="ok") > 0, 20)
        publish(second.host)
        wait_for(lambda: known(stack) == {second.address}, 20)
        assert first.terminate() == 0
        publish(second.host, third.host)
        stack.wait_for_replicas(2, 20)
        second.kill()
        stack.wait_for_replicas(1, 20)
        wait_for(lambda: third.metric("tulip_chunks_total", outcome="ok") > 0, 20)
        publish()  # a name that cannot be resolved keeps the addresses it had
        wait_for(lambda: "name not known" in stack.gateway.log.read_text(), 20)
        assert third.address in known(stack)

    assert_none_failed(under_load(stack, questions, event))


def known(stack) -> set[str]:
    return {replica["address"] for replica in stack.replicas()}
