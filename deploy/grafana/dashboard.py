"""`dashboard.json` for Grafana, from `panels.py`.

python -m deploy.grafana.dashboard           # write it
python -m deploy.grafana.dashboard --check   # status 1 when the file says something else
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.grafana.panels import ROWS, Panel

FILE = Path(__file__).parent / "dashboard.json"
SCHEMA_VERSION = 39  # of dashboards, as Grafana 11 and 12 read them
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_GRID_WIDTH = 24
_HEIGHTS = {"stat": 4, "timeseries": 8}


def dashboard() -> dict[str, Any]:
    """The whole dashboard."""
    return {
        "uid": "bouquet",
        "title": "Bouquet",
        "tags": ["bouquet"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Data", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [{"id": number, **panel} for number, panel in enumerate(_panels(), start=1)],
    }


def _panels() -> Iterator[dict[str, Any]]:
    """Rows and panels from left to right, top to bottom."""
    top = 0
    for row in ROWS:
        yield {
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": _place(0, top, _GRID_WIDTH, 1),
        }
        left, top = 0, top + 1
        for panel in row.panels:
            height = _HEIGHTS[panel.kind]
            if left + panel.width > _GRID_WIDTH:
                left, top = 0, top + height
            yield _panel(panel) | {"gridPos": _place(left, top, panel.width, height)}
            left += panel.width
        top += height


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + i),
            "expr": query,
            "legendFormat": legend or "__auto",
            "datasource": _DATASOURCE,
            "instant": panel.kind == "stat",
        }
        for i, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.note,
        "datasource": _DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": _OPTIONS[panel.kind],
    }


_OPTIONS: dict[str, dict[str, Any]] = {
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "none", "colorMode": "value"},
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write Grafana's dashboard.")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when it is stale")
    text = json.dumps(dashboard(), indent=1) + "\n"
    if not parser.parse_args().check:
        FILE.write_text(text, encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != text:
        sys.exit(f"{FILE.name} is stale: run python -m deploy.grafana.dashboard")


if __name__ == "__main__":
    main()
