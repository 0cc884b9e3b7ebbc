"""Limits of HTTP connections, over real sockets: headers, times, slow readers, and how it all ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest
import uvicorn
from uvicorn.server import ServerState

from ivy_gateway import metrics, server
from ivy_gateway.app import create_app
from ivy_gateway.config import GatewayConfig
from ivy_gateway.http_protocol import ConnectionLimits, protocol_with
from protos.fingerprint import tokenizer_hash
from tests.ivy_gateway.fake_tulip import FakeTulip, serving

QUICK = {"header_timeout_seconds": 0.5, "body_timeout_seconds": 0.5, "write_timeout_seconds": 0.5}


class Served:
    """A gateway on a socket of its own, in this process."""

    def __init__(self, port: int, app, uvicorn_server, tulip: FakeTulip) -> None:
        self.port = port
        self.pipeline = app.state.pipeline
        self.server = uvicorn_server
        self.tulip = tulip

    @contextlib.asynccontextmanager
    async def connection(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def ask(self, raw: bytes) -> tuple[int, dict[str, str], bytes]:
        async with self.connection() as (reader, writer):
            writer.write(raw)
            return await answer(reader)


@contextlib.asynccontextmanager
async def served(minilm, **settings):
    tulip = FakeTulip(tokenizer_hash=tokenizer_hash(minilm / "tokenizer.json"))
    async with serving(tulip):
        config = GatewayConfig(model=minilm, replicas=(tulip.address,), port=0, **settings)
        app = create_app(config)
        listener = server._bind("127.0.0.1", 0)
        port = listener.getsockname()[1]
        uvicorn_server = server._Server(
            server._settings(app, config), None, app.state.drain, config.drain_delay_seconds
        )
        running = asyncio.create_task(uvicorn_server._serve([listener]))
        try:
            async with asyncio.timeout(30):
                while not uvicorn_server.started or not app.state.pipeline.pool.num_ready:
                    await asyncio.sleep(0.01)
            yield Served(port, app, uvicorn_server, tulip)
        finally:
            tulip.gate.set()
            uvicorn_server.should_exit = True
            async with asyncio.timeout(30):
                await running


def request(body: object, path: str = "/embed", *headers: str) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *headers)
    return "\r\n".join((*lines, f"content-length: {len(content)}", "", "")).encode() + content


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode().strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return int(first.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


def ended(reason: str) -> float:
    return metrics._ended_connections.labels(reason)._value.get()


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /live HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /live HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 101 + b"\r\n", 431),
        (b"GET /live HTTP/1.1\r\nhost: x\r\n" + b"abcdefgh: b\r\n" * 90 + b"\r\n", 200),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
        (b"GET /live HTTP/1.1\r\nno colon\r\n\r\n", 400),
    ],
    ids=["large", "many", "fine", "long line", "malformed"],
)
async def test_headers_over_a_limit_are_refused(minilm, raw, status):
    async with served(minilm) as gateway:
        got, headers, _ = await gateway.ask(raw)
        assert got == status
        if status != 200:
            assert headers["connection"] == "close"


async def test_a_header_that_never_ends_is_cut_off_at_the_limit(minilm):
    before = ended("headers")
    async with served(minilm, max_header_bytes=10_000) as gateway, gateway.connection() as (_, writer):
        writer.write(b"GET /live HTTP/1.1\r\nx: ")
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 1_000_000:
                writer.write(b"a" * 1000)
                sent += 1000
                await writer.drain()
                await asyncio.sleep(0.005)
        assert sent < 100_000
        assert ended("headers") == before + 1


@pytest.mark.parametrize(
    ("start", "drip", "reason"),
    [
        (b"POST /embed HTTP/1.1\r\n", b"a: b\r\n", "headers"),
        (request(b'{"inputs": "a"')[:-1] + b" ", b"", "body"),
    ],
)
async def test_a_request_that_drips_in_is_ended(minilm, start, drip, reason):
    if reason == "body":
        start = b"POST /embed HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{"
        drip = b" "
    before = ended(reason)
    async with served(minilm, **QUICK) as gateway, gateway.connection() as (reader, writer):
        writer.write(start)
        with contextlib.suppress(OSError):
            async with asyncio.timeout(20):
                while not reader.at_eof() and not reader._buffer:
                    writer.write(drip)
                    await asyncio.sleep(0.05)
        assert (await answer(reader))[0] == 408
        assert await reader.read() == b""
        assert ended(reason) == before + 1
        assert gateway.pipeline.admission.num_requests == 0


async def test_a_connection_that_says_nothing_is_closed_without_a_word(minilm):
    async with served(minilm, **QUICK) as gateway, gateway.connection() as (reader, _):
        async with asyncio.timeout(20):
            assert await reader.read() == b""


async def test_times_count_for_each_request_of_a_connection_anew(minilm):
    async with served(minilm, **QUICK) as gateway, gateway.connection() as (reader, writer):
        for _ in range(4):
            writer.write(request({"inputs": "a"}))
            assert (await answer(reader))[0] == 200
            await asyncio.sleep(0.4)


async def test_a_reader_that_takes_nothing_is_cut_off(minilm):
    before = ended("reader")
    async with served(minilm, **QUICK) as gateway, gateway.connection() as (_, writer):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.transport.pause_reading()
        writer.write(300 * b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(20):
            while ended("reader") == before:
                await asyncio.sleep(0.05)


async def test_too_many_connections_are_refused_and_others_are_served(minilm):
    async with served(minilm, max_connections=3) as gateway, contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(gateway.connection()) for _ in range(5)]
        refused = 0
        for reader, writer in opened:
            with contextlib.suppress(OSError):
                writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
                refused += (await answer(reader))[0] == 503
        assert refused == 2


async def test_nested_json_is_a_clients_mistake(minilm):
    async with served(minilm) as gateway:
        for body in (b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000):
            status, _, content = await gateway.ask(request(body))
            assert status == 400, content


async def test_what_was_accepted_is_finished_and_what_is_new_refused(minilm):
    async with served(minilm) as gateway, contextlib.AsyncExitStack() as stack:
        tulip = gateway.tulip
        tulip.gate.clear()
        working = [await stack.enter_async_context(gateway.connection()) for _ in range(10)]
        idle, late = [await stack.enter_async_context(gateway.connection()) for _ in range(2)]
        for _, writer in (idle, late):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert [(await answer(reader))[0] for reader, _ in (idle, late)] == [200, 200]
        for _, writer in working:
            writer.write(request({"inputs": "a"}))
        for _ in working:
            await tulip.arrived.acquire()
        gateway.server.handle_exit(15, None)
        late[1].write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await answer(late[0]))[0] == 503  # at once
        await asyncio.sleep(0.3)
        idle[1].write(request({"inputs": "a"}))
        status, headers, _ = await answer(idle[0])
        assert (status, headers["connection"], "retry-after" in headers) == (503, "close", True)
        with pytest.raises(OSError, match="onnect"):
            await asyncio.open_connection("127.0.0.1", gateway.port)
        tulip.gate.set()
        assert [(await answer(reader))[0] for reader, _ in working] == [200] * 10
        assert len(tulip.requests) == 10


async def test_during_the_delay_everything_but_health_is_served(minilm):
    async with served(minilm, drain_delay_seconds=1.5) as gateway:
        gateway.server.handle_exit(15, None)
        assert (await gateway.ask(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"))[0] == 503
        status, headers, _ = await gateway.ask(request({"inputs": "a"}))
        assert (status, headers["connection"]) == (200, "close")


async def test_clients_that_hang_up_leave_nothing_behind(minilm):
    async with served(minilm) as gateway:
        gateway.tulip.gate.clear()
        before = len(asyncio.all_tasks())
        for _ in range(10):
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(30):
                    _, writer = await stack.enter_async_context(gateway.connection())
                    writer.write(request({"inputs": "a", "truncate": True}))
                await asyncio.sleep(0.05)
        async with asyncio.timeout(20):
            while gateway.pipeline.admission.num_requests or gateway.server.server_state.tasks:
                await asyncio.sleep(0.02)
        assert gateway.pipeline.pool.outstanding_tokens == 0
        assert gateway.pipeline.admission.tokens == 0
        assert len(asyncio.all_tasks()) <= before + 5
        gateway.tulip.gate.set()
        assert (await gateway.ask(request({"inputs": "a"})))[0] == 200


class Wire(asyncio.Transport):
    """A connection that notes what goes out at a time."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


START = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]}
ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def part(body: bytes, *, more: bool = False) -> dict:
    return {"type": "http.response.body", "body": body, "more_body": more}


@contextlib.asynccontextmanager
async def asked(app, raw: bytes, config: GatewayConfig):
    """The wire on which `app` answers `raw`, and the tasks that do."""
    settings = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, server_header=False)
    settings.load()
    state, wire = ServerState(), Wire()
    protocol = protocol_with(ConnectionLimits.of(config))(settings, state, {})
    protocol.connection_made(wire)
    protocol.data_received(raw)
    yield wire, state.tasks
    await asyncio.gather(*state.tasks)
    protocol.connection_lost(None)


async def test_a_replys_head_goes_out_with_the_first_part_of_its_body(minilm):
    go_on = asyncio.Event()

    async def app(scope, receive, send):
        await send(START)
        await go_on.wait()
        await send(part(b"ab", more=True))
        await send(part(b"cd"))

    async with asked(app, ASK, GatewayConfig(model=minilm, replicas=("a:1",))) as (wire, tasks):
        await asyncio.sleep(0)
        assert wire.sent == []
        go_on.set()
        await asyncio.gather(*tasks)
        assert wire.sent[0].startswith(b"HTTP/1.1 200 OK\r\n")
        assert wire.sent[0].endswith(b"\r\n\r\nab")
        assert wire.sent[1:] == [b"cd"]


async def test_a_large_body_is_written_by_itself_behind_its_head(minilm):
    body = bytes(range(256)) * 1024

    async def app(scope, receive, send):
        await send({**START, "headers": [(b"content-length", b"%d" % len(body))]})
        await send(part(body))

    async with asked(app, ASK, GatewayConfig(model=minilm, replicas=("a:1",))) as (wire, tasks):
        await asyncio.gather(*tasks)
        head, rest = wire.sent
        assert head.endswith(b"\r\n\r\n")
        assert rest == body


async def test_replies_on_one_connection_go_out_one_by_one(minilm):
    async def app(scope, receive, send):
        await send(START)
        await send(part(scope["path"].encode()))

    raw = ASK.replace(b"/ ", b"/one ", 1) + ASK.replace(b"/ ", b"/two ", 1)
    async with asked(app, raw, GatewayConfig(model=minilm, replicas=("a:1",))) as (wire, tasks):
        while tasks:
            await asyncio.gather(*tasks)
        assert [sent[-4:] for sent in wire.sent] == [b"/one", b"/two"]
        assert all(sent.startswith(b"HTTP/1.1 200") for sent in wire.sent)


async def test_a_reply_without_a_body_has_its_head(minilm):
    async def app(scope, receive, send):
        await send(START)
        await send(part(b"abcd"))

    raw = ASK.replace(b"GET", b"HEAD")
    async with asked(app, raw, GatewayConfig(model=minilm, replicas=("a:1",))) as (wire, tasks):
        await asyncio.gather(*tasks)
        (head,) = wire.sent
        assert head.endswith(b"content-length: 4\r\n\r\n")


async def test_the_word_to_go_on_does_not_wait_for_the_reply(minilm):
    async def app(scope, receive, send):
        await receive()
        await send(START)
        await send(part(b"abcd"))

    raw = b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 0\r\n\r\n"
    async with asked(app, raw, GatewayConfig(model=minilm, replicas=("a:1",))) as (wire, tasks):
        await asyncio.gather(*tasks)
        assert wire.sent[0] == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert wire.sent[1].endswith(b"\r\n\r\nabcd")


async def test_a_reply_that_breaks_off_ends_with_what_it_had(minilm):
    async def app(scope, receive, send):
        await send(START)
        raise ValueError("a bug")

    async with asked(app, ASK, GatewayConfig(model=minilm, replicas=("a:1",))) as (wire, tasks):
        await asyncio.gather(*tasks)
        assert [sent[:15] for sent in wire.sent] == [b"HTTP/1.1 200 OK"]
        assert wire.closed
