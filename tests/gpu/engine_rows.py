"""Rows of a folder on any device, and how near those of the card must be to those of the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from rose_engine.batch import Batch, Sequence
from rose_engine.config import EngineConfig
from rose_engine.engine import Engine
from rose_engine.errors import EngineConfigError

LEAST_COSINE = {"bfloat16": 0.999, "float16": 0.9999, "float32": 0.999999}


def rows(
    folder: Path, sequences: Iterable[Sequence], device: str, dtype: str, attention: str = "sdpa"
) -> list[torch.Tensor]:
    """The rows of three steps in a row: eager, captured, replayed."""
    engine = Engine.load(EngineConfig(folder, device=device, dtype=dtype, attention=attention))
    try:
        batch = Batch.pack(sequences)
        return [torch.from_numpy(engine.step(batch).result().copy()).float() for _ in range(3)]
    finally:
        engine.close()


def backend(dtype: str, *, biased: bool = False) -> str:
    """The reference where nothing else can: float32, or a bias added to the scores."""
    return "sdpa" if biased or dtype == "float32" else "fa2"


def assert_float16_is_refused(folder: Path, sequences: Iterable[Sequence]) -> None:
    """Of a family whose values are known to leave float16's range."""
    with pytest.raises(EngineConfigError, match="float16 overflows"):
        rows(folder, sequences, "cuda:0", "float16", "fa2")


def assert_same_direction(found: torch.Tensor, wanted: torch.Tensor, dtype: str) -> None:
    """Every row `[D]` of `found` points where that of `wanted` does."""
    assert found.shape == wanted.shape
    assert torch.cosine_similarity(found, wanted, dim=1).min() >= LEAST_COSINE[dtype]
