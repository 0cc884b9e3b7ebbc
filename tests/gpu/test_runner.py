"""Steps on a CUDA device: graphs, padding, overlap, memory; a small Qwen3 with random weights."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch

from benchmarks.random_qwen3 import QWEN3_0_6B, random_qwen3
from rose_engine.attention import choose_backend
from rose_engine.attention.choice import single_attention
from rose_engine.batch import Batch, Sequence
from rose_engine.config import ResolvedConfig
from rose_engine.cuda import CudaDevice, CudaGraphRecorder
from rose_engine.cuda_runner import CudaRunner, bound
from rose_engine.runner import AsyncRunner, RunnerOptions

# Libraries of kernels warn about their own dependencies when they are imported.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

SMALL = {**QWEN3_0_6B, "num_hidden_layers": 3, "vocab_size": 5000, "max_position_embeddings": 4096}
OPTIONS = RunnerOptions(max_batch_tokens=8192, max_batch_sequences=64, graph_tokens=4096)
EDGES = [
    (1,),
    (63,),
    (64,),
    (65,),
    (1,) * 64,
    (1,) * 9,
    (128,),
    (1024,),
    (1025,),
    (1280,),
    (31, 1, 32),
    (500,) * 3,
]


@pytest.fixture(scope="module")
def qwen3():
    return random_qwen3(torch.device("cuda", 0), torch.bfloat16, SMALL)


def settings_for(qwen3, **changes) -> ResolvedConfig:
    device = torch.device("cuda", 0)
    choice = choose_backend("auto", qwen3.model.facts.attention_specs, torch.bfloat16, device)
    plain = ResolvedConfig(device, torch.bfloat16, choice, 8192, 64, 1)
    return dataclasses.replace(plain, **changes)


def make_runner(qwen3, options: RunnerOptions = OPTIONS, wrap=lambda forward: forward) -> AsyncRunner:
    settings = settings_for(qwen3)
    attention = single_attention(settings.attention, qwen3.model.facts.attention_specs)
    forward = wrap(bound(qwen3.model, attention))
    return AsyncRunner(forward, CudaDevice(settings.device), CudaGraphRecorder(settings.device), options)


@pytest.fixture
def runner(qwen3):
    runner = make_runner(qwen3)
    yield runner
    runner.close()


def batch_of(*lengths: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch.pack(Sequence(rng.integers(0, 5000, length, dtype=np.int32)) for length in lengths)


def expected(qwen3, batch: Batch) -> np.ndarray:
    ids = torch.from_numpy(batch.token_ids_T).cuda().split(batch.layout.lengths.tolist())
    return qwen3.reference.rows(ids).cpu().numpy()


def worst_cosine(rows: np.ndarray, others: np.ndarray) -> float:
    return float((rows * others).sum(1).min())


@pytest.mark.parametrize("lengths", EDGES, ids=lambda lengths: f"{len(lengths)}x{lengths[0]}")
def test_eager_captured_and_replayed_rows_are_the_same(runner, qwen3, lengths):
    batch = batch_of(*lengths)
    eager, captured, replayed = (runner.step(batch).result() for _ in range(3))
    assert (runner.counters.eager, runner.counters.captured, runner.counters.replayed) == (1, 1, 2)
    np.testing.assert_array_equal(captured, replayed)
    np.testing.assert_array_equal(eager, replayed)
    assert worst_cosine(replayed, expected(qwen3, batch)) > 0.999


@pytest.mark.parametrize("lengths", EDGES, ids=lambda lengths: f"{len(lengths)}x{lengths[0]}")
def test_a_replay_takes_the_new_ids(runner, qwen3, lengths):
    for seed in range(4):
        batch = batch_of(*lengths, seed=seed)
        assert worst_cosine(runner.step(batch).result(), expected(qwen3, batch)) > 0.999


def test_old_memory_does_not_reach_real_tokens(qwen3):
    """Spare rows of a shape must not depend on what the allocator's blocks held before."""
    batch = batch_of(70, 1, 30)
    runner = make_runner(qwen3)
    clean = runner.step(batch).result()
    runner.close()
    torch.cuda.empty_cache()
    poison = [torch.full((1 << 24,), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(64)]
    torch.cuda.synchronize()
    del poison
    torch.cuda.empty_cache()  # the next allocations of any stream and pool get this memory as it is
    runner = make_runner(qwen3)
    for _ in range(3):
        np.testing.assert_array_equal(runner.step(batch).result(), clean)
    runner.close()


def test_nothing_on_the_hot_path_waits_for_the_device(runner, monkeypatch):
    batch = batch_of(100, 28)
    for _ in range(3):
        runner.step(batch).result()

    def refuse(*args):
        raise AssertionError("a device-wide wait on the hot path")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            runner.step(batch).result()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert runner.counters.replayed >= 50


def test_a_step_returns_before_its_rows_are_there(qwen3):
    def slowly(forward):
        def run(inputs):
            torch.cuda._sleep(200_000_000)  # about 0.1 s of device time, none of the host's
            return forward(inputs)

        return run

    runner = make_runner(qwen3, wrap=slowly)
    batches = [batch_of(20, seed=seed) for seed in range(2)]
    for batch in batches:
        runner.step(batch).result()
    first, second = (runner.step(batch) for batch in batches)
    assert not first.ready()
    assert not second.ready()
    rows = second.result()
    assert first.ready()
    for lazy, batch in ((first, batches[0]), (second, batches[1])):
        np.testing.assert_array_equal(lazy.result(), runner.step(batch).result())
    assert rows.shape == (1, SMALL["hidden_size"])
    runner.close()


def test_callbacks_arrive(runner):
    done = threading.Event()
    lazy = runner.step(batch_of(300, 200))
    lazy.add_done_callback(lambda rows: done.set())
    assert done.wait(30)
    assert lazy.ready()


def test_many_layouts_in_flight_keep_their_rows_apart(runner, qwen3):
    rng = np.random.default_rng(3)
    batches = [batch_of(*rng.integers(1, 150, rng.integers(1, 12)), seed=seed) for seed in range(30)]
    for _ in range(3):
        pending = [(batch, runner.step(batch)) for batch in batches]
        for batch, lazy in pending:
            assert worst_cosine(lazy.result(), expected(qwen3, batch)) > 0.999


def test_a_capture_survives_other_threads_at_events(runner):
    """A watcher asks and awaits events all the time; a capture must not break over it."""
    stop = threading.Event()

    def pester() -> None:
        while not stop.is_set():
            event = torch.cuda.Event()
            event.record()
            event.query()
            event.synchronize()

    thread = threading.Thread(target=pester)
    thread.start()
    try:
        for tokens in range(64, 1024, 64):
            for _ in range(3):
                runner.step(batch_of(tokens)).result()
    finally:
        stop.set()
        thread.join()
    assert runner.counters.captured == 15
    assert runner.counters.refused == 0


def test_a_tiny_budget_evicts_and_stays_right(qwen3):
    runner = make_runner(qwen3)
    runner.step(batch_of(64)).result()
    runner.step(batch_of(64)).result()
    one_graph = max(1, runner.counters.num_bytes)
    runner.close()
    runner = make_runner(qwen3, dataclasses.replace(OPTIONS, graph_budget_bytes=2 * one_graph))
    for round_number in range(3):
        for tokens in (64, 128, 192, 256, 320):
            batch = batch_of(tokens, seed=round_number)
            assert worst_cosine(runner.step(batch).result(), expected(qwen3, batch)) > 0.999
    assert runner.counters.num_bytes <= 2 * one_graph
    runner.close()


def test_all_graphs_can_be_dropped_and_captured_again(qwen3):
    attempts = []

    def fails_once(forward):
        def run(inputs):
            if inputs.layout.num_sequences == 8 and not attempts:
                attempts.append(1)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(inputs)

        return run

    runner = make_runner(qwen3, wrap=fails_once)
    for _ in range(3):
        runner.step(batch_of(64)).result()
    batch = batch_of(*(64,) * 8)
    assert worst_cosine(runner.step(batch).result(), expected(qwen3, batch)) > 0.999
    assert runner.counters.evicted == 1
    for _ in range(2):
        batch = batch_of(64)
        assert worst_cosine(runner.step(batch).result(), expected(qwen3, batch)) > 0.999
    assert runner.counters.captured == 2
    runner.close()


def test_a_calibrated_runner_starts_again_from_its_file(qwen3, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level("INFO")
    found = []
    for _ in range(2):
        runner = CudaRunner(qwen3.model, settings_for(qwen3))
        batch = batch_of(100, 200)
        for _ in range(3):
            assert worst_cosine(runner.step(batch).result(), expected(qwen3, batch)) > 0.999
        found.append((runner.saturation_tokens, runner.graph_tokens))
        runner.close()
    assert found[0] == found[1]
    assert "calibration from" in caplog.text
