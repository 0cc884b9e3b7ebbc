"""What a fused decoder layer asks of its GEMMs; `gemms` does it on the device, `reference` in plain torch.

Shapes: T packed tokens, D model width, Q packed columns of q, k and v, H head width, I intermediate width, K
inner width, P partial sums of squares a row (their sum over P is the row's), S such sums over all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rose_engine.kernels.cute.config import GemmConfig, JoinedQkv, SplitQkv


@dataclass(frozen=True, slots=True, eq=False)
class QkvWeight:
    """The projection to q, k and v, prepared: input norm folded in, rotary halves of q and k interleaved."""

    weight_QD: Tensor
    norm_1Q: Tensor  # float32: QK-norm weight of every q and k column, 1 for v
    selector_1Q: Tensor  # float32: 1 for q and k columns, 0 for v
    head_dim: int
    rotated_columns: int  # of q and k, which come before those of v


class FusedGemms(Protocol):
    """GEMMs with their epilogues; every function writes into buffers of the caller."""

    def project_qkv(
        self,
        config: JoinedQkv | SplitQkv,
        residual_TD: Tensor,
        sums_TP: Tensor,
        weight: QkvWeight,
        rotary_TH: Tensor,
        eps: float,
        out_TQ: Tensor,
        head_sums_TS: Tensor | None = None,
    ) -> None:
        """Normalise, project, QK-norm, rotate. `rotary_TH`: cos and sin of each pair, alternating.

        With a deferred norm q and k stay undivided and `head_sums_TS` gets a sum of squares a column tile.
        """
        ...

    def project_gate_up(
        self,
        config: GemmConfig,
        residual_TD: Tensor,
        sums_TP: Tensor,
        weight_GD: Tensor,
        eps: float,
        out_TI: Tensor,
    ) -> None:
        """Normalise, project, `silu(gate) * up`; rows of `weight_GD` alternate gate and up (G = 2 I)."""
        ...

    def add_projection(
        self, config: GemmConfig, rows_TK: Tensor, weight_DK: Tensor, residual_TD: Tensor, sums_TP: Tensor
    ) -> None:
        """`hidden += rows @ weight.T` in place; `sums_TP` gets a sum of squares a column tile."""
        ...
