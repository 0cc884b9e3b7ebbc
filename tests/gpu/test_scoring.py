"""Scoring heads on the card against the same folders in float32 on the CPU.

The CPU's logits are compared with the reference library's in tests/models. A label's logits of all sequences
are compared as one vector: that of a single one has no direction.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from rose_engine.batch import Sequence
from tests.gpu.engine_rows import LEAST_COSINE, assert_same_direction, backend, rows
from tests.models.parity import random_ids
from tests.models.test_parity_cross_encoders import (
    SEGMENTED,
    VOCABULARY,
    saved,
    signal_logit_score,
    signal_metadata,
    tiny,
    tiny_language_model,
)

pytestmark = pytest.mark.gpu

LENGTHS = (9, 2, 400, 9, 1, 64, 130, 33, 21, 57, 300, 12, 5, 77, 18, 40)
WIDER = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 600}  # heads of 32
KINDS = {
    "Bert": WIDER,
    "Roberta": WIDER,
    "ModernBert": WIDER,
    "DistilBert": {"dim": 128, "hidden_dim": 256, "max_position_embeddings": 600},
    "DebertaV2": WIDER,
    "Qwen3": WIDER | {"head_dim": 32},
}


def pairs_of_texts(*, segments: bool) -> list[Sequence]:
    """With `segments`, the second half of each sequence is in the second one."""
    ids = random_ids(LENGTHS, VOCABULARY)
    if not segments:
        return [Sequence(token_ids) for token_ids in ids]
    return [Sequence(i, (np.arange(len(i)) >= len(i) // 2).astype(np.int32)) for i in ids]


def assert_logits_agree(folder: Path, sequences: list[Sequence], dtype: str, *, biased: bool = False) -> None:
    (wanted, *_) = rows(folder, sequences, "cpu", "float32")
    for found in rows(folder, sequences, "cuda:0", dtype, backend(dtype, biased=biased)):
        assert_same_direction(found.T, wanted.T, dtype)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("dtype", LEAST_COSINE)
@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_classification_logits(kind: str, num_labels: int, dtype: str, tmp_path: Path):
    folder = saved(tiny(kind, num_labels=num_labels, **KINDS[kind]), tmp_path)
    sequences = pairs_of_texts(segments=kind in SEGMENTED)
    assert_logits_agree(folder, sequences, dtype, biased=kind == "DebertaV2")


@pytest.mark.parametrize("dtype", LEAST_COSINE)
@pytest.mark.parametrize("signal", [signal_logit_score, signal_metadata])
def test_yes_less_no_from_the_original_checkpoint(signal, dtype: str, tmp_path: Path):
    """As Qwen3-Reranker is published: a language model whose head is its embeddings, or its own."""
    model = tiny_language_model(tie_word_embeddings=signal is signal_metadata, **KINDS["Qwen3"])
    signal(saved(model, tmp_path))
    assert_logits_agree(tmp_path, pairs_of_texts(segments=False), dtype)
