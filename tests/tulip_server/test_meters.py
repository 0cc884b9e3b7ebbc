"""What the server's own meters export is what the library's would."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from tulip_server.meters import DistributionFamily, TallyFamily

BOUNDS = (0.5, 1.0, 4.0)


def exposition(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_a_distribution_reads_as_the_library_s_histogram():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = DistributionFamily("seconds", "Taken", BOUNDS, ours, "lane", values=("a", "b"))
    wanted = Histogram("seconds", "Taken", ["lane"], buckets=BOUNDS, registry=theirs)
    values = [0.0, 0.5, 0.50001, 1.0, 4.0, 4.1, *(random.Random(1).uniform(0, 8) for _ in range(100))]
    for lane in ("a", "b"):
        wanted.labels(lane)
        for value in values if lane == "a" else values[:3]:
            mine.of[lane].observe(value)
            wanted.labels(lane).observe(value)
    assert exposition(ours) == exposition(theirs)


def test_a_tally_reads_as_the_library_s_counter():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = TallyFamily("chunks", "Seen", ours, "outcome", values=("ok",))
    wanted = Counter("chunks", "Seen", ["outcome"], registry=theirs)
    wanted.labels("ok")
    for outcome, amount in (("failed", 3), ("ok", 1), ("failed", 2)):
        mine.of[outcome].add(amount)
        wanted.labels(outcome).inc(amount)
    assert exposition(ours) == exposition(theirs)


def test_without_a_label_there_is_one_series():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    TallyFamily("batches", "Sent", ours).of[""].add(2)
    Counter("batches", "Sent", registry=theirs).inc(2)
    assert exposition(ours) == exposition(theirs)
