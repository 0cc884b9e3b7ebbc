"""Normalisation layers over fused kernels.

Shapes: T packed tokens, D model width, O rows of the matrix that follows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rose_engine.kernels.layer_norm import add_layer_norm
from rose_engine.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """RMSNorm with a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """`[T, D]`, normalised."""
        return rms_norm(hidden_TD, self.weight, self.eps)

    def after_adding(self, update_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """Add `update_TD` to `residual_TD` in place; the sum, normalised, `[T, D]`."""
        return add_rms_norm(update_TD, residual_TD, self.weight, self.eps)

    @torch.no_grad()
    def fold_into(self, matrix_OD: Tensor) -> None:
        """Move the weight into the matrix that the normalised rows are multiplied with; it becomes one.

        (x * w) M^T = x (M * w)^T: the two together compute what they computed before.
        """
        matrix_OD.copy_(matrix_OD.float() * self.weight.float())
        self.weight.fill_(1)


class OffsetRMSNorm(RMSNorm):
    """RMSNorm whose stored weight is its distance from one."""

    def fill_buffers(self, device: torch.device) -> None:  # noqa: ARG002 - the loader's signature
        """Make of the stored weight the one to multiply with, in float32: in bfloat16 1 + w loses bits."""
        self.weight = nn.Parameter(1 + self.weight.float(), requires_grad=False)


class AddLayerNorm(nn.LayerNorm):
    """LayerNorm of a sum, in one pass: the end of a post-norm block."""

    def forward(self, hidden_TD: Tensor, residual_TD: Tensor) -> Tensor:  # type: ignore[override]
        """LayerNorm of `hidden_TD + residual_TD`, `[T, D]`."""
        return add_layer_norm(hidden_TD, residual_TD, self.weight, self.bias, self.eps)
