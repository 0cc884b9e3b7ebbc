"""A real Prometheus over a running deployment: scrape, ask, and read the verdict on the alert rules."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.exercise.containers import ExerciseError
from deploy.grafana.panels import WINDOW

FOLDER = Path(__file__).parent.parent / "prometheus"
RULES = FOLDER / "alerts.yaml"
SCRAPE_SECONDS = 1
RATE_WINDOW = "15s"
_START_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Line:
    """One series of an answer: its labels, and `(seconds since the epoch, value)` where finite."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Prometheus:
    """One that runs, by its base URL."""

    base: str

    def series(self, query: str, start: float, end: float) -> list[Line]:
        """`query` from `start` to `end`, one point a second; series without a finite value are left out.

        Raises `ExerciseError` for a query that cannot be evaluated.
        """
        asked = {
            "query": query.replace(WINDOW, RATE_WINDOW),
            "start": start,
            "end": end,
            "step": SCRAPE_SECONDS,
        }
        found = self._get("query_range", asked)["result"]
        lines = (Line(entry["metric"], _finite(entry["values"])) for entry in found)
        return [line for line in lines if line.points]

    def broken_rules(self) -> list[str]:
        """Alert rules whose expression failed, by name."""
        groups = self._get("rules", {})["groups"]
        return [rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "err"]

    def _get(self, path: str, asked: Mapping[str, object]) -> dict[str, Any]:
        url = f"{self.base}/api/v1/{path}?{urllib.parse.urlencode(asked)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                data: dict[str, Any] = json.load(reply)["data"]
                return data
        except urllib.error.HTTPError as error:
            reason = json.load(error).get("error", error.reason)
            raise ExerciseError(f"Prometheus refuses {dict(asked)}: {reason}") from None


@contextmanager
def running(
    binary: str, folder: Path, port: int, targets: Mapping[str, Sequence[str]]
) -> Iterator[Prometheus]:
    """Scrape `targets`, addresses by job, while the block lasts."""
    folder.mkdir(exist_ok=True)
    config = folder / "prometheus.json"  # JSON is YAML
    config.write_text(json.dumps(_config(targets)))
    address = f"127.0.0.1:{port}"
    command = [
        binary,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        _until_ready(f"http://{address}/-/ready")
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder / "data", ignore_errors=True)


def check_rules(promtool: str) -> None:
    """Every alert fires on what it is for and stays silent beside it. Raises `ExerciseError` otherwise."""
    outcome = subprocess.run(
        [promtool, "test", "rules", FOLDER / "alerts_test.yaml"], check=False, capture_output=True, text=True
    )
    if outcome.returncode != 0:
        raise ExerciseError(f"promtool: {outcome.stdout}{outcome.stderr}")


def _config(targets: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
            for job, addresses in targets.items()
        ],
    }


def _until_ready(url: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise ExerciseError(f"Prometheus was not ready after {_START_SECONDS:.0f} s")


def _finite(values: Sequence[tuple[float, str]]) -> tuple[tuple[float, float], ...]:
    numbers = ((seconds, float(value)) for seconds, value in values)
    return tuple((seconds, number) for seconds, number in numbers if math.isfinite(number))
