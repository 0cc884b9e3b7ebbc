"""Seconds from process start until a server answers, and the parts of a start: first start and later ones.

    python -m benchmarks.startup FOLDER [--runs 2] [--device auto] [--cache FOLDER]

"First" means empty cache folders, unless one is given: kernels are compiled and the device is measured. The
other runs find both on disk. Ready is when the server writes its ready file, which is after it listens. The
parts are what the server logs of them (`rose_engine.stages`); what a part contains is set in, and what of it
no inner part explains is its rest.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.child import Child, ended

TIMEOUT_SECONDS = 180.0
BEFORE, AFTER = "Python and imports, before the engine's first part", "after the engine's last part"
_STAGE = re.compile(r"stage (.+): ([\d.]+) s")
_BESIDE = "beside the start: "
_SAME_MOMENT = 0.003  # seconds; times are logged in milliseconds


@dataclass(slots=True)
class Part:
    """A part of a start, and the parts inside it; seconds since the process was started."""

    name: str
    begin: float
    end: float
    parts: list[Part] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Start:
    """One start: when it was ready, what it consisted of, and what went on beside it."""

    ready_seconds: float
    parts: tuple[Part, ...]
    beside: tuple[str, ...]

    def rows(self) -> dict[str, float]:
        """Seconds of each part by its name, set in by two dots a level; a part's rest behind its parts."""
        first = min((part.begin for part in self.parts), default=self.ready_seconds)
        last = max((part.end for part in self.parts), default=self.ready_seconds)
        between = sum(part.seconds for part in self.parts)
        rows = {BEFORE: first}
        _add_rows(rows, self.parts, 0)
        rows["between them"] = max(0.0, last - first - between)
        rows[AFTER] = self.ready_seconds - last
        rows["ready"] = self.ready_seconds
        return rows


def _add_rows(rows: dict[str, float], parts: Iterable[Part], level: int) -> None:
    for part in parts:
        name = ".." * level + part.name
        rows[name] = rows.get(name, 0.0) + part.seconds
        if part.parts:
            _add_rows(rows, part.parts, level + 1)
            rest = ".." * (level + 1) + f"rest of {part.name}"
            rows[rest] = rows.get(rest, 0.0) + part.seconds - sum(inner.seconds for inner in part.parts)


def read_start(lines: Iterable[str], began: float, ready_seconds: float) -> Start:
    """The start that a server's JSON log tells of; `began` is the process's start, seconds of the epoch."""
    entries = list(_entries(lines))
    beside = (text.removeprefix(_BESIDE) for _, text in entries if text.startswith(_BESIDE))
    stages = [(found, at - began) for at, text in entries if (found := _STAGE.fullmatch(text))]
    return Start(ready_seconds, nested((m[1], end - float(m[2]), end) for m, end in stages), tuple(beside))


def nested(stages: Iterable[tuple[str, float, float]]) -> tuple[Part, ...]:
    """Name, begin and end of parts in the order of their ends, each put into the one that contains it."""
    outermost: list[Part] = []
    for name, begin, end in stages:
        inside = [p for p in outermost if p.begin >= begin - _SAME_MOMENT and p.end > begin + _SAME_MOMENT]
        outermost = [part for part in outermost if part not in inside]
        outermost.append(Part(name, begin, end, inside))
    return tuple(outermost)


def _entries(lines: Iterable[str]) -> Iterator[tuple[float, str]]:
    """Time, in seconds of the epoch, and message of each line that is one of the server's log."""
    for line in lines:
        try:
            entry = json.loads(line)
            yield datetime.fromisoformat(entry["time"]).timestamp(), entry["message"]
        except (ValueError, KeyError, TypeError):
            continue


def start_server(folder: Path, device: str, cache: Path) -> Start:
    """Start a server, wait until it is ready, stop it."""
    with tempfile.TemporaryDirectory() as scratch:
        ready, log = Path(scratch) / "ready.json", Path(scratch) / "log"
        command = [sys.executable, "-m", "tulip_server", "--model", str(folder), "--device", device]
        server = Child(
            "server",
            [*command, "--port", "0", "--ready-file", str(ready), "--log-format", "json"],
            log=log,
            environment=_cache_folders(cache),
        )
        with ended(server):
            began = time.time()
            server.start()
            seconds = server.wait_until(ready.exists, TIMEOUT_SECONDS)
        return read_start(log.read_text(errors="replace").splitlines(), began, seconds)


def _cache_folders(cache: Path) -> dict[str, str]:
    folders = {
        "TRITON_CACHE_DIR": cache / "triton",
        "CUDA_CACHE_PATH": cache / "cuda",
        "XDG_CACHE_HOME": cache,
    }
    return {name: str(folder) for name, folder in folders.items()}


def start_table(starts: Mapping[str, Start]) -> str:
    """A row for each part, a column of seconds for each start; blank where a start had no such part."""
    columns = [start.rows() for start in starts.values()]
    names = _in_order([list(column) for column in columns])
    rows = [(name, *(f"{c[name]:.2f}" if name in c else "" for c in columns)) for name in names]
    return report.table(("seconds of", *starts), rows)


def _in_order(columns: Sequence[Sequence[str]]) -> list[str]:
    """Every name once; one that a later column adds stands behind the name that it follows there."""
    names: list[str] = []
    for column in columns:
        for before, name in zip([None, *column], column, strict=False):
            if name not in names:
                names.insert(0 if before is None else names.index(before) + 1, name)
    return names


def bytecode() -> dict[str, bool]:
    """Whether compiled Python is at hand; without it imports take two to three times as long."""
    found = {}
    for package in ("torch", "quack", "rose_engine"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            found[package] = Path(importlib.util.cache_from_source(spec.origin)).exists()
    return found


def as_json(starts: Mapping[str, Start]) -> dict[str, Any]:
    """The figures, for `report.write_json`."""
    ready = [start.ready_seconds for start in starts.values()]
    parts = {name: {"seconds": start.rows(), "beside": start.beside} for name, start in starts.items()}
    return {"first_seconds": ready[0], "later_seconds": ready[1:], "starts": parts, "bytecode": bytecode()}


def main() -> None:
    """Measure, print, write `results/startup.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache", type=Path, help="begin with the caches of this folder, not with none")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    print(f"compiled Python at hand before the first start: {bytecode()}")
    with tempfile.TemporaryDirectory() as empty:
        cache = args.cache or Path(empty)
        names = ["first", *(f"again {number}" for number in range(1, args.runs))]
        starts = {name: start_server(args.folder, args.device, cache) for name in names}
    print(start_table(starts))
    for name, start in starts.items():
        for line in start.beside:
            print(f"{name}, beside the rest: {line}")
    report.write_json("startup", as_json(starts), args.out)


if __name__ == "__main__":
    main()
