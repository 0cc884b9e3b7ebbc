"""Where one request's microseconds go: stamps of gateway and server between a client's send and its receive.

Requests come one by one, so that every stamp between the two is of that request. Where a request is several
chunks, each place counts when its last chunk passed it.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks import report
from benchmarks.http_client import encode_request
from benchmarks.report import percentile
from benchmarks.tables.closed_loop import Timings, drive
from benchmarks.tables.crew import Target
from benchmarks.tables.workloads import Cell, InputMaker

# Each place, and what happens on the way to it from the one before.
_WAY = (
    ("client.sent", ""),
    ("gateway.request", "send; HTTP parsed by the gateway"),
    ("gateway.body", "route found, body complete"),
    ("gateway.parsed", "JSON parsed"),
    ("gateway.job", "fields read, ids to int32"),
    ("gateway.tokenized", "tokenized, or ids checked"),
    ("gateway.sent", "chunked, leased, packed"),
    ("tulip.chunk", "wire to the server"),
    ("tulip.dispatched", "unpacked, queued, taken by the runner"),
    ("tulip.launched", "packed, staged, launched"),
    ("tulip.rows", "device computes and copies"),
    ("tulip.collected", "runner woken"),
    ("tulip.replied", "rows checked and packed"),
    ("gateway.reply", "wire to the gateway"),
    ("gateway.gathered", "request woken, lease given back"),
    ("gateway.encoded", "rows checked, cut, encoded"),
    ("client.received", "HTTP written; received"),
)
CELLS = (
    Cell("T1", 1, 128),
    Cell("T1", 1, 512),
    Cell("T1", 1, 4096),
    Cell("T2", 5, 512, score=True),
    Cell("T2", 25, 512, score=True),
    Cell("T2", 50, 512, score=True),
    Cell("T3", 100, 512),
    Cell("T4", 1, 512, text=True),
    Cell("T5", 1, 24, text=True),
)
_WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Sent:
    """The requests of one cell, one by one."""

    cell: Cell
    timings: Timings


def send(target: Target, cell: Cell, count: int, seconds: float) -> Sent:
    """Send up to `count` requests after a warm-up."""
    maker = InputMaker(target.tokenizer_file, target.vocabulary_size, cell.seed)
    given = maker.requests(cell, count + _WARM_UP)
    bodies = [target.dialect.body(cell, target.model, inputs) for inputs in given]
    requests = [encode_request("POST", target.dialect.path(cell), body) for body in bodies]
    drive(target.address, requests[:_WARM_UP], 1)
    return Sent(cell, drive(target.address, requests[_WARM_UP:], 1, seconds))


def table(sent: Sequence[Sent], folder: Path) -> str:
    """Median microseconds of each phase by cell, their sum, and the median of the whole."""
    stamps = _read(folder)
    columns = [_medians(one, stamps) for one in sent]
    labels = [label for _, label in _WAY[1:]]
    rows = [(label, *(f"{column[i]:.0f}" for column in columns)) for i, label in enumerate(labels)]
    rows.append(("sum of medians", *(f"{sum(column):.0f}" for column in columns)))
    rows.append(("median of the whole", *(f"{1000 * _median(one):.0f}" for one in sent)))
    return report.table(("microseconds", *(one.cell.name for one in sent)), rows)


def _median(sent: Sent) -> float:
    return percentile(sent.timings.milliseconds, 0.5)


def _read(folder: Path) -> dict[str, list[int]]:
    """Times of every place, over all processes, in order."""
    stamps: dict[str, list[int]] = {place: [] for place, _ in _WAY}
    for file in folder.glob("*.json"):
        for place, time in json.loads(file.read_text()):
            stamps[place].append(time)
    return {place: sorted(times) for place, times in stamps.items()}


def _medians(sent: Sent, stamps: dict[str, list[int]]) -> list[float]:
    requests = zip(sent.timings.sent, sent.timings.received, strict=True)
    phases = [durations for request in requests if (durations := _durations(*request, stamps)) is not None]
    if not phases:
        raise ValueError(f"{sent.cell.name}: no request passed every place: were the stamps switched on?")
    return [percentile(column, 0.5) for column in zip(*phases, strict=True)]


def _durations(start: int, end: int, stamps: dict[str, list[int]]) -> list[float] | None:
    """Microseconds between neighbouring places of one request; `None` if it missed one."""
    times = [start]
    for place, _ in _WAY[1:-1]:
        last = bisect.bisect_right(stamps[place], end) - 1
        if last < 0 or stamps[place][last] < start:
            return None
        times.append(stamps[place][last])
    return [(later - earlier) / 1000 for earlier, later in pairwise([*times, end])]
