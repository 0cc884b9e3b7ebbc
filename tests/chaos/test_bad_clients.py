"""Clients that are slow, huge, deep or deaf: they are shown out, and their neighbours notice nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import pytest

from benchmarks.http_client import encode_request
from benchmarks.processes import cluster, num_descriptors, resident_bytes
from tests.chaos.checks import assert_none_failed, under_load, wait_for

SECONDS = 1.0
COUNT = 60
CONNECTIONS = 150
MIB = 1024 * 1024
TIMEOUTS = [
    flag for name in ("header", "body", "write") for flag in (f"--{name}-timeout-seconds", str(SECONDS))
]
FLAGS = [*TIMEOUTS, "--max-connections", str(CONNECTIONS)]


@pytest.fixture(scope="module")
def strict(minilm, tmp_path_factory):
    """A gateway that has little patience with slow clients."""
    with cluster(
        minilm, tmp_path_factory.mktemp("strict"), *FLAGS, replicas=1, tokens_per_second=200_000
    ) as stack:
        yield stack


@contextlib.contextmanager
def sockets(stack, count):
    with contextlib.ExitStack() as block:
        address = ("127.0.0.1", stack.gateway.port)
        yield [block.enter_context(socket.create_connection(address, 10)) for _ in range(count)]


def until_shut_out(connections, piece) -> int:
    """Send a piece to each, slowly, until the other side has closed all; how often that was."""
    open_ones, rounds = list(connections), 0
    while open_ones:
        assert rounds < 100, "they are still let in"
        time.sleep(0.1)
        open_ones = [one for one in open_ones if still_open(one, piece)]
        rounds += 1
    return rounds


def still_open(connection, piece) -> bool:
    try:
        connection.sendall(piece)
        connection.setblocking(False)
        while True:
            if not connection.recv(65536):
                return False
    except BlockingIOError:
        connection.setblocking(True)
        return True
    except OSError:
        return False


HEAD = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    ("begin", "piece"),
    [(HEAD, b"x"), (HEAD + b"content-length: 100000\r\n\r\n", b" "), (b"", b"")],
    ids=["headers", "body", "silence"],
)
def test_slow_senders(strict, questions, begin, piece):
    files = num_descriptors(strict.gateway.pid)

    def event():
        with sockets(strict, COUNT) as slow:
            for one in slow:
                one.sendall(begin)
            assert until_shut_out(slow, piece) * 0.1 >= 0.5 * SECONDS

    assert_none_failed(under_load(strict, questions, event))
    wait_for(lambda: num_descriptors(strict.gateway.pid) <= files + 10, 10)


def test_more_connections_than_allowed(strict, questions):
    """Those over the limit are told so at once; who is connected already is served."""

    def event():
        with sockets(strict, CONNECTIONS + 50) as many:
            answers = [told(one) for one in many[-20:]]
        assert all(answer.startswith(b"HTTP/1.1 503") for answer in answers), answers

    assert_none_failed(under_load(strict, questions, event))


def told(connection) -> bytes:
    connection.settimeout(10)
    try:
        return connection.recv(100)
    except ConnectionError as error:
        return str(error).encode()


def answer_to(stack, request: bytes) -> int:
    """The status of the answer; 0 where the connection is closed without one."""
    with sockets(stack, 1) as (connection,):
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
        with contextlib.suppress(ConnectionError):
            if line := connection.makefile("rb").readline():
                return int(line.split()[1])
    return 0


def test_huge_headers(strict, questions):
    def event():
        for _ in range(10):
            one = encode_request("GET", "/health", headers={"x-long": "x" * 200_000})
            many = encode_request("GET", "/health", headers={f"x-{i}": "x" for i in range(20_000)})
            endless = b"GET /" + b"x" * 500_000
            for request in (one, many, endless):
                assert answer_to(strict, request) in (0, 400, 414, 431)

    assert_none_failed(under_load(strict, questions, event))


def test_deep_json(strict, questions):
    def event():
        for depth in (1_000, 100_000, 1_000_000):
            for deep in (b"[" * depth, b"[" * depth + b"]" * depth, b'{"a":' * depth):
                body = b'{"inputs": ' + deep + b"}"
                assert answer_to(strict, encode_request("POST", "/embed", body)) in (400, 413, 422)

    assert_none_failed(under_load(strict, questions, event))


def test_readers_that_do_not_read(strict, questions):
    """Replies of megabytes that nobody takes are let go of, and their memory with them."""
    body = json.dumps({"inputs": ["tea " * 250] * 160}).encode()  # more than kernels take in by themselves
    request = encode_request("POST", "/embed_all", body)
    memory, files = resident_bytes(strict.gateway.pid), num_descriptors(strict.gateway.pid)

    def event():
        with sockets(strict, 6) as deaf:
            for one in deaf:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.sendall(request)
            wait_for(lambda: num_descriptors(strict.gateway.pid) >= files + 6, 10)
            wait_for(lambda: num_descriptors(strict.gateway.pid) <= files + 3, 30)

    assert_none_failed(under_load(strict, questions, event, callers=2))
    assert resident_bytes(strict.gateway.pid) < memory + 150 * MIB
