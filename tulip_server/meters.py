"""Counters and histograms that one thread writes: plain numbers, made into series when somebody scrapes.

The library's own take a lock and two to four microseconds an observation; a chunk needs a handful of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int = 1) -> None:
        """Count `amount` more."""
        self.value += amount


class Distribution:
    """One series of a histogram over `bounds`, each the most that its bucket holds, in rising order."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Take in one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Upper bounds as they are written, and how many values lie at or below each."""
        total = 0
        for bound, number in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += number
            yield floatToGoString(bound), total  # type: ignore[no-untyped-call]

    @property
    def sum(self) -> float:
        """Of all values."""
        return self._sum


class TallyFamily(Collector):
    """A counter, with one label where `label` names it; `values` are there at 0 from the start."""

    def __init__(
        self,
        name: str,
        meaning: str,
        registry: CollectorRegistry,
        label: str = "",
        values: Iterable[str] = ("",),
    ) -> None:
        self._name, self._meaning, self._label = name, meaning, label
        self.of = defaultdict[str, Tally](Tally, {value: Tally() for value in values})
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """One sample a label value."""
        labels = [self._label] if self._label else []
        family = CounterMetricFamily(self._name, self._meaning, labels=labels)
        for value, tally in list(self.of.items()):  # another thread scrapes
            family.add_metric([value] if self._label else [], tally.value)
        yield family


class DistributionFamily(Collector):
    """A histogram, with one label where `label` names it, whose values are known from the start."""

    def __init__(
        self,
        name: str,
        meaning: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        label: str = "",
        values: Iterable[str] = ("",),
    ) -> None:
        self._name, self._meaning, self._label = name, meaning, label
        self.of = {value: Distribution(bounds) for value in values}
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Buckets, sum and count of each label value."""
        labels = [self._label] if self._label else []
        family = HistogramMetricFamily(self._name, self._meaning, labels=labels)
        for value, distribution in self.of.items():
            buckets = list(distribution.buckets())
            family.add_metric([value] if self._label else [], buckets, distribution.sum)
        yield family
