"""What a container's health check says of a server, in each of its states."""

from __future__ import annotations

import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from tests.tulip_server.test_listener import Authority
from tulip_server.health import INFERENCE_SERVICE
from tulip_server.probe import main


@contextmanager
def health_service(
    *, service: str = INFERENCE_SERVICE, state: int = HealthCheckResponse.SERVING, credentials=None
):
    """A server that answers health checks only; its port."""
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = HealthServicer()
    servicer.set(service, state)
    add_HealthServicer_to_server(servicer, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


def check(*arguments: str, **environment: str) -> int:
    return main(list(arguments), environment)


def test_a_server_that_serves_is_healthy(capsys):
    with health_service() as port:
        assert check(f"127.0.0.1:{port}") == 0
    assert capsys.readouterr().out == f"127.0.0.1:{port}: SERVING\n"


def test_the_port_is_the_servers_own_setting():
    with health_service() as port:
        assert check(TULIP_PORT=str(port)) == 0


def test_not_serving_is_unhealthy(capsys):
    with health_service(state=HealthCheckResponse.NOT_SERVING) as port:
        assert check(f"127.0.0.1:{port}") == 1
    assert "NOT_SERVING" in capsys.readouterr().out


def test_another_service_being_healthy_is_not_enough(capsys):
    with health_service(service="") as port:
        assert check(f"127.0.0.1:{port}") == 1
    assert "NOT_FOUND" in capsys.readouterr().out


@pytest.mark.parametrize("state", ["closed", "silent"])
def test_nobody_answering_is_unhealthy(state, capsys):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if state == "silent":
            listener.listen()  # accepts, and says nothing
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert check(address, "--timeout", "0.5") == 1
    assert capsys.readouterr().out.split()[-1] in ("UNAVAILABLE", "DEADLINE_EXCEEDED")


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command")
    return Authority.make(tmp_path_factory.mktemp("keys") / "ours")


@pytest.fixture
def guarded_port(authority):
    """Of a server that lets only clients of the authority in; its certificate is for 127.0.0.1."""
    certificate, key = authority.issue("server")
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), certificate.read_bytes())], authority.certificate.read_bytes(), True
    )
    with health_service(credentials=credentials) as port:
        yield port


def test_mutual_tls_takes_the_probes_own_certificate(authority, guarded_port):
    certificate, key = authority.issue("probe")
    trust = ("--ca", str(authority.certificate))
    ours = ("--certificate", str(certificate), "--key", str(key))
    address = f"127.0.0.1:{guarded_port}"
    assert check(address, *trust, *ours) == 0
    assert check(address, *trust, "--timeout", "1") == 1
    assert check(address, "--timeout", "1") == 1
    assert check(address, *trust, *ours, "--server-name", "another", "--timeout", "1") == 1


def test_a_missing_file_is_named(tmp_path, capsys):
    assert check("127.0.0.1:1", "--ca", str(tmp_path / "none.pem")) == 1
    assert "none.pem" in capsys.readouterr().out
