"""Bias and GELU after a feed-forward block's first matrix, exact: x / 2 * (1 + erf(x / sqrt 2)).

Hendrycks and Gimpel, 2016, arXiv:1606.08415. T rows (packed tokens) of I elements. Knows nothing of models.
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

_ROWS, _COLUMNS = 2, 1024


def gelu_bias(hidden_TI: Tensor, bias_I: Tensor, pdl: bool = False) -> Tensor:
    """GELU of `hidden_TI + bias_I`, `[T, I]`, computed in float32."""
    if not runs_triton(hidden_TI):
        return gelu_bias_twin(hidden_TI, bias_I)
    assert_rows(hidden_TI, bias_I)
    T, I = hidden_TI.shape  # noqa: E741
    columns = block_size(I, largest=_COLUMNS)
    activated_TI = torch.empty_like(hidden_TI)
    _gelu_bias[(ceil_div(T, _ROWS), ceil_div(I, columns))](
        hidden_TI,
        bias_I,
        activated_TI,
        T,
        I,
        _ROWS,
        columns,
        device_pdl(pdl),
        **launch_options(pdl, num_warps=4),
    )
    return activated_TI


def gelu_bias_twin(hidden_TI: Tensor, bias_I: Tensor) -> Tensor:
    """`gelu_bias` in torch."""
    return functional.gelu(hidden_TI.float() + bias_I.float()).to(hidden_TI.dtype)


@jit
def _gelu_bias(
    hidden: tl.tensor,
    bias: tl.tensor,
    activated: tl.tensor,
    T: tl.tensor,
    I: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    here = (row < T) & (column < I)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(hidden + row * I + column, mask=here, other=0.0).to(tl.float32)
    x += tl.load(bias + column, mask=column < I, other=0.0).to(tl.float32)
    y = x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    tl.store(activated + row * I + column, y.to(activated.dtype.element_ty), mask=here)
