"""The parts of a start, from what a server logged of them."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from benchmarks import startup
from benchmarks.startup import AFTER, BEFORE, Part, nested, read_start, start_table
from rose_engine import stages

BEGAN = 1_800_000_000.0


def line(seconds: float, message: str) -> str:
    time = datetime.fromtimestamp(BEGAN + seconds, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": time, "level": "info", "logger": "x", "message": message})


LOG = [
    "a library's own word",
    line(2.5, "stage settings: 0.500 s"),
    line(2.6, "something else: 7 s"),
    line(4.0, "stage import: 0.400 s"),
    line(4.5, "stage path: 1.000 s"),
    line(6.0, "beside the start: 11 GEMMs compiled in 3.5 s"),
    line(6.5, "stage path: 2.000 s"),
    line(7.0, "stage runner: 4.000 s"),
    '{"time": "no time", "message": "stage odd: 1.0 s"}',
    "[1]",
]


def test_the_parts_of_a_start_add_up_to_it():
    start = read_start(LOG, BEGAN, ready_seconds=7.5)
    assert start.beside == ("11 GEMMs compiled in 3.5 s",)
    assert start.rows() == {
        name: pytest.approx(seconds, abs=2e-3)
        for name, seconds in {
            BEFORE: 2.0,
            "settings": 0.5,
            "runner": 4.0,
            "..path": 3.0,
            "....import": 0.4,
            "....rest of path": 0.6,
            "..rest of runner": 1.0,
            "between them": 0.5,
            AFTER: 0.5,
            "ready": 7.5,
        }.items()
    }


def test_a_log_without_stages_is_all_imports():
    assert read_start([], BEGAN, 3.0).rows() == {BEFORE: 3.0, "between them": 0.0, AFTER: 0.0, "ready": 3.0}


def test_a_part_that_ends_as_the_next_begins_is_not_inside_it():
    assert nested([("a", 0.0, 1.0), ("b", 1.0, 2.0), ("c", 2.0, 2.0), ("d", 2.0, 3.0)]) == (
        Part("a", 0.0, 1.0),
        Part("b", 1.0, 2.0),
        Part("c", 2.0, 2.0),
        Part("d", 2.0, 3.0),
    )


def test_the_table_has_a_row_for_what_any_start_had():
    first = read_start(LOG, BEGAN, 7.5)
    later = read_start([line(1.0, "stage settings: 0.100 s"), line(1.5, "stage found: 0.500 s")], BEGAN, 2.0)
    table = start_table({"a": first, "b": later}).splitlines()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table]
    found = {name: cells for name, *cells in rows}
    assert found["settings"] == ["0.50", "0.10"]
    assert found["found"] == ["", "0.50"]
    assert found["runner"] == ["4.00", ""]
    assert rows[-1][0] == "ready"


def test_what_is_parsed_is_what_the_engine_logs(caplog):
    caplog.set_level("INFO")
    with stages.stage("some part"):
        pass
    start = read_start([line(1.0, record.getMessage()) for record in caplog.records], BEGAN, 2.0)
    assert [part.name for part in start.parts] == ["some part"]


def test_a_real_start_is_taken_apart(minilm, tmp_path):
    start = startup.start_server(minilm, "cpu", tmp_path)
    assert [part.name for part in start.parts] == ["settings", "weights", "runner"]
    rows = start.rows()
    assert sum(rows.values()) == pytest.approx(2 * rows["ready"])
    assert min(rows.values()) > -0.01
