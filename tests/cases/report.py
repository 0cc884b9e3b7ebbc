"""From pytest's XML to a table, a row a case: `python -m tests.cases.report JUNIT.xml REPORT.md`."""

from __future__ import annotations

import os
import platform
import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

TITLES = {
    "request_shape": "A. Request shape",
    "odd_text": "B. Hostile and odd text",
    "length": "C. Length and truncation",
    "tokens": "D. Tokens, templates, model profile",
    "numbers": "E. Numbers",
    "formats": "F. Output formats",
    "scoring": "G. Rerank and score",
    "order": "H. Order, index, usage",
    "load": "I. Load, cancellation, recovery",
    "operations": "J. Health, metrics, security, start-up",
    "compatibility": "K. Client compatibility",
}


@dataclass(frozen=True)
class Outcome:
    """One test: its case, its section, how it ended, its seconds."""

    case: str
    section: str
    name: str
    ended: str
    seconds: float


def read(file: Path) -> list[Outcome]:
    """All tests of cases in a JUnit file."""
    found = []
    for test in ET.parse(file).iter("testcase"):
        name = test.get("name", "")
        if match := re.match(r"test_(bc_\d+)_", name):
            ended = next(
                (kind for kind in ("failure", "error", "skipped") if test.find(kind) is not None), "passed"
            )
            case = match[1].upper().replace("_", "-")
            section = test.get("classname", "").rpartition("test_")[2]
            found.append(Outcome(case, section, name, ended, float(test.get("time", 0))))
    return found


def render(outcomes: Sequence[Outcome]) -> str:
    """The report."""
    whole = os.environ.get("BOUQUET_CASES") == "whole"
    failed = [o for o in outcomes if o.ended in ("failure", "error")]
    cases = defaultdict(list)
    for outcome in outcomes:
        cases[outcome.case].append(outcome)
    lines = [
        "# Cases from public reports, run against real stacks",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {'at full length' if whole else 'shortened'}, on the CPU"
        f" ({os.cpu_count()} cores, Python {platform.python_version()}): {len(cases)} cases,"
        f" {len(outcomes)} tests, {len(failed)} failed."
        " Written by `make cases`; what is not shown is in `tests/cases/NOT_HERE.md`.",
    ]
    for section, title in TITLES.items():
        own = {case: tests for case, tests in sorted(cases.items()) if tests[0].section == section}
        lines += ["", f"## {title}", "", "| case | tests | result | seconds |", "| --- | --- | --- | --- |"]
        lines += [_row(case, tests) for case, tests in own.items()]
    return "\n".join(lines) + "\n"


def _row(case: str, tests: Sequence[Outcome]) -> str:
    bad = [test.name for test in tests if test.ended != "passed"]
    result = "passed" if not bad else f"{tests[0].ended}: {', '.join(bad)}".replace("|", "\\|")
    return f"| {case} | {len(tests)} | {result} | {sum(test.seconds for test in tests):.1f} |"


def main() -> int:
    """Write the report; 1 where a test failed."""
    source, target = map(Path, sys.argv[1:])
    outcomes = read(source)
    target.write_text(render(outcomes))
    return int(any(outcome.ended in ("failure", "error") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
