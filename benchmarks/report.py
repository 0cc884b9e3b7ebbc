"""How a measurement is written down: a table for people, JSON for machines, and what it ran on."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("torch", "sentence-transformers", "transformers", "tokenizers", "grpcio", "uvicorn", "triton")


def environment() -> dict[str, Any]:
    """Processor, cores, Python and package versions: what a figure means nothing without."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of `values` do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * share // 1))
    return ordered[int(rank) - 1]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, first column left, the others right."""
    cells = [[str(c) for c in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(_align(c, w, i) for i, (c, w) in enumerate(zip(row, widths, strict=True))) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def write_json(name: str, content: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write `<name>.json` with the environment beside the figures; the path it went to."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"environment": environment(), **content}, indent=1) + "\n", encoding="utf-8")
    return file


def write_markdown(name: str, content: str, folder: Path = RESULTS) -> Path:
    """Write `<name>.md`, for people; the path it went to."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.md"
    file.write_text(content, encoding="utf-8")
    return file


def _align(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
