"""The fused GEMMs in plain torch, in float32 and rounded once: what `gemms` is tested against.

Follows the configuration only where it shows in the result: partial sums of squares and deferred norms.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rose_engine.kernels.cute.config import GemmConfig, JoinedQkv, SplitQkv
from rose_engine.kernels.cute.interface import QkvWeight


def project_qkv(
    config: JoinedQkv | SplitQkv,
    residual_TD: Tensor,
    sums_TP: Tensor,
    weight: QkvWeight,
    rotary_TH: Tensor,
    eps: float,
    out_TQ: Tensor,
    head_sums_TS: Tensor | None = None,
) -> None:
    """See `FusedGemms.project_qkv`."""
    projected_TQ = _normalised_projection(residual_TD, sums_TP, weight.weight_QD, eps)
    heads_TNH = projected_TQ.view(len(projected_TQ), -1, weight.head_dim).clone()
    rotated = weight.rotated_columns // weight.head_dim
    if head_sums_TS is not None and isinstance(config, JoinedQkv):
        head_sums_TS.copy_(_tile_sums(projected_TQ, config.gemm.tile_n))
    if not config.deferred_norm:
        heads_TNH[:, :rotated] *= _inverse_rms(heads_TNH[:, :rotated].square().mean(-1, keepdim=True), eps)
    heads_TNH *= weight.norm_1Q.view(1, -1, weight.head_dim)
    heads_TNH[:, :rotated] = rotate_pairs(heads_TNH[:, :rotated], rotary_TH)
    out_TQ.copy_(heads_TNH.flatten(1))


def project_gate_up(
    config: GemmConfig,  # noqa: ARG001  (tiles do not show in the result)
    residual_TD: Tensor,
    sums_TP: Tensor,
    weight_GD: Tensor,
    eps: float,
    out_TI: Tensor,
) -> None:
    """See `FusedGemms.project_gate_up`."""
    gate_up = _normalised_projection(residual_TD, sums_TP, weight_GD, eps)
    out_TI.copy_(F.silu(gate_up[:, 0::2]) * gate_up[:, 1::2])


def add_projection(
    config: GemmConfig, rows_TK: Tensor, weight_DK: Tensor, residual_TD: Tensor, sums_TP: Tensor
) -> None:
    """See `FusedGemms.add_projection`."""
    total_TD = residual_TD.float() + rows_TK.float() @ weight_DK.float().T
    residual_TD.copy_(total_TD)
    sums_TP.copy_(_tile_sums(total_TD, config.tile_n))


def rotate_pairs(heads_TNH: Tensor, rotary_TH: Tensor) -> Tensor:
    """Turn each pair of adjacent columns by its angle; `rotary_TH` alternates cos and sin."""
    cos, sin = rotary_TH[:, None, 0::2].float(), rotary_TH[:, None, 1::2].float()
    first, second = heads_TNH[..., 0::2], heads_TNH[..., 1::2]
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)


def _normalised_projection(residual_TD: Tensor, sums_TP: Tensor, weight_ND: Tensor, eps: float) -> Tensor:
    """RMSNorm commutes with the projection: scale the rows of the result instead of its input."""
    scale_T1 = _inverse_rms(sums_TP.sum(1, keepdim=True) / residual_TD.shape[1], eps)
    return residual_TD.float() @ weight_ND.float().T * scale_T1


def _inverse_rms(mean_square: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(mean_square + eps)


def _tile_sums(rows_TN: Tensor, tile_n: int) -> Tensor:
    bounds = range(0, rows_TN.shape[1], tile_n)
    return torch.stack([rows_TN[:, first : first + tile_n].square().sum(1) for first in bounds], 1)
