"""Whether this repository's client and another one see the same latencies of one running server.

    python -m benchmarks.agreement CLIENT.py --url http://127.0.0.1:8100 --folder FOLDER [--rounds 3]

CLIENT.py is the program behind the stated rows of the tables: `--base URL --kind ours --tables 1 --tok FILE`,
a line of JSON for each cell. The tables' own side is what `--client aiohttp` does. The two take turns, and
change who begins, so that a server that is still warming up favours neither. FOLDER has the server's
tokenizer.json. Writes `results/agreement.json`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks import report
from benchmarks.tables import dialects
from benchmarks.tables.crew import Crew, Target
from benchmarks.tables.workloads import CELLS, Cell

AGREED = 0.05  # how far apart the medians may be, as a share
_REQUESTS = {128: 300, 512: 300, 4096: 100}  # as many as the other client sends, by tokens
_SECONDS = 60.0  # more than these take
_VOCABULARY_SIZE = 151_000
_THEIR_CELL = re.compile(r"T1 embed bs1 L(\d+)$")

Medians = dict[int, float]  # milliseconds, by tokens of the one sequence in a request


def cells() -> list[Cell]:
    """Those of the first table."""
    return [cell for cell in CELLS if cell.table == "T1"]


def ask_theirs(script: Path, url: str, tokenizer_file: Path) -> Medians:
    """One run of the other client."""
    flags = ["--base", url, "--kind", "ours", "--tables", "1", "--tok", str(tokenizer_file)]
    lines = subprocess.check_output([sys.executable, str(script), *flags], text=True).splitlines()
    shown = [item for line in lines if line.startswith("{") for item in json.loads(line).items()]
    return {int(match[1]): figures["p50"] for name, figures in shown if (match := _THEIR_CELL.search(name))}


def ask_ours(crew: Crew, target: Target, seed: int) -> Medians:
    """One run of the tables' client."""
    medians = {}
    for cell in cells():
        run = crew.run(target, cell, _REQUESTS[cell.num_tokens], _SECONDS, seed)
        medians[cell.num_tokens] = statistics.median(run.milliseconds)
    return medians


def take_turns(
    sides: Mapping[str, Callable[[int], Medians]], rounds: int
) -> dict[str, dict[int, list[float]]]:
    """Medians of every round by side and tokens; a first, uncounted turn of each warms the server."""
    taken: dict[str, dict[int, list[float]]] = {name: {} for name in sides}
    for number in range(rounds + 1):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            for tokens, median in sides[name](number).items():
                if number:
                    taken[name].setdefault(tokens, []).append(median)
        print(f"round {number} of {rounds}" if number else "warm", flush=True)
    return taken


def compared(taken: Mapping[str, Mapping[int, list[float]]]) -> list[tuple[int, float, float, float]]:
    """Tokens, both sides' median of medians, and ours over theirs."""
    rows = []
    for tokens in taken["theirs"]:
        theirs, ours = (statistics.median(taken[side][tokens]) for side in ("theirs", "ours"))
        rows.append((tokens, theirs, ours, ours / theirs))
    return rows


def main() -> int:
    """Measure, print, write; 1 where they do not agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("client", type=Path, metavar="CLIENT.py")
    parser.add_argument("--url", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    place, tokenizer_file = urlsplit(args.url), args.folder / "tokenizer.json"
    address = (place.hostname or "127.0.0.1", place.port or 80)
    target = Target(address, "m", dialects.OURS, tokenizer_file, _VOCABULARY_SIZE, "aiohttp")
    with Crew(1) as crew:
        sides: dict[str, Callable[[int], Medians]] = {
            "theirs": lambda _: ask_theirs(args.client, args.url, tokenizer_file),
            "ours": partial(ask_ours, crew, target),
        }
        taken = take_turns(sides, args.rounds)
    rows = compared(taken)
    report.write_json("agreement", {"p50_ms": taken, "ours_over_theirs": {r[0]: r[3] for r in rows}})
    shown = [(f"1 x {tokens}", f"{a:.3f}", f"{b:.3f}", f"{ratio:.3f}") for tokens, a, b, ratio in rows]
    print(report.table(("p50 ms", "theirs", "ours", "ours / theirs"), shown))
    return 0 if all(abs(ratio - 1) <= AGREED for *_, ratio in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
