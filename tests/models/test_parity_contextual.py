"""Contextual pplx-embed and rows of tokens through the engine, against transformers' hidden states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Model

from rose_engine.batch import Batch, Sequence
from rose_engine.config import EngineConfig
from rose_engine.engine import Engine
from tests.models.parity import random_ids
from tests.models.tiny_pplx import (
    DIMENSIONS,
    SEPARATOR,
    assert_bits,
    assert_codes,
    chunk_values,
    document_ids,
    reference_model,
    states,
    write_contextual_folder,
)

DOCUMENTS = ((5, 1, 20), (30,), (1, 1), (3, 40, 2, 9))  # chunks by tokens


@pytest.fixture(scope="module")
def reference() -> Qwen3Model:
    return reference_model()


@pytest.fixture(scope="module", params=["modules.json", "own code alone"])
def engine(reference, request, tmp_path_factory):
    folder: Path = write_contextual_folder(reference, tmp_path_factory.mktemp("context"))
    if request.param != "modules.json":
        (folder / "modules.json").unlink()
    engine = Engine.load(EngineConfig(folder, device="cpu", dtype="float32", threads=1))
    yield engine
    engine.close()


def documents() -> list[list[list[int]]]:
    return [[ids.tolist() for ids in random_ids(lengths, SEPARATOR)] for lengths in DOCUMENTS]


def sequence(chunks: list[list[int]]) -> Sequence:
    ids, spans = document_ids(chunks)
    return Sequence(np.array(ids, np.int32), spans=np.array(spans, np.int32))


def test_a_row_per_chunk_in_view_of_its_document(engine, reference):
    rows = engine.step(Batch.pack([sequence(chunks) for chunks in documents()])).result()
    values = np.concatenate([chunk_values(reference, chunks) for chunks in documents()])
    assert rows.shape[0] == sum(map(len, DOCUMENTS))
    assert_codes(rows[:, :DIMENSIONS], values)
    assert_bits(rows[:, DIMENSIONS:].view(np.uint8), values)


def test_a_document_of_one_chunk_is_a_plain_text(engine):
    (chunk,) = documents()[1]
    plain = Sequence(np.array(chunk, np.int32))
    rows = engine.step(Batch.pack([sequence([chunk]), plain])).result()
    np.testing.assert_array_equal(rows[0], rows[1])


def test_neighbours_count(engine):
    chunks = documents()[0]
    together = engine.step(Batch.pack([sequence(chunks)])).result()
    alone = engine.step(Batch.pack([sequence([chunk]) for chunk in chunks])).result()
    assert (together != alone).any(axis=1).all()


def test_rows_of_tokens_are_hidden_states(engine, reference):
    ids = random_ids((9, 1, 33), SEPARATOR)
    rows = engine.step(Batch.pack([Sequence(token_ids, per_token=True) for token_ids in ids])).result()
    wanted = torch.cat([states(reference, token_ids.tolist()) for token_ids in ids]).numpy()
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, wanted, atol=1e-5)
