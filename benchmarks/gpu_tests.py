"""The tests that need a card, suite by suite, condensed into one file of counts.

    python -m benchmarks.gpu_tests [--suite NAME ...] [--out FOLDER] [--workers 4]

Every suite is a pytest of its own, without the settings of pyproject.toml: those name plugins that a machine
with a card need not have. `gpu-tests.json` in FOLDER (else results/) is written anew after each suite; suites
that were not run keep what it said of them. JUnit files and output go to `gpu-tests` in FOLDER (else build/).
Exits with 1 when a test failed, with 2 when there is no card.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import RESULTS

ROOT = Path(__file__).resolve().parent.parent
SUITES = {
    "kernels": ("tests/rose_engine/kernels/test_compiled.py",),
    "attention": ("tests/gpu/test_attention.py",),
    "families": (
        "tests/gpu/test_families.py",
        "tests/gpu/test_scoring.py",
        "tests/gpu/test_rows_of_parts.py",
    ),
    "runner": ("tests/gpu/test_runner.py",),
    "fused": ("tests/gpu/test_fused.py",),
}
ONE_AT_A_TIME = {"fused"}  # its limits of time are those of a card that does nothing else
_SUMMARY = "gpu-tests.json"
_PROGRESS_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of a suite."""

    tests: int
    failures: int
    errors: int
    skipped: int
    seconds: float
    measured: dict[str, dict[str, float]] = field(default_factory=dict)  # by test, where one records figures

    @classmethod
    def of_junit(cls, file: Path) -> Counts:
        """Sums over the file's suites. Raises `OSError` and `ElementTree.ParseError` for what is none."""
        suites = list(ElementTree.parse(file).getroot().iter("testsuite"))
        names = ("tests", "failures", "errors", "skipped")
        sums = (sum(int(suite.get(name, "0")) for suite in suites) for name in names)
        seconds = round(sum(float(suite.get("time", "0")) for suite in suites), 1)
        cases = [case for suite in suites for case in suite.iter("testcase")]
        recorded = {case.get("name", ""): figures_of(case) for case in cases}
        return cls(*sums, seconds, {name: figures for name, figures in recorded.items() if figures})

    @property
    def passed(self) -> bool:
        """Whether something ran and nothing failed."""
        return self.tests > self.skipped and not self.failures and not self.errors

    def __str__(self) -> str:
        return (
            f"{self.tests} tests, {self.failures} failures, {self.errors} errors, {self.skipped} skipped,"
            f" {self.seconds:.0f} s"
        )


def figures_of(case: ElementTree.Element) -> dict[str, float]:
    """What a test recorded with pytest's `record_property`."""
    return {each.get("name", ""): float(each.get("value", "nan")) for each in case.iter("property")}


def command(suite: str, junit: Path, workers: int) -> list[str]:
    """The pytest of a suite."""
    parallel = () if suite in ONE_AT_A_TIME or workers < 2 or not _has_xdist() else ("-n", str(workers))
    options = ("-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider", "-q", "-W", "ignore")
    chosen = ("-m", "gpu", f"--junitxml={junit}", *parallel, *SUITES[suite])
    return [sys.executable, "-m", "pytest", *options, *chosen]


def run_suite(suite: str, folder: Path, workers: int) -> Counts:
    """Run it, say every few seconds how far it is, and read what it wrote; no JUnit file is one error."""
    junit, log = folder / f"{suite}.xml", folder / f"{suite}.log"
    junit.unlink(missing_ok=True)
    begin = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        child = subprocess.Popen(
            command(suite, junit, workers), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
        follow(child, suite, log, begin)
    try:
        return Counts.of_junit(junit)
    except (OSError, ElementTree.ParseError):
        return Counts(0, 0, 1, 0, round(time.monotonic() - begin, 1))


def follow(child: subprocess.Popen[bytes], suite: str, log: Path, begin: float) -> None:
    """Wait for `child`, printing the last line of its output from time to time."""
    try:
        while True:
            try:
                child.wait(_PROGRESS_SECONDS)
                return
            except subprocess.TimeoutExpired:
                print(f"{suite}: {time.monotonic() - begin:.0f} s, {last_line(log)}", flush=True)
    finally:
        child.kill()


def last_line(log: Path) -> str:
    """Of what was written so far."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1].strip() if lines else "starting"


def summary(earlier: dict[str, Any], counts: dict[str, Counts]) -> dict[str, Any]:
    """What the file says from now on: `earlier`, with the suites of `counts` replaced."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no card"
    versions = f"torch {torch.__version__}, Triton {_version('triton')}"
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    suites = earlier.get("suites", {}) | {
        name: asdict(each) | {"date": today} for name, each in counts.items()
    }
    what = f"tests marked gpu, last run on one {card}, {versions}"
    return earlier | {"what": what, "date": today, "suites": suites}


def read_summary(folder: Path) -> dict[str, Any]:
    """That of `folder`, else the committed one, else nothing."""
    for file in (folder / _SUMMARY, RESULTS / _SUMMARY):
        if file.exists():
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return content
    return {}


def _has_xdist() -> bool:
    return importlib.util.find_spec("xdist") is not None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def main() -> None:
    """Run the suites asked for, print and keep what became of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--suite", action="append", choices=SUITES, help="again for more; all of them if none"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of everything that is written")
    parser.add_argument("--workers", type=int, choices=range(1, 33), metavar="1-32", default=4)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device on this machine: nothing was run", file=sys.stderr)
        sys.exit(2)
    out, logs = (RESULTS, ROOT / "build") if args.out is None else (args.out.resolve(), args.out.resolve())
    passed = run_suites(args.suite or list(SUITES), out, logs / "gpu-tests", args.workers)
    sys.exit(0 if passed else 1)


def run_suites(suites: list[str], out: Path, folder: Path, workers: int) -> bool:
    """Whether all of them passed; the summary goes to `out`, JUnit files and logs to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    counts: dict[str, Counts] = {}
    for suite in suites:
        counts[suite] = run_suite(suite, folder, workers)
        print(f"{suite}: {counts[suite]}", flush=True)
        content = summary(read_summary(out), counts)
        (out / _SUMMARY).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for suite in (name for name, each in counts.items() if not each.passed):
        print(f"{suite} failed; its last lines:\n" + tail(folder / f"{suite}.log"), flush=True)
    return all(each.passed for each in counts.values())


def tail(log: Path, lines: int = 30) -> str:
    """The last lines of a suite's output."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


if __name__ == "__main__":
    main()
