"""The embedding head: pooling, Dense modules, then normalisation or quantisation.

float32 up to the last step, whatever the trunk is.

Shapes: T packed tokens, B sequences, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose_engine.attention.base import RaggedLayout
from rose_engine.checkpoint import WeightRules, load_weights, weightless
from rose_engine.heads.pooling import pool
from rose_engine.heads.quantizer import quantize
from rose_engine.kernels.launch import runs_triton
from rose_engine.kernels.pool_normalize import Pooling, pool_normalize
from rose_engine.layers.activation import torch_activation
from rose_engine.module_chain import DenseSpec, ModuleChain


class Dense(nn.Module):
    """A Dense module of sentence-transformers."""

    def __init__(self, spec: DenseSpec) -> None:
        super().__init__()
        self.linear = nn.Linear(spec.in_features, spec.out_features, bias=spec.bias)
        self.residual = _residual(spec)
        self._activation = torch_activation(spec.activation)

    def forward(self, rows_BD: Tensor) -> Tensor:
        """Rows `[B, in_features]` to rows `[B, out_features]`."""
        output_BD = self._activation(self.linear(rows_BD))
        return output_BD if self.residual is None else output_BD + self.residual(rows_BD)


def _residual(spec: DenseSpec) -> nn.Module | None:
    if not spec.residual:
        return None
    if spec.in_features == spec.out_features:
        return nn.Identity()
    return nn.Linear(spec.in_features, spec.out_features, bias=False)


# Chains of one pooling mode, and normalisation or not, that a device does in one launch.
_KERNEL_POOLING: dict[tuple[str, ...], Pooling] = {
    ("cls",): "first",
    ("lasttoken",): "last",
    ("mean",): "mean",
}


class EmbeddingHead(nn.Module):
    """What `ModuleChain` describes, with its weights."""

    def __init__(self, chain: ModuleChain) -> None:
        super().__init__()
        self.dense = nn.ModuleList(Dense(spec) for spec in chain.dense)
        self._pooling = chain.pooling
        self._normalize = chain.normalize
        self._quantize = chain.quantize
        plain = not chain.dense and not chain.quantize
        self._one_launch = _KERNEL_POOLING.get(tuple(chain.pooling)) if plain else None

    @classmethod
    def load(cls, chain: ModuleChain, device: torch.device) -> EmbeddingHead:
        """The head on `device`. Raises `CheckpointError` when weights are not as a Dense module says."""
        with weightless():
            head = cls(chain)
        for dense, spec in zip(head.dense, chain.dense, strict=True):
            load_weights(dense, spec.folder, WeightRules(), torch.float32, device)
        return head

    def forward(self, hidden_TD: Tensor, layout: RaggedLayout) -> Tensor:
        """Embeddings, float32 `[B, D]`; where the chain quantises, int8 `[B, row_width(D)]`.

        One per sequence; with spans in the layout one per span.
        """
        if self._one_launch is not None and layout.spans_R2 is None and runs_triton(hidden_TD):
            bounds = layout.cu_lengths, layout.max_length
            return pool_normalize(hidden_TD, *bounds, self._one_launch, unit_length=self._normalize)
        rows_BD = pool(self._pooling, hidden_TD, layout)
        for dense in self.dense:
            rows_BD = dense(rows_BD)
        if self._quantize:
            return quantize(rows_BD)
        return F.normalize(rows_BD, dim=1) if self._normalize else rows_BD
