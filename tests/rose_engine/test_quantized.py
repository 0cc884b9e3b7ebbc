"""A model that quantises: int8 codes and sign bits out of one step, against transformers and the formulas."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rose_engine.batch import Batch, Sequence
from rose_engine.config import EngineConfig
from rose_engine.engine import Engine
from rose_engine.errors import CheckpointError, EngineConfigError
from rose_engine.heads.embedding import EmbeddingHead
from rose_engine.heads.quantizer import row_width
from rose_engine.lazy_tensor import finite_rows
from rose_engine.module_chain import ModuleChain
from tests.models.tiny_pplx import (
    DIMENSIONS,
    MAX_LENGTH,
    assert_bits,
    assert_codes,
    pooled_values,
    reference_model,
    write_folder,
)
from tests.rose_engine.samples import ragged


@pytest.fixture(scope="module")
def reference():
    return reference_model()


@pytest.fixture
def folder(reference, tmp_path):
    return write_folder(reference, tmp_path)


def load(folder, **settings):
    return Engine.load(EngineConfig(folder, device="cpu", threads=1, **settings))


def step(engine, ids):
    return engine.step(Batch.pack(Sequence(np.array(i, np.int32)) for i in ids)).result()


def test_rows_are_the_formulas_on_the_references_values(reference, folder):
    random = np.random.default_rng(3)
    ids = [random.integers(0, 256, length).tolist() for length in (1, 17, MAX_LENGTH, 4, 4)]
    engine = load(folder)
    rows, description = step(engine, ids), engine.description
    engine.close()
    assert (description.dimensions, description.row_dtype, description.normalized) == (
        DIMENSIONS,
        "int8",
        False,
    )
    assert rows.dtype == np.int8
    assert rows.shape == (5, row_width(DIMENSIONS))
    values = pooled_values(reference, ids)
    assert_codes(rows[:, :DIMENSIONS], values)
    assert_bits(rows[:, DIMENSIONS:].view(np.uint8), values)
    assert finite_rows(rows, DIMENSIONS).all()


def test_bits_may_look_like_values_that_are_not_finite():
    """Eight values of which only the first is not negative: their byte is 128, as int8 -128."""
    head = EmbeddingHead.load(ModuleChain(("mean",), quantize=True), torch.device("cpu"))
    values = torch.tensor([1.0] + [-1.0] * 7).repeat(3, DIMENSIONS // 8)
    rows = head(values, ragged([1, 1, 1])).numpy()
    assert (rows[:, DIMENSIONS:] == -128).all()
    assert finite_rows(rows, DIMENSIONS).all()


def test_values_that_are_not_finite_are_told_apart(reference, folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"][7] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    engine = load(folder)
    rows = step(engine, [[1, 2, 3], [4, 7], [5]])
    engine.close()
    assert finite_rows(rows, DIMENSIONS).tolist() == [True, False, True]


def rewrite_modules(folder, change):
    file = folder / "modules.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def test_quantised_vectors_are_never_normalised(folder):
    normalize = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
    rewrite_modules(folder, lambda modules: [*modules[:2], normalize, modules[2] | {"idx": 3}])
    with pytest.raises(
        CheckpointError, match="Pooling -> Normalize -> FlexibleQuantizer, which is not supported"
    ):
        load(folder)


def test_other_families_do_not_quantise(folder):
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "qwen3"}))
    with pytest.raises(CheckpointError, match=r"modules\.json quantises, which qwen3 models do not"):
        load(folder)


def test_without_its_quantiser_the_model_gives_floats_and_another_hash(reference, folder):
    quantized = load(folder)
    rewrite_modules(folder, lambda modules: modules[:2])
    plain = load(folder)
    np.testing.assert_allclose(
        step(plain, [[1, 2, 3]]), pooled_values(reference, [[1, 2, 3]]), rtol=1e-4, atol=1e-5
    )
    assert plain.description.row_dtype == "float32"
    assert plain.description.weights_hash != quantized.description.weights_hash
    for engine in (plain, quantized):
        engine.close()


def test_float16_is_refused(folder):
    with pytest.raises(EngineConfigError, match="dtype"):
        load(folder, dtype="float16")
