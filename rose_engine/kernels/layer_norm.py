"""The end of a post-norm block: add to the residual, then LayerNorm.   (Ba et al., 2016, arXiv:1607.06450)

Sums are float32 whatever the dtype. T rows (packed tokens) of D elements. Knows nothing of models.
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

_ELEMENTS_PER_PROGRAM = 4096


def add_layer_norm(
    hidden_TD: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    epsilon: float,
    pdl: bool = False,
) -> Tensor:
    """LayerNorm of `hidden_TD + residual_TD`, in their dtype; neither is changed."""
    if not runs_triton(hidden_TD):
        return add_layer_norm_twin(hidden_TD, residual_TD, weight_D, bias_D, epsilon)
    assert_rows(hidden_TD, residual_TD, weight_D, bias_D)
    T, D = hidden_TD.shape
    block = block_size(D)
    rows = max(1, min(4, _ELEMENTS_PER_PROGRAM // block))
    normalised_TD = torch.empty_like(hidden_TD)
    _add_layer_norm[(ceil_div(T, rows),)](
        hidden_TD,
        residual_TD,
        weight_D,
        bias_D,
        normalised_TD,
        T,
        epsilon,
        D,
        rows,
        block,
        device_pdl(pdl),
        **launch_options(pdl, num_warps=4),
    )
    return normalised_TD


def add_layer_norm_twin(
    hidden_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, bias_D: Tensor, epsilon: float
) -> Tensor:
    """`add_layer_norm` in torch."""
    sum_TD = hidden_TD.float() + residual_TD.float()
    normalised_TD = functional.layer_norm(sum_TD, weight_D.shape, weight_D.float(), bias_D.float(), epsilon)
    return normalised_TD.to(hidden_TD.dtype)


@jit
def _add_layer_norm(
    hidden: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    normalised: tl.tensor,
    T: tl.tensor,
    epsilon: tl.tensor,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < D
    here = (row < T) & inside
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(hidden + row * D + column, mask=here, other=0.0).to(tl.float32)
    x += tl.load(residual + row * D + column, mask=here, other=0.0).to(tl.float32)
    mean = (tl.sum(x, 1) / D)[:, None]
    x = tl.where(inside, x - mean, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / D + epsilon)[:, None]
    y *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normalised + row * D + column, y.to(normalised.dtype.element_ty), mask=here)
