"""The gate of a gated feed-forward block: GELU(gate) * up, by the tanh approximation.

    GELU(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))

Hendrycks and Gimpel, 2016, arXiv:1606.08415; Shazeer, 2020, arXiv:2002.05202. A packed row holds I gates,
then I ups; T rows (packed tokens). Knows nothing of the matrices around it.
"""

from __future__ import annotations

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

_ROWS, _COLUMNS = 2, 1024  # as for `silu_mul`


def gelu_mul(gate_up_TG: Tensor, pdl: bool = False) -> Tensor:
    """`[T, I]` from `gate_up_TG` `[T, 2I]`, computed in float32."""
    if not runs_triton(gate_up_TG):
        return gelu_mul_twin(gate_up_TG)
    assert_rows(gate_up_TG)
    T, I = gate_up_TG.shape[0], gate_up_TG.shape[1] // 2  # noqa: E741
    activated_TI = gate_up_TG.new_empty(T, I)
    columns = block_size(I, largest=_COLUMNS)
    _gelu_mul[(ceil_div(T, _ROWS), ceil_div(I, columns))](
        gate_up_TG,
        activated_TI,
        T,
        I,
        _ROWS,
        columns,
        device_pdl(pdl),
        **launch_options(pdl, num_warps=8),
    )
    return activated_TI


def gelu_mul_twin(gate_up_TG: Tensor) -> Tensor:
    """`gelu_mul` in torch."""
    gate, up = gate_up_TG.float().chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up_TG.dtype)


@jit
def _gelu_mul(
    gate_up: tl.tensor,
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
    gate = tl.load(gate_up + row * (2 * I) + column, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * I) + I + column, mask=here, other=0.0).to(tl.float32)
    # (1 + tanh z) / 2 = 1 / (1 + exp(-2z)), with 2 sqrt(2 / pi) = 1.5957691216
    doubled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    y = gate / (1 + tl.exp(-doubled)) * up
    tl.store(activated + row * I + column, y.to(activated.dtype.element_ty), mask=here)
