"""Padding, lazy capture, the byte budget, and the runner's answers to memory and device failures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.random_qwen3 import QWEN3_0_6B, random_qwen3
from rose_engine.attention.sdpa import SdpaBackend
from rose_engine.batch import Batch, PackedLayout
from rose_engine.errors import DeviceLost, OutOfDeviceMemory, StepError
from rose_engine.graphs import Buckets, padded_room, sequence_bucket
from rose_engine.runner import AsyncRunner, RunnerOptions, device_lost, halves
from tests.rose_engine.fake_device import FakeDevice, FakeRecorder, TinyEncoder, batch_of, sequences

OPTIONS = RunnerOptions(max_batch_tokens=4096, max_batch_sequences=64, graph_tokens=2048)


class Harness:
    def __init__(self, options: RunnerOptions = OPTIONS, num_bytes: int = 100, manual: bool = False) -> None:
        self.model = TinyEncoder()
        self.device = FakeDevice(manual=manual)
        self.recorder = FakeRecorder(num_bytes)
        self.fail: list[Exception] = []
        self.runner = AsyncRunner(self.forward, self.device, self.recorder, options)

    def forward(self, inputs):
        if self.fail:
            raise self.fail.pop(0)
        return self.model(inputs)

    def rows(self, *lengths: int, seed: int = 0) -> np.ndarray:
        return self.runner.step(batch_of(*lengths, seed=seed)).result()

    def check(self, *lengths: int, seed: int = 0, segments: bool = False) -> None:
        items = sequences(lengths, seed, segments)
        rows = self.runner.step(Batch.pack(items)).result()
        assert rows.shape[0] == len(items)
        expected = np.stack([self.model.alone(item) for item in items])
        np.testing.assert_allclose(rows, expected, atol=1e-4)


@pytest.fixture
def harness():
    harness = Harness()
    yield harness
    harness.runner.close()


def layout(*lengths: int) -> PackedLayout:
    return PackedLayout.of(np.array(lengths, np.int32))


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ((1,), (2, 64, 64)),
        ((63,), (2, 64, 64)),
        ((64,), (1, 64, 64)),
        ((65,), (2, 128, 128)),
        ((512,), (1, 512, 512)),
        ((300,), (2, 320, 320)),
        ((1024,), (1, 1024, 1024)),
        ((1025,), (2, 1280, 1280)),
        ((32,) * 16, (16, 512, 128)),
        ((32,) * 9, (12, 320, 128)),
        ((500, 500), (3, 1024, 512)),
        ((513, 3), (3, 576, 576)),
        ((100,) * 11, (12, 1280, 256)),
        ((512,) * 4, (4, 2048, 512)),
        ((3, 2560), (3, 2624, 2560)),  # above graph_tokens
        ((512,) * 5, (5, 2560, 512)),  # above graph_tokens: as it is
        ((500,) * 5, (6, 2560, 512)),  # spare tokens, hence a spare sequence
    ],
)
def test_shapes(lengths, shape):
    padded = Buckets(2048).shape(layout(*lengths))
    assert (padded.num_sequences, padded.num_tokens, padded.max_length) == shape


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.sampled_from([0, 700, 2048, 100_000]))
def test_a_shape_has_room_for_its_layout(lengths, graph_tokens):
    packed = layout(*lengths)
    shape = Buckets(graph_tokens).shape(packed)
    spare_tokens = shape.num_tokens - packed.num_tokens
    assert spare_tokens >= 0
    assert shape.num_sequences >= packed.num_sequences + (spare_tokens > 0)
    assert packed.max_length <= shape.max_length <= shape.num_tokens
    assert spare_tokens <= shape.max_length, "the spare sequence must not be longer than the bound"
    tokens, count = padded_room(packed.num_tokens, packed.num_sequences)
    assert shape.num_tokens <= tokens
    assert shape.num_sequences <= count


def test_sequence_buckets():
    buckets = sorted({sequence_bucket(count) for count in range(1, 65)})
    assert buckets == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert all(sequence_bucket(count) >= count for count in range(1, 2000))


def test_first_sight_is_eager_second_captures_then_replays(harness):
    counters = harness.runner.counters
    harness.check(5, 6, seed=1)
    assert (counters.eager, counters.captured, counters.replayed) == (1, 0, 0)
    harness.check(7, 8, seed=2)
    assert (counters.eager, counters.captured, counters.replayed) == (1, 1, 1)
    harness.check(30, 1, seed=3)
    assert (counters.eager, counters.captured, counters.replayed) == (1, 1, 2)


def test_would_block_until_there_is_a_graph(harness):
    batch = batch_of(5, 6)
    blocked = []
    for _ in range(3):
        blocked.append(harness.runner.would_block(batch))
        harness.runner.step(batch).result()
    assert blocked == [True, True, False]
    assert harness.runner.would_block(batch_of(3000))


def test_what_was_run_eagerly_and_is_not_captured_compiles_no_more(harness):
    compiles = []
    for batch in (batch_of(5, 6), batch_of(3000)):
        for _ in range(3):
            compiles.append(harness.runner.may_compile(batch))
            harness.runner.step(batch).result()
    assert compiles == [True, True, False, True, False, False]


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 1279, 1280, 1281])
def test_padding_reaches_no_real_token_at_a_bucket_edge(harness, tokens):
    for seed in range(3):  # eager, captured, replayed
        harness.check(tokens, seed=seed, segments=True)
    if tokens > 2:
        for seed in range(3):
            harness.check(1, tokens - 2, 1, seed=seed)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=20), st.integers(0, 1000))
def test_graph_and_eager_agree_with_each_sequence_alone(lengths, seed):
    harness = Harness()
    for step in range(3):
        harness.check(*lengths, seed=seed + step)
    harness.runner.close()


def test_large_batches_stay_eager(harness):
    for _ in range(3):
        harness.rows(*(512,) * 5)
    assert harness.runner.counters.captured == 0
    assert harness.runner.counters.eager == 3


def test_graph_tokens_zero_switches_graphs_off():
    harness = Harness(RunnerOptions(512, 8, graph_tokens=0))
    for seed in range(3):
        harness.check(3, 4, seed=seed)
    assert harness.runner.counters.captured == 0
    harness.runner.close()


def test_the_least_recently_used_graph_goes_first():
    harness = Harness(RunnerOptions(512, 8, 512, graph_budget_bytes=250))
    for tokens in (64, 128, 64, 128, 64, 192, 192):  # 64 is used after 128
        harness.check(tokens)
    counters = harness.runner.counters
    assert (counters.captured, counters.evicted, counters.num_bytes) == (3, 1, 200)
    assert harness.runner.would_block(batch_of(128))
    assert not harness.runner.would_block(batch_of(64))
    harness.check(128)  # captured again at once: it was seen before
    assert counters.captured == 4
    harness.runner.close()


def test_a_graph_above_the_whole_budget_is_not_kept():
    harness = Harness(RunnerOptions(512, 8, 512, graph_budget_bytes=50))
    for seed in range(4):
        harness.check(20, seed=seed)
    counters = harness.runner.counters
    assert (counters.captured, counters.refused, counters.eager, counters.num_bytes) == (1, 1, 4, 0)
    harness.runner.close()


def test_a_failed_capture_costs_no_batch(harness):
    harness.recorder.error = RuntimeError("operation not permitted when stream is capturing")
    for seed in range(3):
        harness.check(20, seed=seed)
    assert harness.runner.counters.refused == 1


def test_two_steps_in_flight_and_results_in_any_order():
    harness = Harness(manual=True)
    batches = [batch_of(5, 9, seed=1), batch_of(6, 8, seed=2)]
    first, second = (harness.runner.step(batch) for batch in batches)
    assert not first.ready()
    assert not second.ready()
    for event in harness.device.events:
        event.gate.set()
    late, early = second.result(), first.result()
    for rows, seed, lengths in ((early, 1, (5, 9)), (late, 2, (6, 8))):
        expected = np.stack([harness.model.alone(item) for item in sequences(lengths, seed)])
        np.testing.assert_allclose(rows, expected, atol=1e-4)
    harness.runner.close()


def test_without_memory_graphs_are_dropped_and_the_batch_tried_again(harness):
    for seed in range(2):
        harness.check(20, seed=seed)
    harness.fail = [torch.OutOfMemoryError("CUDA out of memory")]
    harness.check(100, 3)
    assert harness.runner.counters.evicted == 1
    assert harness.device.released == 1


def test_without_memory_for_the_whole_batch_it_runs_by_halves(harness):
    memory = torch.OutOfMemoryError("CUDA out of memory")
    harness.fail = [memory, memory]
    harness.check(5, 6, 7)
    assert harness.runner.counters.eager == 2


def test_a_sequence_that_does_not_fit_alone_fails_its_batch_only(harness):
    harness.fail = [torch.OutOfMemoryError("CUDA out of memory")] * 4
    with pytest.raises(OutOfDeviceMemory, match="5 tokens"):
        harness.rows(5, 6)
    harness.fail = []
    harness.check(5, 6)


def test_no_memory_to_capture_is_not_an_error(harness):
    harness.check(20)
    harness.recorder.error = torch.OutOfMemoryError("CUDA out of memory")
    for seed in range(2):
        harness.check(20, seed=seed)
    assert harness.runner.counters.refused == 1


def test_a_sticky_fault_loses_the_device_for_good(harness):
    harness.fail = [RuntimeError("CUDA error: device-side assert triggered")]
    with pytest.raises(DeviceLost, match="device-side assert"):
        harness.rows(5)
    with pytest.raises(DeviceLost):
        harness.rows(5)


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 differ"), AssertionError("mat1 is no matrix")])
def test_any_other_failure_concerns_its_batch_alone(harness, error, caplog):
    harness.fail = [error]
    lazy = harness.runner.step(batch_of(5))
    assert lazy.ready()
    with pytest.raises(StepError, match="the step failed: mat1"):
        lazy.result()
    assert "mat1" in caplog.text
    harness.check(5)


@pytest.mark.parametrize("lengths", [(5,), (64,), (3, 60, 1), (1,) * 11, (130, 2)])
def test_a_decoder_is_right_eager_captured_and_replayed(lengths):
    config = {
        **QWEN3_0_6B,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": 97,
    }
    config |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
    }
    qwen3 = random_qwen3(torch.device("cpu"), torch.float32, config)
    attend = SdpaBackend()
    runner = AsyncRunner(
        lambda inputs: qwen3.model(inputs, attend.bind(inputs.layout)), FakeDevice(), FakeRecorder(), OPTIONS
    )
    for seed in range(3):
        items = sequences(lengths, seed)
        expected = qwen3.reference.rows([torch.from_numpy(item.token_ids) for item in items])
        rows = runner.step(Batch.pack(items)).result()
        np.testing.assert_allclose(rows, expected.numpy(), atol=1e-5)
    assert runner.counters.replayed == 2
    runner.close()


def test_which_faults_are_sticky():
    assert device_lost(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    assert device_lost(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")) is None
    assert device_lost(RuntimeError("CUDA error: invalid configuration argument")) is None


def test_halves_are_batches_of_their_own():
    items = sequences((3, 1, 4, 1, 5), segments=True)
    parts = halves(Batch.pack(items))
    for part, expected in zip(parts, (Batch.pack(items[:2]), Batch.pack(items[2:])), strict=True):
        np.testing.assert_array_equal(part.token_ids_T, expected.token_ids_T)
        np.testing.assert_array_equal(part.position_ids_T, expected.position_ids_T)
        np.testing.assert_array_equal(part.segment_ids_T, expected.segment_ids_T)
        np.testing.assert_array_equal(part.layout.cu_lengths, expected.layout.cu_lengths)
        assert part.layout.max_length == expected.layout.max_length


def test_rows_that_are_not_finite_stay_with_their_sequence(harness):
    harness.model.tokens[50] = float("nan")
    items = sequences((9, 9, 9), seed=4)
    for item in items:
        item.token_ids[item.token_ids == 50] = 51
    items[1].token_ids[3] = 50
    rows = harness.runner.step(Batch.pack(items)).result()
    assert np.isfinite(rows).all(axis=1).tolist() == [True, False, True]
