"""Which tokens make which rows: spans and rows of tokens, packed, pooled, and through both runners."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose_engine.attention.base import RaggedLayout
from rose_engine.batch import Batch, Sequence
from rose_engine.config import EngineConfig, resolve
from rose_engine.cpu import CpuRunner
from rose_engine.errors import InvalidSequence
from rose_engine.fake import fake_rows
from rose_engine.heads.pooling import pool
from rose_engine.limits import EngineLimits
from rose_engine.module_chain import POOLING_MODES
from rose_engine.runner import AsyncRunner, RunnerOptions, halves
from tests.rose_engine.fake_device import FakeDevice, FakeRecorder
from tests.rose_engine.samples import random_sequences

WIDTH, VOCABULARY = 8, 100
LIMITS = EngineLimits(
    max_length=64, vocabulary_size=VOCABULARY, num_segments=1, max_batch_tokens=512, max_batch_sequences=16
)
TABLE = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1))


def spanned(length: int, *spans: tuple[int, int], seed: int = 0) -> Sequence:
    (plain,) = random_sequences([length], VOCABULARY, seed=seed)
    return Sequence(plain.token_ids, spans=np.array(spans, np.int32))


def per_token(length: int, seed: int = 0) -> Sequence:
    (plain,) = random_sequences([length], VOCABULARY, seed=seed)
    return Sequence(plain.token_ids, per_token=True)


@st.composite
def sequences_with_spans(draw) -> list[Sequence]:
    """Up to six sequences, each with spans of its own or with none."""
    items = []
    for seed in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 20))
        (plain,) = random_sequences([length], VOCABULARY, seed=seed)
        edges = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
        spans = np.array(list(pairwise(edges))[:: draw(st.integers(1, 2))], np.int32)
        items.append(Sequence(plain.token_ids, spans=spans) if len(spans) else plain)
    return items


def hidden(token_ids: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """What the model of these tests makes of tokens: no attention, but every position counts."""
    return TABLE[torch.from_numpy(token_ids).long()] * (1 + torch.from_numpy(positions).float()[:, None] / 7)


def model(batch) -> torch.Tensor:
    hidden_TD = hidden(batch.token_ids_T.numpy(), batch.position_ids_T.numpy())
    return hidden_TD if batch.per_token else pool(("mean",), hidden_TD, batch.layout)


def expected(sequence: Sequence) -> torch.Tensor:
    """The rows of one sequence, by slicing."""
    hidden_TD = hidden(sequence.token_ids, np.arange(sequence.num_tokens))
    if sequence.per_token:
        return hidden_TD
    spans = [[0, sequence.num_tokens]] if sequence.spans is None else sequence.spans.tolist()
    return torch.stack([hidden_TD[start:end].mean(0) for start, end in spans])


def check(rows: np.ndarray, items: list[Sequence]) -> None:
    wanted = torch.cat([expected(item) for item in items])
    torch.testing.assert_close(torch.from_numpy(rows), wanted, atol=1e-5, rtol=1e-5)


# -- layouts


def test_without_spans_there_is_no_row_layout():
    batch = Batch.pack(random_sequences([3, 1, 7]))
    assert batch.rows is None
    assert batch.num_rows == 3


@given(sequences_with_spans())
def test_halves_hold_all_rows_in_order(items):
    batch = Batch.pack([*items, spanned(5, (1, 3), (3, 5))])
    parts = halves(batch)
    assert sum(part.num_rows for part in parts) == batch.num_rows
    np.testing.assert_array_equal(np.concatenate([fake_rows(part, 4) for part in parts]), fake_rows(batch, 4))


@given(sequences_with_spans())
def test_made_up_rows_too_follow_from_their_own_tokens_alone(items):
    together = fake_rows(Batch.pack(items), 4)
    np.testing.assert_array_equal(together, np.concatenate([fake_rows(Batch.pack([i]), 4) for i in items]))


@pytest.mark.parametrize(
    "spans",
    [[], [(0, 0)], [(2, 1)], [(-1, 2)], [(0, 6)], [(0, 3), (2, 4)], [(3, 5), (0, 2)]],
)
def test_spans_that_are_none_are_refused(spans):
    array = np.array(spans, np.int32).reshape(-1, 2)
    with pytest.raises(InvalidSequence, match="span"):
        LIMITS.check(Sequence(np.arange(5, dtype=np.int32), spans=array))


def test_spans_and_rows_of_tokens_exclude_each_other():
    LIMITS.check(spanned(5, (0, 2), (2, 3), (4, 5)))
    sequence = spanned(5, (0, 2))
    with pytest.raises(InvalidSequence, match="not for those of tokens"):
        LIMITS.check(Sequence(sequence.token_ids, spans=sequence.spans, per_token=True))
    with pytest.raises(AssertionError):
        Batch.pack([per_token(3), sequence])


# -- pooling


def layout_of(lengths: list[int], spans: list[tuple[int, int]] | None = None) -> RaggedLayout:
    cu_lengths = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    spans_R2 = None if spans is None else torch.tensor(spans, dtype=torch.int32)
    return RaggedLayout(cu_lengths, max(lengths), len(lengths), tuple(lengths), spans_R2)


@pytest.mark.parametrize("mode", POOLING_MODES)
def test_a_span_over_everything_is_the_sequence(mode):
    hidden_TD = torch.randn(21, WIDTH, generator=torch.Generator().manual_seed(3))
    whole = pool((mode,), hidden_TD, layout_of([5, 12, 4]))
    torch.testing.assert_close(
        pool((mode,), hidden_TD, layout_of([5, 12, 4], [(0, 5), (5, 17), (17, 21)])), whole
    )


@pytest.mark.parametrize("mode", [mode for mode in POOLING_MODES if mode != "weightedmean"])
def test_a_span_is_pooled_as_if_it_were_alone(mode):
    hidden_TD = torch.randn(21, WIDTH, generator=torch.Generator().manual_seed(3))
    spans = [(1, 3), (3, 4), (6, 16), (18, 21)]
    pooled = pool((mode,), hidden_TD, layout_of([5, 12, 4], spans))
    alone = [pool((mode,), hidden_TD[start:end], layout_of([end - start])) for start, end in spans]
    torch.testing.assert_close(pooled, torch.cat(alone), atol=1e-6, rtol=1e-6)


def test_weights_of_a_span_are_places_in_the_sequence():
    hidden_TD = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(3))
    pooled = pool(("weightedmean",), hidden_TD, layout_of([2, 7], [(0, 2), (4, 7)]))
    wanted = (3 * hidden_TD[4] + 4 * hidden_TD[5] + 5 * hidden_TD[6]) / 12
    torch.testing.assert_close(pooled[1], wanted)
    torch.testing.assert_close(pooled[0], (hidden_TD[0] + 2 * hidden_TD[1]) / 3)


@pytest.mark.parametrize("mode", POOLING_MODES)
def test_tokens_outside_every_span_touch_no_row(mode):
    hidden_TD = torch.randn(14, WIDTH, generator=torch.Generator().manual_seed(3))
    spans = [(1, 3), (6, 8)]
    expected_RD = pool((mode,), hidden_TD, layout_of([5, 5], spans))
    outside = [0, 3, 4, 5, 8, 9, 10, 11, 12, 13]  # the last four lie behind every sequence
    hidden_TD[outside] = float("nan")
    assert torch.equal(pool((mode,), hidden_TD, layout_of([5, 5], spans)), expected_RD)


# -- runners


@pytest.fixture
def cpu():
    settings = resolve(EngineConfig(Path("model"), device="cpu", threads=1), 64, ())
    runner = CpuRunner(lambda batch, attend: model(batch), settings)
    yield runner
    runner.close()


class Harness:
    """The asynchronous runner on a device that is none; every shape is within the graphs' reach."""

    def __init__(self) -> None:
        self.recorder = FakeRecorder()
        options = RunnerOptions(max_batch_tokens=512, max_batch_sequences=16, graph_tokens=512)
        self.runner = AsyncRunner(self.forward, FakeDevice(), self.recorder, options)
        self.fail: list[Exception] = []

    def forward(self, inputs):
        if self.fail:
            raise self.fail.pop(0)
        return model(inputs)


@pytest.fixture
def harness():
    harness = Harness()
    yield harness
    harness.runner.close()


MIXED = [
    spanned(9, (0, 4), (5, 9)),
    random_sequences([3], seed=4)[0],
    spanned(20, (2, 3)),
    spanned(1, (0, 1)),
]
TOKENS = [per_token(9), per_token(3, seed=4), per_token(20), per_token(1)]


@pytest.mark.parametrize("items", [MIXED, TOKENS], ids=["spans", "tokens"])
def test_rows_come_back_in_the_batch_order_on_the_cpu(cpu, items):
    check(cpu.step(Batch.pack(items)).result(), items)


@given(items=sequences_with_spans())
def test_any_mix_on_the_cpu(items):
    settings = resolve(EngineConfig(Path("model"), device="cpu", threads=1), 64, ())
    runner = CpuRunner(lambda batch, attend: model(batch), settings)
    try:
        check(runner.step(Batch.pack(items)).result(), items)
    finally:
        runner.close()


@pytest.mark.parametrize("items", [MIXED, TOKENS], ids=["spans", "tokens"])
def test_rows_of_spans_and_tokens_are_never_captured(harness, items):
    runner, batch = harness.runner, Batch.pack(items)
    for _ in range(3):
        assert runner.would_block(batch)
        check(runner.step(batch).result(), items)
    assert (runner.counters.eager, runner.counters.captured) == (3, 0)
    assert not harness.recorder.graphs


@pytest.mark.parametrize("items", [MIXED, TOKENS], ids=["spans", "tokens"])
def test_plain_batches_of_the_same_shape_go_their_own_way(harness, items):
    plain = [Sequence(item.token_ids) for item in items]
    runner = harness.runner
    for step in (items, plain, items, plain, items, plain):
        check(runner.step(Batch.pack(step)).result(), step)
    assert (runner.counters.eager, runner.counters.captured, runner.counters.replayed) == (4, 1, 2)


@pytest.mark.parametrize("items", [MIXED, TOKENS], ids=["spans", "tokens"])
def test_halves_of_a_batch_that_did_not_fit(harness, items):
    harness.fail = [torch.OutOfMemoryError(), torch.OutOfMemoryError()]
    check(harness.runner.step(Batch.pack(items)).result(), items)


def test_rows_that_nobody_collected_outlive_their_slot(harness):
    steps = [(batch, harness.runner.step(Batch.pack(batch))) for batch in [MIXED, TOKENS] * 4]
    for items, rows in steps:
        check(rows.result(), items)
