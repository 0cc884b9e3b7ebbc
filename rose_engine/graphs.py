"""Whole-model CUDA graphs, captured lazily: an eager run first, a capture on second sight, then replays.

Says what a layout is padded to and keeps the graphs within a byte budget. Knows nothing of CUDA: a
`Recorder` captures, so that a test can do it on the CPU. Knows nothing of results or of the host's rows.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from rose_engine.batch import PackedLayout
from rose_engine.staging import DeviceBatch, PaddedShape, StagedBatch
from rose_engine.step_counters import StepCounters

log = logging.getLogger(__name__)

Forward = Callable[[DeviceBatch], Tensor]  # rows [B, D] of a padded batch
Run = Callable[[StagedBatch], Tensor]

FINE_TOKENS, COARSE_TOKENS, FINE_UP_TO = 64, 256, 1024


@dataclass(frozen=True, slots=True)
class Buckets:
    """Rounds a layout up to the shape it is padded to.

    Up to `graph_tokens`, where every shape may cost a graph: tokens to multiples of 64, from 1024 on of 256;
    sequences to 1, 2, 3, 4, 6, 8, 12, 16, 24 ...; the maximum length to 128, 512, 2048 ... Above, where a
    shape costs nothing: tokens and the maximum length to multiples of 64.
    """

    graph_tokens: int  # the inflection point: captured up to here; 0 captures nothing

    def shape(self, layout: PackedLayout) -> PaddedShape:
        """The padded shape. Where there are spare tokens there is a spare sequence that holds them.

        Otherwise no attention kernel would write their rows, and old memory would be read as keys and
        values of the last sequence's tile: masked, but zero times NaN is NaN.
        """
        padded = _for_graphs if self.captures(layout) else _for_eager_runs
        return padded(layout.num_sequences, layout.num_tokens, layout.max_length)

    def captures(self, layout: PackedLayout) -> bool:
        """Whether a graph pays for this layout."""
        return layout.num_tokens <= self.graph_tokens


@lru_cache(4096)  # asked for twice a step, and for much the same layouts again and again
def _for_graphs(num_sequences: int, num_tokens: int, max_length: int) -> PaddedShape:
    step = FINE_TOKENS if num_tokens <= FINE_UP_TO else COARSE_TOKENS
    padded = round_up(num_tokens, step)
    sequences = sequence_bucket(num_sequences + (padded != num_tokens))
    longest = max(length_bucket(max_length), step)  # the spare sequence is shorter than a step
    return PaddedShape(sequences, padded, min(longest, padded))


def _for_eager_runs(num_sequences: int, num_tokens: int, max_length: int) -> PaddedShape:
    padded = round_up(num_tokens, FINE_TOKENS)
    sequences = num_sequences + (padded != num_tokens)
    return PaddedShape(sequences, padded, min(round_up(max_length, FINE_TOKENS), padded))


def padded_room(max_tokens: int, max_sequences: int) -> tuple[int, int]:
    """The most (tokens, sequences) that `Buckets` makes of a batch within these bounds."""
    return round_up(max_tokens, COARSE_TOKENS), sequence_bucket(max_sequences + 1)


def round_up(value: int, multiple: int) -> int:
    """The next multiple that is not smaller."""
    return -(-value // multiple) * multiple


def sequence_bucket(sequences: int) -> int:
    """Powers of two and the values half way between them."""
    power = 1 << (sequences - 1).bit_length()
    return round_up(sequences, max(1, power // 4))


def length_bucket(length: int) -> int:
    """128 times a power of four: attention grids follow it, and their empty blocks cost little."""
    bucket = 128
    while bucket < length:
        bucket *= 4
    return bucket


class CapturedGraph(Protocol):
    """A recorded forward pass over fixed memory."""

    @property
    def rows_BD(self) -> Tensor:
        """Where every replay leaves its rows."""
        ...

    @property
    def num_bytes(self) -> int:
        """Device memory that capturing it took, growth of the common pool included."""
        ...

    def replay(self) -> None:
        """Queue the whole pass with one launch."""
        ...


class Recorder(Protocol):
    """Makes graphs."""

    def capture(self, run: Callable[[], Tensor]) -> CapturedGraph:
        """Record what `run` queues, without executing it. Raises what `run` raises, or a `RuntimeError`."""
        ...


@dataclass(slots=True)
class GraphCache:
    """One graph per padded shape, least recently used dropped first. Not thread-safe.

    Graphs share one memory pool: they run one after another on one stream, and the rows of each are
    copied to the host before the next begins.
    """

    buckets: Buckets
    recorder: Recorder
    forward: Forward
    budget_bytes: int
    counters: StepCounters = field(default_factory=StepCounters)
    _graphs: OrderedDict[PaddedShape, CapturedGraph] = field(default_factory=OrderedDict)
    _warm: set[PaddedShape] = field(default_factory=set)
    _refused: set[PaddedShape] = field(default_factory=set)

    def find(self, staged: StagedBatch) -> Run | None:
        """What runs this step with one launch: a replay, of a graph captured just now if need be.

        `None` on first sight, above the inflection point, where capturing failed, and for other rows than one
        from each sequence: run it eagerly.
        """
        if staged.rows is not None:
            return None
        graph = self._graphs.get(staged.shape) or self._capture_on_second_sight(staged)
        if graph is None:
            return None
        self._graphs.move_to_end(staged.shape)
        self.counters.replayed += 1
        return lambda _: _replayed(graph)

    def ran_eagerly(self, staged: StagedBatch) -> None:
        """Say that an eager run went well: the kernels of its shape are compiled, the next may be captured.

        Not so those that pool one row from each sequence, where it made other rows.
        """
        if staged.rows is None:
            self._warm.add(staged.shape)
        self.counters.eager += 1

    def would_block(self, shape: PaddedShape) -> bool:
        """Whether the next step of `shape` takes milliseconds of CPU: it would launch eagerly or capture."""
        return shape not in self._graphs

    def may_compile(self, layout: PackedLayout) -> bool:
        """Whether the next step of such sequences is its shape's first, or captures it."""
        shape = self.buckets.shape(layout)
        if shape in self._graphs:
            return False
        return shape not in self._warm or (shape not in self._refused and self.buckets.captures(layout))

    def drop_all(self) -> None:
        """Let go of every graph and its memory; their shapes are captured again when they return."""
        self.counters.evicted += len(self._graphs)
        self._graphs.clear()
        self.counters.num_bytes = 0

    def _capture_on_second_sight(self, staged: StagedBatch) -> CapturedGraph | None:
        shape = staged.shape
        if shape in self._refused or not self.buckets.captures(staged.layout):
            return None
        if shape not in self._warm:
            return None
        graph = self._capture(staged)
        if graph is None or not self._keep(shape, graph):
            self._refused.add(shape)
            self.counters.refused += 1
            return None
        return graph

    def _capture(self, staged: StagedBatch) -> CapturedGraph | None:
        try:
            with torch.inference_mode():
                graph = self.recorder.capture(lambda: self.forward(staged.inputs))
        except torch.OutOfMemoryError:
            log.warning("no memory to capture %s: dropping %d graphs", staged.shape, len(self._graphs))
            self.drop_all()
            return None
        except RuntimeError as error:
            log.warning("capturing %s failed, it stays eager: %s", staged.shape, error)
            return None
        self.counters.captured += 1
        return graph

    def _keep(self, shape: PaddedShape, graph: CapturedGraph) -> bool:
        """Make room within the budget; false if the graph alone does not fit."""
        if graph.num_bytes > self.budget_bytes:
            log.warning("%s needs %d bytes, more than the budget for all graphs", shape, graph.num_bytes)
            return False
        self._graphs[shape] = graph
        self.counters.num_bytes += graph.num_bytes
        while self.counters.num_bytes > self.budget_bytes:
            _, oldest = self._graphs.popitem(last=False)
            self.counters.num_bytes -= oldest.num_bytes
            self.counters.evicted += 1
        return True


def _replayed(graph: CapturedGraph) -> Tensor:
    graph.replay()
    return graph.rows_BD
