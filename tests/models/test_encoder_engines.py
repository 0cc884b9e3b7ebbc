"""Families of encoders through the engine on the CPU: a folder in, one pooled row per sequence out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rose_engine.batch import Batch, Sequence
from rose_engine.config import EngineConfig
from rose_engine.engine import Engine
from tests.models import (
    test_parity_deberta_v2,
    test_parity_distilbert,
    test_parity_gte,
    test_parity_modernbert,
    test_parity_mpnet,
    test_parity_nomic_bert,
)
from tests.models.encoder_parity import VOCABULARY, reference_states, saved
from tests.models.parity import assert_rows_close, random_ids

TINY: dict[str, Callable[[], PreTrainedModel]] = {
    "deberta-v2": test_parity_deberta_v2.tiny,
    "distilbert": test_parity_distilbert.tiny,
    "gte": test_parity_gte.tiny,
    "modernbert": test_parity_modernbert.tiny,
    "mpnet": test_parity_mpnet.tiny,
    "nomic_bert": test_parity_nomic_bert.tiny,
}


LENGTHS = (9, 2, 40, 9, 1, 2)  # some repeat, and they are out of order


def mean_rows(folder: Path, dtype: str) -> torch.Tensor:
    """The engine's rows; without `modules.json` they are means."""
    engine = Engine.load(EngineConfig(folder, device="cpu", dtype=dtype, threads=1))
    try:
        batch = Batch.pack(Sequence(token_ids) for token_ids in random_ids(LENGTHS, VOCABULARY))
        return torch.from_numpy(engine.step(batch).result()).float()
    finally:
        engine.close()


@pytest.mark.parametrize("model_type", TINY)
def test_rows(tmp_path: Path, model_type: str):
    model = TINY[model_type]()
    states = reference_states(model, random_ids(LENGTHS, VOCABULARY))
    wanted = torch.stack([states_LD.mean(0) for states_LD in states])
    assert_rows_close(mean_rows(saved(model, tmp_path), "float32"), wanted)


@pytest.mark.parametrize("model_type", TINY)
def test_bfloat16_rows_agree(tmp_path: Path, model_type: str):
    folder = saved(TINY[model_type](), tmp_path)
    exact, rounded = mean_rows(folder, "float32"), mean_rows(folder, "bfloat16")
    assert torch.cosine_similarity(exact, rounded, dim=1).min() > 0.999
