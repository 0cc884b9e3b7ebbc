"""The engine on the CPU: real weights against sentence-transformers, and a step that never waits."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from rose_engine.batch import Batch, Sequence
from rose_engine.config import EngineConfig, resolve
from rose_engine.cpu import CpuRunner
from rose_engine.engine import Engine
from rose_engine.errors import StepError
from tests.rose_engine.samples import random_batch, random_sequences, sequence

WORDS = (
    "a river that bends north, Zürich 1848; 東京 naïve λx.x — fifty-two half-empty trains? ¡claro! 😀 \t rain"
)


def varied_texts():
    """Forty texts from one word to beyond the model's limit, many of equal length."""
    words = WORDS.split(" ")
    random = np.random.default_rng(0)
    chosen = [1, 1, 2, 3, 5, 8, 8, 8, 13, 21, 34, 55, 89, 144, 250, 400]
    lengths = [*chosen, *random.integers(1, 60, 24)]
    return [" ".join(random.choice(words, length)) for length in lengths]


@pytest.fixture(scope="module")
def engine(minilm):
    engine = Engine.load(EngineConfig(minilm, device="cpu", threads=1))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def sequences(minilm, engine):
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(engine.limits.max_length)
    return [Sequence(np.array(e.ids, np.int32)) for e in tokenizer.encode_batch(varied_texts())]


@pytest.fixture(scope="module")
def rows(engine, sequences):
    return engine.step(Batch.pack(sequences)).result()


def test_vectors_equal_sentence_transformers(minilm, rows):
    expected = SentenceTransformer(str(minilm), device="cpu").encode(varied_texts())
    assert (rows.shape, rows.dtype) == (expected.shape, np.float32)
    assert (rows * expected).sum(axis=1).min() >= 0.99999


def test_a_batch_equals_its_items_alone(engine, sequences, rows):
    alone = [engine.step(Batch.pack([item])) for item in sequences]
    np.testing.assert_allclose(np.concatenate([lazy.result() for lazy in alone]), rows, atol=1e-5)


def test_order_within_a_batch_does_not_matter(engine, sequences, rows):
    turned = engine.step(Batch.pack(sequences[::-1])).result()
    np.testing.assert_allclose(turned[::-1], rows, atol=1e-5)


def test_segments_of_zero_are_the_default(engine, sequences, rows):
    explicit = [Sequence(s.token_ids, np.zeros_like(s.token_ids)) for s in sequences]
    np.testing.assert_allclose(engine.step(Batch.pack(explicit)).result(), rows, atol=1e-6)


def test_description_and_limits(engine, minilm):
    description, limits = engine.description, engine.limits
    assert (description.task, description.row_dtype, description.pooling) == ("embed", "float32", "mean")
    assert (description.dimensions, description.normalized) == (384, True)
    assert description.attention_backend.startswith("sdpa")
    assert description.tokenizer_file == minilm / "tokenizer.json"
    assert (limits.max_length, limits.vocabulary_size, limits.num_segments) == (256, 30_522, 2)
    assert (limits.max_batch_tokens, limits.max_batch_sequences) == (4096, 256)


def test_bfloat16_is_close_and_has_its_own_hash(engine, minilm, sequences, rows):
    half = Engine.load(EngineConfig(minilm, device="cpu", dtype="bfloat16", threads=1))
    half_rows = half.step(Batch.pack(sequences)).result()
    half.close()
    assert half_rows.dtype == np.float32
    assert (half_rows * rows).sum(axis=1).min() >= 0.999
    assert half.description.dtype == "bfloat16"
    assert half.description.weights_hash != engine.description.weights_hash


def test_a_step_that_fails_says_so_and_harms_no_other(engine, sequences, rows):
    bad = engine.step(Batch.pack([sequence(1, 10**6)]))  # beyond the limits, which the caller must check
    good = engine.step(Batch.pack(sequences[:3]))
    with pytest.raises(StepError, match="the forward pass failed"):
        bad.result()
    np.testing.assert_allclose(good.result(), rows[:3], atol=1e-5)


def test_a_batch_beyond_the_limits_is_a_bug(engine):
    with pytest.raises(AssertionError):
        engine.step(random_batch([256] * 17))


class GatedModel:
    """Stands in for a model: counts its calls, and each waits until the test opens the gate."""

    def __init__(self):
        self.gate = threading.Event()
        self.started = threading.Event()
        self.sizes = []

    def __call__(self, batch, attend):
        self.started.set()
        assert self.gate.wait(10)
        self.sizes.append(batch.layout.num_sequences)
        ends = batch.layout.cu_lengths[1:].long() - 1
        return batch.token_ids_T[ends].float()[:, None]


@pytest.fixture
def gated():
    model = GatedModel()
    runner = CpuRunner(model, resolve(EngineConfig(Path("model"), device="cpu", threads=1), 512, ()))
    yield runner, model
    model.gate.set()
    runner.close()


def test_step_returns_while_the_model_runs(gated):
    runner, model = gated
    lazies = [runner.step(random_batch([2] * size)) for size in (1, 2, 3)]
    assert model.started.wait(10)
    assert not any(lazy.ready() for lazy in lazies)
    assert not runner.would_block(random_batch([2]))
    model.gate.set()
    assert [len(lazy.result()) for lazy in lazies] == [1, 2, 3]
    assert model.sizes == [1, 2, 3]


def test_rows_come_back_in_the_batch_order(gated):
    runner, model = gated
    model.gate.set()
    items = random_sequences([5, 1, 3, 1, 9, 3], vocabulary_size=10_000)
    rows = runner.step(Batch.pack(items)).result()
    assert rows[:, 0].tolist() == [item.token_ids[-1] for item in items]


def test_callbacks_announce_rows_that_no_longer_wait(gated):
    runner, model = gated
    arrived, done = [], threading.Event()
    lazy = runner.step(random_batch([2]))
    lazy.add_done_callback(lambda handle: (arrived.append(handle.ready()), done.set()))
    model.gate.set()
    assert done.wait(10)
    assert arrived == [True]


def test_close_finishes_what_was_queued_and_ends_the_thread(gated):
    runner, model = gated
    before = set(threading.enumerate())
    lazies = [runner.step(random_batch([2])) for _ in range(3)]
    (worker,) = set(threading.enumerate()) - before
    closing = threading.Thread(target=runner.close)
    closing.start()
    model.gate.set()
    closing.join(10)
    assert not closing.is_alive()
    assert all(lazy.ready() for lazy in lazies)
    assert not worker.is_alive()
    runner.close()
    with pytest.raises(RuntimeError):
        runner.step(random_batch([2]))


def test_loading_imports_no_compiler(minilm):
    """TorchDynamo and what it brings cost a start seconds, and nothing of it is used."""
    script = (
        "import sys, pathlib, torch\n"
        "from rose_engine.model_source import ModelSource\n"
        "ModelSource.read(pathlib.Path(sys.argv[1])).load(torch.float32, torch.device('cpu'))\n"
        "sys.exit('torch._dynamo' in sys.modules or 'sympy' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(minilm)]).returncode == 0
