"""The raw HTTP client: what it takes for a whole reply, however the bytes come."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from benchmarks.http_client import Client, NoAnswer, ReplyReader, encode_request

FIXED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Name: a: b\r\n\r\nab\r\nc"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"7\r\n0\r\n\r\nab\r\n2;note\r\ncd\r\n0\r\n\r\n"  # the first chunk ends like a last one
)
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
EARLY = b"HTTP/1.1 100 Continue\r\n\r\n" + FIXED


@pytest.mark.parametrize(
    ("sent", "status", "body"),
    [(FIXED, 200, b"ab\r\nc"), (CHUNKED, 200, b"0\r\n\r\nabcd"), (EMPTY, 204, b""), (EARLY, 200, b"ab\r\nc")],
    ids=["length", "chunks", "nothing", "continue"],
)
@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_a_reply_is_whole_with_its_last_byte_and_not_before(sent, status, body, piece):
    reader = ReplyReader()
    pieces = [sent[i : i + piece] for i in range(0, len(sent), piece)]
    assert not any(reader.feed(one) for one in pieces[:-1])
    assert reader.feed(pieces[-1])
    reply = reader.take()
    assert (reply.status, reply.body) == (status, body)


def test_what_comes_behind_a_reply_is_the_next_one():
    reader = ReplyReader()
    assert reader.feed(FIXED + CHUNKED + EMPTY[:10])
    assert reader.take().headers["x-name"] == "a: b"
    assert reader.feed(b"")
    assert reader.take().body == b"0\r\n\r\nabcd"
    assert not reader.feed(b"")
    assert reader.feed(EMPTY[10:])


@pytest.mark.parametrize(
    "sent",
    [
        b"SSH-2.0-server\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nfor ever",
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["not HTTP", "no length", "no number", "no chunk"],
)
def test_what_is_no_reply_is_no_answer(sent):
    with pytest.raises(NoAnswer):
        ReplyReader().feed(sent)


async def served(handle, asking):
    """What `asking` gives, whose client a server of `handle` answers; both have ended after it."""
    connections = []

    async def handled(reader, writer):
        connections.append(asyncio.current_task())
        await handle(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(handled, "127.0.0.1", 0) as server:
        client = Client("127.0.0.1", server.sockets[0].getsockname()[1])
        try:
            return await asking(client)
        finally:
            client.close()
            await asyncio.gather(*connections)


async def test_a_server_that_answers_before_it_has_read_all_is_heard():
    """A body far above what sockets hold, refused at its head."""

    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.2)  # its socket stays full for a while
        writer.transport.abort()

    async def ask(client):
        return await client.ask("POST", "/", b"x" * (32 << 20))

    assert (await served(refuse, ask)).status == 413


async def test_a_large_request_and_its_reply_arrive_whole():
    async def echo(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body = await reader.readexactly(length)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length + body)
        await writer.drain()

    async def ask(client):
        return await client.ask("POST", "/", bytes(range(256)) * (16 << 10))

    assert (await served(echo, ask)).body == bytes(range(256)) * (16 << 10)


async def test_connections_are_kept_until_the_server_ends_them():
    ports = []

    async def answer(reader, writer):
        ports.append(writer.get_extra_info("peername")[1])
        for last in (b"", b"connection: close\r\n"):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n" + last + b"content-length: 0\r\n\r\n")
        await writer.drain()

    async def ask(client):
        return [(await client.ask("GET", "/")).status for _ in range(4)]

    assert await served(answer, ask) == [200] * 4
    assert len(set(ports)) == len(ports) == 2


async def test_one_who_leaves_closes_the_connection():
    gone = asyncio.Event()

    async def wait(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.read() == b""
        gone.set()

    async def leave(client):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.ask("GET", "/")
        await asyncio.wait_for(gone.wait(), 5)

    await served(wait, leave)


async def test_nobody_there():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(NoAnswer, match="cannot connect"):
            await Client(*closed.getsockname()).ask("GET", "/")


def test_a_request_is_one_message():
    request = encode_request("POST", "/embed", b"{}", {"x-request-id": "7"})
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"POST /embed HTTP/1.1"
    assert {b"content-length: 2", b"x-request-id: 7"} <= set(head.split(b"\r\n"))
    assert body == b"{}"
