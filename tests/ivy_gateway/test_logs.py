"""The log: one line for a thing that happened, whose request it was, and nothing that breaks a request."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest

from ivy_gateway import logs, request_context
from ivy_gateway.request_context import RequestContext


@pytest.fixture
def root():
    """The root logger as it was, after the test."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    logger.handlers.clear()  # pytest's own must not be closed
    yield logger
    logger.handlers[:], logger.level = handlers, level


def test_json_lines_hold_the_request_and_the_fields(root):
    stream = io.StringIO()
    logs.set_up("info", "json", stream)
    token = request_context.enter(RequestContext("id-1"))
    logging.getLogger("x").info("took %d ms", 7, extra={"fields": {"seconds": 0.007}})
    request_context.leave(token)
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("y").exception('a "quoted"\nline')
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "info",
        "logger": "x",
        "message": "took 7 ms",
        "request_id": "id-1",
        "seconds": 0.007,
    }
    assert second["message"] == 'a "quoted"\nline'
    assert "ValueError: why" in second["traceback"]
    assert "request_id" not in second


def test_text_lines_name_the_request_where_there_is_one(root):
    stream = io.StringIO()
    logs.set_up("warning", "text", stream)
    logging.getLogger("x").info("not this")
    logging.getLogger("x").warning("outside")
    token = request_context.enter(RequestContext("id-2"))
    logging.getLogger("x").warning("inside")
    request_context.leave(token)
    lines = stream.getvalue().splitlines()
    assert [line.partition("x: ")[2] for line in lines] == ["outside", "inside request_id=id-2"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_loses_lines_and_nothing_else(root, capfd):
    with pytest.raises(OSError, match="No space"), Path("/dev/full").open("w") as stream:  # noqa: PT012
        logs.set_up("info", "text", stream)
        for _ in range(3):
            logging.getLogger("x").info("lost")
        root.handlers.clear()
        stream.write("closing fails too, but only here")
    assert capfd.readouterr().err == ""


async def test_an_access_line_says_route_and_status_and_no_text(start_gateway, caplog):
    caplog.set_level(logging.INFO)
    async with start_gateway(access_log=True) as gateway:
        await gateway.client.post("/embed", json={"inputs": "my secret"}, headers={"x-request-id": "r-1"})
        await gateway.client.post("/secret-path", json={"inputs": "my secret"})
        await gateway.client.post("/embed", content=b"secret", headers={"content-type": "application/json"})
    lines = [record for record in caplog.records if record.name == "ivy_gateway.requests"]
    seen = [(record.fields["route"], record.fields["status"]) for record in lines]
    assert seen == [("/embed", 200), ("unmatched", 404), ("/embed", 400)]
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("ivy_gateway")]
    assert not [line for line in ours if "secret" in line]


async def test_without_the_flag_a_request_writes_nothing(start_gateway, caplog):
    async with start_gateway() as gateway:
        caplog.set_level(logging.DEBUG, "ivy_gateway")
        caplog.clear()
        await gateway.post("/embed", inputs="a")
    assert not [r for r in caplog.records if r.name == "ivy_gateway.requests"]
