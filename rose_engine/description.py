"""What a loaded model says about itself: the facts that a server passes on to its clients.

Knows nothing of how they came about; standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The loaded model as clients see it; constant for the life of an engine."""

    model_id: str  # the folder's name
    task: str  # "embed" or "score"
    dimensions: int  # D: values of one row
    hidden_size: int  # values of a token's hidden state, where that is what a row holds
    # numpy's name: "float32", or "int8": then a row is D codes and, behind them, ceil(D / 8) bytes that hold
    # the sign bits of the values before rounding (1 = not negative), the first in the most significant bit.
    row_dtype: str
    pooling: str  # "mean", "cls", "lasttoken" ..., joined by "+" where concatenated
    normalized: bool  # whether rows have unit length
    dtype: str  # of weights and computation
    device: str
    attention_backend: str  # what was chosen, and why
    weights_hash: str  # weights, pooling, dtype: equal hashes give equal vectors
    tokenizer_file: Path | None
