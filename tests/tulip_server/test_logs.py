"""Log lines: their two formats, whose chunk they are about, and streams that take nothing."""

from __future__ import annotations

import io
import json
import logging
import os
from pathlib import Path

import pytest

from tulip_server.logs import LineWriter, logging_to, origin

log = logging.getLogger("tulip_server.tests")


def lines(log_format: str, level: str = "info") -> list[str]:
    stream = io.StringIO()
    with logging_to(stream, level, log_format):
        log.info("plain %d", 1)
        log.debug("only when asked")
        log.warning("of a chunk", extra=origin("request-1", f"00-{'a' * 32}-{'b' * 16}-01"))
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("with a traceback")
    return stream.getvalue().splitlines()


def test_json_is_one_object_a_line():
    plain, chunk, failure = map(json.loads, lines("json"))
    assert set(plain) == {"time", "level", "logger", "message"}
    assert (plain["level"], plain["logger"], plain["message"]) == ("info", "tulip_server.tests", "plain 1")
    assert (chunk["request_id"], chunk["trace_id"]) == ("request-1", "a" * 32)
    assert failure["exception"].endswith("ValueError: why")


def test_text_names_the_chunk_s_origin_at_the_end_of_the_line():
    plain, chunk, *_ = lines("text")
    assert plain.endswith("INFO tulip_server.tests: plain 1")
    assert chunk.endswith(f"of a chunk request_id=request-1 trace_id={'a' * 32}")


def test_the_level_is_kept():
    assert len(lines("json", "debug")) == 4
    assert len(lines("json", "error")) == 1


@pytest.mark.parametrize("traceparent", ["", "00", "00-short-b-01", "-" * 10, "no trace at all"])
def test_a_traceparent_that_is_none_names_no_trace(traceparent):
    assert origin("", traceparent) == {"request_id": "", "trace_id": ""}


def test_an_id_can_neither_end_a_line_nor_fill_a_disk():
    assert origin("a\nlevel=error b\x1b[0m", "")["request_id"] == "a\\u000alevel=error\\u0020b\\u001b[0m"
    assert len(origin("x" * 10_000, "")["request_id"]) == 128


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_costs_lines_and_nothing_else():
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails
    with logging_to(full, "info", "json"):
        for _ in range(100):
            log.info("lost")
    with pytest.raises(OSError, match="No space"):
        full.close()


def test_a_pipe_that_nobody_reads_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("tulip_server.logs._LAST_LINES_SECONDS", 0.1)
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    handler = LineWriter(stream)
    record = logging.LogRecord("x", logging.INFO, "", 0, "y" * 1000, (), None)
    for _ in range(12_000):  # more than a pipe and the queue hold
        handler.emit(record)
    handler.close()
    assert handler._thread.is_alive()
    os.close(reader)  # its writes fail from now on
    while handler._thread.is_alive():
        handler.close()
    with pytest.raises(BrokenPipeError):
        stream.close()
