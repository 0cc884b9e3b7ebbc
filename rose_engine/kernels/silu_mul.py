"""The gate of a gated feed-forward block: SiLU(gate) * up.   (Shazeer, 2020, arXiv:2002.05202)

A packed row holds I gates, then I ups. Knows nothing of the matrices around it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rose_engine.kernels.launch import (
    assert_rows,
    block_size,
    ceil_div,
    device_pdl,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    launch_options,
    runs_triton,
    tl,
)

_ROWS, _COLUMNS = 2, 1024  # a program, with eight warps: 95 % of the bandwidth


def silu_mul(
    gate_up_TG: Tensor, residual_TD: Tensor | None = None, epsilon: float = 0.0, pdl: bool = False
) -> Tensor:
    """`[T, I]` from `gate_up_TG` `[T, 2I]`.

    With `residual_TD`, gate and up were computed from that residual without its RMSNorm: every row is first
    multiplied by its residual's inverse root mean square (with `epsilon`).
    """
    if not runs_triton(gate_up_TG):
        return silu_mul_twin(gate_up_TG, residual_TD, epsilon)
    assert_rows(gate_up_TG, residual_TD)
    T, I = gate_up_TG.shape[0], gate_up_TG.shape[1] // 2  # noqa: E741
    activated_TI = gate_up_TG.new_empty(T, I)
    columns = block_size(I, largest=_COLUMNS)
    width = 1 if residual_TD is None else residual_TD.shape[1]
    _silu_mul[(ceil_div(T, _ROWS), ceil_div(I, columns))](
        gate_up_TG,
        gate_up_TG if residual_TD is None else residual_TD,
        activated_TI,
        T,
        epsilon,
        I,
        width,
        residual_TD is not None,
        _ROWS,
        columns,
        block_size(width),
        device_pdl(pdl),
        **launch_options(pdl, num_warps=8),
    )
    return activated_TI


def silu_mul_twin(gate_up_TG: Tensor, residual_TD: Tensor | None = None, epsilon: float = 0.0) -> Tensor:
    """`silu_mul` in torch."""
    values = gate_up_TG.float()
    if residual_TD is not None:
        values = values * torch.rsqrt(residual_TD.float().pow(2).mean(-1, keepdim=True) + epsilon)
    gate, up = values.chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up_TG.dtype)


@jit
def _silu_mul(
    gate_up: tl.tensor,
    residual: tl.tensor,
    activated: tl.tensor,
    T: tl.tensor,
    epsilon: tl.tensor,
    I: tl.constexpr,  # noqa: E741
    D: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    here = (row < T) & (column < I)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + row * (2 * I) + column, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * I) + I + column, mask=here, other=0.0).to(tl.float32)
    if SCALED:
        wide = tl.arange(0, BLOCK_D)[None, :]
        x = tl.load(residual + row * D + wide, mask=(row < T) & (wide < D), other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + epsilon)[:, None]
        gate *= scale
        up *= scale
    y = gate / (1 + tl.exp(-gate)) * up
    tl.store(activated + row * I + column, y.to(activated.dtype.element_ty), mask=here)
