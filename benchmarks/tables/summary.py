"""What was measured as JSON, a Markdown table for each table, and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import report
from benchmarks.tables import stated
from benchmarks.tables.measure import Figures, Outcome, ServerResult
from benchmarks.tables.workloads import TITLES, Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Details = dict[str, Any]
_ECHO = "echo"
_WIDTH, _HEIGHT = 7, 4.5  # inches of one plot


def write(
    results: Sequence[ServerResult], details: Details, folder: Path, name: str, *, peers: bool
) -> list[Path]:
    """`name` as .json, .md and .png in `folder`; `peers`: with the rows that were stated."""
    content = {
        **details,
        "servers": [
            {
                "name": result.name,
                "packages": result.packages,
                "starts": result.starts,
                "failure": result.failure,
                "cells": [outcome.as_json() for outcome in result.outcomes],
            }
            for result in results
        ],
    }
    written = [
        report.write_json(name, content, folder),
        report.write_markdown(name, markdown(results, details, peers=peers), folder),
    ]
    if any(outcome.figures for result in results for outcome in result.outcomes):
        written.append(_plot(results, folder / f"{name}.png", peers=peers))
    return written


def markdown(results: Sequence[ServerResult], details: Details, *, peers: bool) -> str:
    """Every table, what was not reported and why, starts and memory."""
    cells = list(dict.fromkeys(outcome.cell for result in results for outcome in result.outcomes))
    facts = ", ".join(f"{name}: {value}" for name, value in details.items() if name != "trace")
    parts = ["# Tables over HTTP on loopback", facts]
    for table in dict.fromkeys(cell.table for cell in cells):
        mine = [cell for cell in cells if cell.table == table]
        parts += [f"## {table}: {TITLES[table]}", _table(results, mine, peers=peers)]
    parts += _overheads(results)
    if rows := [row for result in results for row in _starts(result)]:
        header = ("server", "folder", "seconds to healthy", "host MiB", "card MiB", "packages")
        parts += ["## Starts and memory", report.table(header, rows)]
    parts += [f"Stated rows: {stated.SOURCE}."] * peers
    return "\n\n".join([*parts, *_missing(results)]) + "\n"


def _table(results: Sequence[ServerResult], cells: Sequence[Cell], *, peers: bool) -> str:
    header = ("cell, server", "p50 ms", "p90", "p99", "max", "requests/s", "inputs/s", "agreement")
    rows: list[tuple[str, ...]] = []
    for cell in cells:
        found = [
            (result.name, outcome)
            for result in results
            for outcome in result.outcomes
            if outcome.cell == cell
        ]
        rows += [_row(f"{cell.name}, {name}", outcome) for name, outcome in found if outcome.figures]
        rows += _stated_rows(cell) if peers else []
    return report.table(header, rows)


def _row(name: str, outcome: Outcome) -> tuple[str, ...]:
    figures = outcome.figures
    assert figures is not None
    times = (f"{value:.2f}" for value in (figures.p50, figures.p90, figures.p99, figures.max))
    rates = (f"{value:.1f}" for value in (figures.requests_per_second, figures.inputs_per_second))
    agreement = "" if outcome.agreement is None else f"{outcome.agreement:.5f}"
    return (name, *times, *rates, agreement)


def _stated_rows(cell: Cell) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for peer in stated.LATENCIES:
        p50, p99 = stated.LATENCIES[peer].get(cell.name, (None, None))
        rate = stated.RATES[peer].get(cell.name)
        if p50 is None and rate is None:
            continue
        requests = "" if rate is None or cell.num_inputs > 1 else f"{rate:.0f}"
        inputs = "" if rate is None else f"{rate:.0f}"
        shown = ("" if p50 is None else f"{p50:.1f}", "", "" if p99 is None else f"{p99:.1f}", "")
        rows.append((f"{cell.name}, {peer} (stated)", *shown, requests, inputs, ""))
    return rows


def _overheads(results: Sequence[ServerResult]) -> list[str]:
    """Medians against the echo's of the same run: what all hops cost in units of one bare HTTP server."""
    echo = {o.cell: o.figures for r in results if r.name == _ECHO for o in r.outcomes if o.figures}
    rows = [
        (f"{outcome.cell.name}, {result.name}", f"{ratio:.2f}")
        for result in results
        for outcome in result.outcomes
        if result.name != _ECHO and (ratio := _ratio(outcome.figures, echo.get(outcome.cell))) is not None
    ]
    return (
        ["## Times the echo server's median", report.table(("cell, server", "ratio"), rows)] if rows else []
    )


def _ratio(figures: Figures | None, echo: Figures | None) -> float | None:
    return None if figures is None or echo is None else figures.p50 / echo.p50


def _starts(result: ServerResult) -> list[tuple[str, ...]]:
    return [
        (
            result.name,
            start["task"],
            *("" if start[key] is None else f"{start[key]:.{digits}f}" for key, digits in _START_COLUMNS),
            result.packages,
        )
        for start in result.starts
    ]


_START_COLUMNS = (("seconds", 1), ("host_mib", 0), ("card_mib", 0))


def _missing(results: Sequence[ServerResult]) -> list[str]:
    lines = [f"* {result.name}: {_line(result.failure)}" for result in results if result.failure]
    lines += [
        f"* {result.name}, {outcome.cell.name}: {_line(outcome.reason)}"
        for result in results
        for outcome in result.outcomes
        if outcome.figures is None
    ]
    return ["## Not reported", "\n".join(lines)] if lines else []


def _line(text: str) -> str:
    return " ".join(text.split())[:200]


def _plot(results: Sequence[ServerResult], file: Path, *, peers: bool) -> Path:
    """Latencies as bars of p50 with whiskers to p99, and throughput against tokens under the card's floor."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(3 * _WIDTH, 2 * _HEIGHT))
    for axis, table in zip(axes.flat, TITLES, strict=False):
        axis.set_title(f"{table}: {TITLES[table]}", fontsize=9)
        (_draw_rates if table == "T3" else _draw_latencies)(axis, results, table, peers)
    axes.flat[-1].axis("off")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file


def _measured(results: Sequence[ServerResult], table: str) -> dict[str, dict[Cell, Figures]]:
    return {
        result.name: {o.cell: o.figures for o in result.outcomes if o.cell.table == table and o.figures}
        for result in results
    }


def _draw_latencies(axis: Axes, results: Sequence[ServerResult], table: str, peers: bool) -> None:
    measured = _measured(results, table)
    cells = list(dict.fromkeys(cell for of_server in measured.values() for cell in of_server))
    bars: dict[str, list[tuple[int, float, float]]] = {
        name: [(cells.index(c), f.p50, f.p99 - f.p50) for c, f in of_server.items()]
        for name, of_server in measured.items()
    }
    for peer, figures in (stated.LATENCIES if peers else {}).items():
        known = [(i, *figures[cell.name]) for i, cell in enumerate(cells) if cell.name in figures]
        bars[f"{peer} (stated)"] = [(i, p50, 0 if p99 is None else p99 - p50) for i, p50, p99 in known]
    bars = {name: of_server for name, of_server in bars.items() if of_server}
    width = 0.8 / max(1, len(bars))
    for number, (name, of_server) in enumerate(bars.items()):
        places = [i + number * width for i, _, _ in of_server]
        heights = [p50 for _, p50, _ in of_server]
        whiskers = [[0.0] * len(of_server), [above for _, _, above in of_server]]
        axis.bar(places, heights, width, yerr=whiskers, capsize=2, label=name)
    axis.set_xticks(range(len(cells)), [cell.name.removeprefix(f"{table} ") for cell in cells], fontsize=7)
    axis.set_ylabel("ms a request: p50, whisker to p99")
    if bars:
        axis.legend(fontsize=7)


def _draw_rates(axis: Axes, results: Sequence[ServerResult], table: str, peers: bool) -> None:
    measured = _measured(results, table)
    for name, of_server in measured.items():
        points = sorted((cell.num_tokens, figures.inputs_per_second) for cell, figures in of_server.items())
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
    cells = sorted(
        {cell for of_server in measured.values() for cell in of_server}, key=lambda c: c.num_tokens
    )
    for peer, rates in (stated.RATES if peers else {}).items():
        known = [(cell.num_tokens, rates[cell.name]) for cell in cells if cell.name in rates]
        if known:
            axis.plot(*zip(*known, strict=True), marker="x", linestyle="--", label=f"{peer} (stated)")
    if peers and cells:
        axis.plot(*_floor(cells), color="black", linestyle=":", label="the card's floor")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("tokens of a sequence")
    axis.set_ylabel("embeddings a second")
    if cells:
        axis.legend(fontsize=7)


def _floor(cells: Sequence[Cell]) -> tuple[list[int], list[float]]:
    """Embeddings a second that arithmetic allows the 0.6B shape on an H200."""
    from benchmarks.random_qwen3 import Floor

    lengths = [cell.num_tokens for cell in cells]
    return lengths, [100 / Floor().seconds([length] * 100) for length in lengths]
