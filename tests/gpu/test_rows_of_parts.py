"""Several rows a sequence on the card, from spans or one a token, against the same in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from rose_engine.batch import Sequence
from tests.gpu.engine_rows import LEAST_COSINE, assert_same_direction, backend, rows
from tests.gpu.test_families import LENGTHS, VOCABULARY, written
from tests.models.parity import random_ids
from tests.models.tiny_pplx import (
    DIMENSIONS,
    SEPARATOR,
    document_ids,
    reference_model,
    write_contextual_folder,
)

pytestmark = pytest.mark.gpu

DOCUMENTS = ((5, 1, 20), (30,), (1, 1), (3, 40, 2, 9), (60, 50))  # chunks by tokens


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def documents() -> list[Sequence]:
    """A span for each chunk."""
    found = []
    for lengths in DOCUMENTS:
        ids, spans = document_ids([chunk.tolist() for chunk in random_ids(lengths, SEPARATOR)])
        found.append(Sequence(np.array(ids, np.int32), spans=np.array(spans, np.int32)))
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # float16 is refused: its values overflow
def test_a_row_per_chunk_of_contextual_documents(dtype: str, tmp_path: Path):
    """Codes of the chunks; the last row of each is of the tokens that only that chunk has."""
    folder = write_contextual_folder(reference_model(), tmp_path)
    (wanted, *_) = rows(folder, documents(), "cpu", "float32")
    assert len(wanted) == sum(map(len, DOCUMENTS))
    for found in rows(folder, documents(), "cuda:0", dtype, backend(dtype)):
        assert_same_direction(found[:, :DIMENSIONS], wanted[:, :DIMENSIONS], dtype)


@pytest.mark.parametrize("dtype", LEAST_COSINE)
@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2", "qwen3"])
def test_a_row_per_token(family: str, dtype: str, tmp_path: Path):
    sequences = [Sequence(ids, per_token=True) for ids in random_ids(LENGTHS, VOCABULARY)]
    folder = written(family, tmp_path)
    (wanted, *_) = rows(folder, sequences, "cpu", "float32")
    assert len(wanted) == sum(LENGTHS)
    for found in rows(folder, sequences, "cuda:0", dtype, backend(dtype, biased=family == "deberta-v2")):
        assert_same_direction(found, wanted, dtype)
