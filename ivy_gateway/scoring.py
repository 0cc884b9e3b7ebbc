"""From rows to scores: cosine for bi-encoders, the declared activation for cross-encoders. Numpy only."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ivy_gateway.jobs import Float32Array

# Below this a vector has no direction; torch.nn.functional.normalize uses the same bound.
SMALLEST_NORM = 1e-12


def sigmoid(logits: Float32Array) -> Float32Array:
    """Logistic function, computed so that no exponential overflows."""
    decay = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1 / (1 + decay), decay / (1 + decay)).astype(np.float32)


def softmax(logits_NL: Float32Array) -> Float32Array:
    """Shares of each row's labels; of the one label there is, sigmoid: its softmax would always say 1."""
    if logits_NL.ndim < 2 or logits_NL.shape[1] == 1:
        return sigmoid(logits_NL)
    powers_NL = np.exp(logits_NL - logits_NL.max(axis=1, keepdims=True))
    shares_NL: Float32Array = powers_NL / powers_NL.sum(axis=1, keepdims=True)
    return shares_NL


ACTIVATIONS: dict[str, Callable[[Float32Array], Float32Array]] = {
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "softmax": softmax,
}


def activate(logits: Float32Array, activation: str) -> Float32Array:
    """Shown scores of `logits`, `[n]` of one label or `[n, labels]`, under the model's activation."""
    return ACTIVATIONS[activation](logits)


def normalized(vectors_ND: NDArray[Any]) -> Float32Array:
    """Rows scaled to length 1 in float32; a row without direction stays as it is."""
    vectors = vectors_ND.astype(np.float32, copy=False)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    result: Float32Array = vectors / np.maximum(norms, SMALLEST_NORM)
    return result


def cosine(left_ND: NDArray[Any], right_ND: NDArray[Any]) -> Float32Array:
    """Cosine of each row of `left` with the same row of `right`: `[N]`, between -1 and 1."""
    products_N: Float32Array = np.einsum("nd,nd->n", normalized(left_ND), normalized(right_ND))
    return np.clip(products_N, np.float32(-1), np.float32(1))


def distinct(items: Sequence[Hashable]) -> tuple[list[int], NDArray[np.intp]]:
    """Where each different item appears first, in order, and for every item its place among these."""
    places: dict[Hashable, int] = {}
    where = [places.setdefault(item, len(places)) for item in items]
    _, firsts = np.unique(where, return_index=True)
    return firsts.tolist(), np.array(where, np.intp)
