"""The dashboard drawn from Prometheus' answers: an HTML page of SVG charts, and its picture.

Stands in for Grafana where there is none: the same rows, panels, queries and units, another hand.
"""

from __future__ import annotations

import html
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from deploy.exercise.containers import ExerciseError
from deploy.exercise.prometheus import Line
from deploy.grafana.panels import ROWS, Panel

Answers = Mapping[tuple[str, str], list[Line]]  # by the panel's title and the query's legend

_COLUMN, _GAP = 66, 12  # pixels a twenty-fourth of the width, pixels between panels
_CHART_HEIGHT, _STAT_HEIGHT, _ROW_HEIGHT = 172, 84, 36
_PAGE_WIDTH = 24 * _COLUMN + 2 * _GAP
_COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#96d98d")
_STYLE = f"""
body {{ margin: 0; padding: {_GAP}px; background: #111217; color: #ccccdc;
       font: 13px 'DejaVu Sans', sans-serif; }}
h2 {{ margin: 0; height: {_ROW_HEIGHT}px; line-height: {_ROW_HEIGHT}px; font-size: 15px; }}
.row {{ display: flex; flex-wrap: wrap; }}
.panel {{ box-sizing: border-box; padding: 8px; overflow: hidden; background: #181b1f;
          border: {_GAP // 2}px solid #111217; }}
.title {{ font-weight: bold; font-size: 12px; }}
.number {{ font-size: 28px; color: #73bf69; text-align: center; padding-top: 8px; }}
.legend {{ font-size: 10px; white-space: nowrap; overflow: hidden; }}
"""


def draw(answers: Answers, page: Path, picture: Path, chromium: str) -> None:
    """Write the page, and have Chromium take the picture. Raises `ExerciseError` when none appears."""
    page.write_text(html_page(answers), encoding="utf-8")
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--hide-scrollbars",
        "--disable-gpu",
        f"--user-data-dir={page.parent / 'chromium'}",
        f"--window-size={_PAGE_WIDTH},{_page_height()}",
        f"--screenshot={picture}",
        page.as_uri(),
    ]
    outcome = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    if outcome.returncode != 0 or not picture.exists():
        raise ExerciseError(f"Chromium took no picture: {outcome.stderr[-400:]}")


def html_page(answers: Answers) -> str:
    """Every row and panel, with the answers to its queries."""
    rows = "".join(
        f"<h2>{row.title}</h2><div class=row>{''.join(_panel(panel, answers) for panel in row.panels)}</div>"
        for row in ROWS
    )
    return f"<!doctype html><meta charset=utf-8><style>{_STYLE}</style>{rows}"


def _page_height() -> int:
    height = 2 * _GAP
    for row in ROWS:
        lines = -(-sum(panel.width for panel in row.panels) // 24)
        height += _ROW_HEIGHT + lines * _height(row.panels[0])
    return height


def _height(panel: Panel) -> int:
    return _STAT_HEIGHT if panel.kind == "stat" else _CHART_HEIGHT


def _panel(panel: Panel, answers: Answers) -> str:
    lines = [
        (legend_of(legend, line.labels), line)
        for legend in panel.queries
        for line in answers[panel.title, legend]
    ]
    inside = _number(panel, lines) if panel.kind == "stat" else _chart(panel, lines)
    size = f"width:{panel.width * _COLUMN}px;height:{_height(panel)}px"
    return f"<div class=panel style='{size}'><div class=title>{html.escape(panel.title)}</div>{inside}</div>"


def legend_of(legend: str, labels: Mapping[str, str]) -> str:
    """The legend with labels filled in, as Grafana does."""
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), legend)


def _number(panel: Panel, lines: list[tuple[str, Line]]) -> str:
    value = lines[0][1].points[-1][1] if lines else float("nan")
    return f"<div class=number>{shown(value, panel.unit)}</div>"


def _chart(panel: Panel, lines: list[tuple[str, Line]]) -> str:
    frame = _Frame.around([line for _, line in lines], panel.width * _COLUMN - 40)
    grid = "".join(frame.rule(share, panel.unit) for share in (0.0, 0.5, 1.0))
    drawn = "".join(frame.curve(line, _colour(i)) for i, (_, line) in enumerate(lines))
    names = " &nbsp; ".join(
        f"<span style='color:{_colour(i)}'>&#9644;</span> {html.escape(name or 'all')}"
        for i, (name, _) in enumerate(lines)
    )
    svg = f"<svg width={frame.width} height={_Frame.HEIGHT}>{grid}{drawn}</svg>"
    return f"{svg}<div class=legend>{names}</div>"


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where points of a chart lie: seconds to the right, values upwards from 0 to `top`."""

    HEIGHT: ClassVar[int] = 112
    LEFT: ClassVar[int] = 62  # room for the numbers
    FLOOR: ClassVar[int] = 98
    CEILING: ClassVar[int] = 8

    width: int
    first: float
    span: float
    top: float

    @classmethod
    def around(cls, lines: list[Line], width: int) -> _Frame:
        times = [seconds for line in lines for seconds, _ in line.points] or [0.0]
        top = max((value for line in lines for _, value in line.points), default=0.0)
        return cls(width, min(times), max(max(times) - min(times), 1.0), top or 1.0)

    def y(self, share: float) -> float:
        return self.FLOOR - share * (self.FLOOR - self.CEILING)

    def curve(self, line: Line, colour: str) -> str:
        points = " ".join(
            f"{self.LEFT + (seconds - self.first) / self.span * (self.width - self.LEFT):.1f},"
            f"{self.y(value / self.top):.1f}"
            for seconds, value in line.points
        )
        return f"<polyline fill=none stroke-width=1.5 stroke='{colour}' points='{points}'/>"

    def rule(self, share: float, unit: str) -> str:
        y = self.y(share)
        line = f"<line x1={self.LEFT} x2={self.width} y1={y:.1f} y2={y:.1f} stroke='#2c3235'/>"
        number = f"<text x={self.LEFT - 4} y={y + 3:.1f} fill='#8e8e9b' font-size=9 text-anchor=end>"
        return f"{line}{number}{shown(share * self.top, unit)}</text>"


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def shown(value: float, unit: str) -> str:
    """A value as a person reads it, in one of Grafana's units."""
    if value != value:
        return "no data"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 or not value else f"{1e3 * value:.3g} ms"
    if unit == "bytes":
        return f"{value / 2**20:.3g} MiB" if value >= 2**20 else f"{value:.0f} B"
    scaled = f"{value / 1e3:.3g} k" if value >= 1e3 else f"{value:.3g}"
    return scaled + {"reqps": " req/s", "ops": " /s"}.get(unit, "")
