"""One server through its cells: check, warm up, time. What failed says why and has no figures.

Knows neither command lines nor how results are shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.report import percentile
from benchmarks.tables.checks import Checker, Diverged
from benchmarks.tables.closed_loop import RequestFailed
from benchmarks.tables.crew import Crew, Run, Target
from benchmarks.tables.workloads import Cell

_FAILURES = (Diverged, OSError, ValueError, KeyError)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a cell is timed: `seconds`, after a pilot of at least `pilot_requests` for `pilot_seconds`."""

    seconds: float
    pilot_seconds: float
    pilot_requests: int = 8


PACE = Pace(seconds=10.0, pilot_seconds=1.0)
QUICK = Pace(seconds=0.5, pilot_seconds=0.1, pilot_requests=4)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a cell took: milliseconds a request, and how much came through."""

    requests: int
    p50: float
    p90: float
    p99: float
    max: float
    requests_per_second: float
    inputs_per_second: float
    tokens_per_second: float

    @classmethod
    def of(cls, cell: Cell, run: Run) -> Figures:
        """Percentiles by nearest rank."""
        p50, p90, p99 = (percentile(run.milliseconds, share) for share in (0.5, 0.9, 0.99))
        inputs = run.requests_per_second * cell.num_inputs
        return cls(
            requests=len(run.milliseconds),
            p50=p50,
            p90=p90,
            p99=p99,
            max=max(run.milliseconds),
            requests_per_second=run.requests_per_second,
            inputs_per_second=inputs,
            tokens_per_second=inputs * cell.num_tokens,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A cell of one server: figures and the check's least cosine, or why there are none."""

    cell: Cell
    figures: Figures | None = None
    agreement: float | None = None  # least cosine, or correlation of scores; None: nothing to compare with
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """For the results file."""
        return {"name": self.cell.name, **asdict(self)}


@dataclass(slots=True)
class ServerResult:
    """All that was seen of one server so far."""

    name: str
    outcomes: list[Outcome] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)  # task, seconds to healthy, MiB held
    failure: str = ""  # why it was not measured at all
    packages: str = ""  # and their versions

    def cut(self, cells: Sequence[Cell]) -> None:
        """The run ends here: those of `cells` that have no outcome yet get none."""
        reached = {outcome.cell for outcome in self.outcomes}
        self.outcomes.extend(Outcome(cell, reason="cut") for cell in cells if cell not in reached)


def measure(
    crew: Crew, target: Target, cells: Sequence[Cell], checker: Checker | None, pace: Pace, seed: int = 1
) -> Iterator[Outcome]:
    """All `cells` in order; `checker` is `None` for an echo, which answers nothing that could be right."""
    for cell in cells:
        outcome = _measure_cell(crew, target, cell, checker, pace, seed)
        print(f"  {describe(outcome)}", flush=True)
        yield outcome


def _measure_cell(
    crew: Crew, target: Target, cell: Cell, checker: Checker | None, pace: Pace, seed: int
) -> Outcome:
    if refusal := target.dialect.refusal(cell):
        return Outcome(cell, reason=refusal)
    try:
        agreement = None if checker is None else checker.check(target, cell)
        pilot = crew.run(target, cell, _pilot_count(cell, pace), pace.pilot_seconds, 2 * seed)
        # A pilot is slower than what follows it, while graphs are captured: room for four times its rate.
        count = math.ceil(4 * pilot.requests_per_second * pace.seconds) + 2 * cell.concurrency
        run = crew.run(target, cell, min(count, _most_requests(cell, pace)), pace.seconds, 2 * seed + 1)
        if checker is not None and agreement is not None:  # what was timed still answers rightly
            agreement = min(agreement, checker.check(target, cell))
    except RequestFailed as error:
        return Outcome(cell, reason=str(error)[:300])
    except _FAILURES as error:
        return Outcome(cell, reason=f"{type(error).__name__}: {str(error)[:300]}")
    return Outcome(cell, Figures.of(cell, run), agreement)


def _pilot_count(cell: Cell, pace: Pace) -> int:
    return max(pace.pilot_requests, 2 * cell.concurrency) if cell.num_inputs * cell.num_tokens > 4096 else 200


def _most_requests(cell: Cell, pace: Pace) -> int:
    """Far above what any server reaches, to bound the memory of prepared bodies: in tokens a second."""
    most_tokens_per_second = 2_000_000
    return max(16, math.ceil(most_tokens_per_second * pace.seconds / (cell.num_inputs * cell.num_tokens)))


def describe(outcome: Outcome) -> str:
    """One line for who waits."""
    figures = outcome.figures
    if figures is None:
        return f"{outcome.cell.name}: not reported: {outcome.reason}"
    return (
        f"{outcome.cell.name}: p50 {figures.p50:.3f}  p90 {figures.p90:.3f}  p99 {figures.p99:.3f}"
        f"  max {figures.max:.3f} ms  {figures.requests_per_second:.1f} requests/s"
        f"  {figures.inputs_per_second:.1f} inputs/s  n {figures.requests}"
    )
