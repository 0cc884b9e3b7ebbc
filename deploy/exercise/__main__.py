"""The images' RUN and CMD lines, health checks, drain, dashboard and alerts, without containers.

    python -m deploy.exercise [--folder FOLDER] [--picture FILE]

Installs both images' packages below FOLDER, as their Dockerfiles say. Then, in a network namespace that
reaches nothing but itself, starts them as their user, sends requests, has a real Prometheus scrape them, asks
it every query of the dashboard, draws the dashboard, and stops everything in order.
Needs root (to become the images' user), the extras `demo` and `deploy`, `prometheus` and `chromium`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from deploy.exercise import deployment, image, picture, prometheus
from deploy.exercise.containers import ExerciseError, size_mb
from deploy.exercise.deployment import GATEWAY_PORT, METRICS_PORTS, expect
from deploy.exercise.prometheus import Line, Prometheus
from deploy.grafana.panels import ROWS
from ivy_gateway.local import find_model

ROOT = Path(__file__).resolve().parent.parent.parent
MAX_GATEWAY_MB = 300.0
PROMETHEUS_PORT = 19090
TARGETS = {"ivy": [f"127.0.0.1:{GATEWAY_PORT}"], "tulip": [f"127.0.0.1:{port}" for port in METRICS_PORTS]}
# Where there is no GPU: a CPU wheel of torch, and none of the packages that need a card.
ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "gateway": {},
    "tulip": {"TORCH": "torch==2.13.0", "EXTRAS": "server,tracing"},
}

# Panels of what never happens by itself, and that the exercise makes happen.
CAUSED = (
    "Overload: refused requests",
    "Connections that the gateway ended",
    "Errors by kind",
    "Inputs cut to the limit",
    "Servers: refused chunks",
    "Servers: dropped sequences",
    "Taken out and back in",
    "Chunks sent a second time",
)
# Processes of their own too: whatever is left when the exercise ends, ends with it.
_OWN_NETWORK = ("unshare", "--net", "--pid", "--fork", "--kill-child")


def main() -> int:
    """The command line; the exit status."""
    options = _parser().parse_args()
    try:
        if options.isolated:
            _run(options.folder, options.picture)
            return 0
        with tempfile.TemporaryDirectory(prefix="bouquet-", ignore_cleanup_errors=True) as scratch:
            folder = options.folder or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)  # for the images' user
            _build(folder)
            return _isolated(folder, options.picture)
    except (ExerciseError, subprocess.CalledProcessError) as error:
        print(f"deploy.exercise: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.exercise",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--folder", type=Path, help="where to install and keep the images (a temporary folder)"
    )
    parser.add_argument(
        "--picture", type=Path, help="where to draw the dashboard (dashboard.png in the folder)"
    )
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    return parser


def _build(folder: Path) -> None:
    """Both images and the model's folder, with the network there is; the size of the gateway's packages."""
    for tier, arguments in ARGUMENTS.items():
        image.build(ROOT / "deploy" / tier / "Dockerfile", ROOT, folder / tier, arguments)
    shutil.copytree(find_model("demo"), folder / "models" / "demo", dirs_exist_ok=True)
    size = size_mb(folder / "gateway" / "opt" / "bouquet")
    expect(
        size < MAX_GATEWAY_MB, f"the gateway's Python packages are {size:.0f} MB, below {MAX_GATEWAY_MB:.0f}"
    )
    python = folder / "gateway" / "opt" / "bouquet" / "bin" / "python"
    expect(not _imports(python, "torch"), "the gateway has no torch")
    expect(
        _imports(python, "ivy_gateway.compiled_tokenizer._native"), "the gateway has its tokenizer extension"
    )


def _imports(python: Path, module: str) -> bool:
    """Whether the image's Python has a module; with `-I` it does not look into this folder."""
    command = [str(python), "-I", "-c", f"import {module}"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _isolated(folder: Path, drawn: Path | None) -> int:
    """The rest, in a process that has a network of its own: the loopback interface and nothing else."""
    command = [sys.executable, "-m", "deploy.exercise", "--isolated", "--folder", str(folder.resolve())]
    if drawn is not None:
        command += ["--picture", str(drawn.resolve())]
    with_loopback = 'ip link set lo up && exec "$@"'
    return subprocess.run([*_OWN_NETWORK, "sh", "-c", with_loopback, "sh", *command], check=False).returncode


def _run(folder: Path, drawn: Path | None) -> None:
    """Start, use, watch, draw, stop."""
    gateway, tulip = (
        image.built(ROOT / "deploy" / tier / "Dockerfile", folder / tier, arguments)
        for tier, arguments in ARGUMENTS.items()
    )
    binary = _program("prometheus")
    prometheus.check_rules(str(Path(binary).with_name("promtool")))
    print("ok: every alert fires on what it is for", flush=True)
    scraping = prometheus.running(binary, folder / "prometheus", PROMETHEUS_PORT, TARGETS)
    with scraping as watcher, deployment.started(gateway, tulip, folder / "models" / "demo", folder) as stack:
        begin = time.time()
        deployment.use(stack)
        answers = _ask_everything(watcher, begin, time.time())
        page, target = folder / "dashboard.html", drawn or folder / "dashboard.png"
        picture.draw(answers, page, target, _program("chromium"))
        expect(target.exists(), f"the dashboard is drawn from the answers: {target}")
        deployment.stop(stack)
        deployment.wait_for(
            "an alert's expression to see that both servers are gone", lambda: _down(watcher) == 2
        )
        print("ok: an alert's expression sees servers that are gone", flush=True)


def _down(watcher: Prometheus) -> int:
    """Servers for which ServerDown would fire."""
    return len(watcher.series('up{job="tulip"} == 0', time.time() - 1, time.time()))


def _ask_everything(watcher: Prometheus, start: float, end: float) -> dict[tuple[str, str], list[Line]]:
    """Each query of the dashboard over the whole time. Raises `ExerciseError` for one without data."""
    answers = {
        (panel.title, legend): watcher.series(query, start, end)
        for row in ROWS
        for panel in row.panels
        for legend, query in panel.queries.items()
    }
    empty = sorted(f"{title} ({legend})" for (title, legend), lines in answers.items() if not lines)
    expect(not empty, f"each of {len(answers)} queries of the dashboard has data; without: {empty or 'none'}")
    idle = sorted(title for title in CAUSED if not _moved(answers, title))
    expect(not idle, f"what the exercise causes is seen on {len(CAUSED)} panels; not on: {idle or 'none'}")
    broken = watcher.broken_rules()
    expect(not broken, f"every alert rule can be evaluated; broken: {broken or 'none'}")
    return answers


def _moved(answers: Mapping[tuple[str, str], list[Line]], title: str) -> bool:
    """Whether some line of a panel was ever above 0."""
    lines = [line for (panel, _), found in answers.items() if panel == title for line in found]
    return any(value > 0 for line in lines for _, value in line.points)


def _program(name: str) -> str:
    """Its path: `$PROMETHEUS`, `$CHROMIUM`, or what the search path has. Raises `ExerciseError` for none."""
    found = os.environ.get(name.upper()) or shutil.which(name)
    if found is None:
        raise ExerciseError(
            f"{name} is not installed (apt-get install {name}), and ${name.upper()} names none"
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
