"""Float rows to int8 codes and sign bits, as the pplx-embed models ask for.

    code = round(127 tanh x), ties to even; -128 where x is infinite or not a number (no other x gives it)
    bit  = 1 where x >= 0, packed eight to a byte, the first value in the most significant bit

Bits come from x: a small negative x has code 0. Knows nothing of models. B rows of D values.
"""

from __future__ import annotations

import torch
from torch import Tensor

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

NOT_FINITE = -128
_BYTES_PER_PROGRAM = 128


def quantize_rows(values_BD: Tensor, pdl: bool = False) -> Tensor:
    """int8 `[B, D + ceil(D / 8)]` from float32 `[B, D]`: D codes, then the bytes of the packed bits."""
    if not runs_triton(values_BD):
        return quantize_rows_twin(values_BD)
    assert_rows(values_BD)
    assert values_BD.dtype == torch.float32, "quantised from float32, not from rounded values"
    B, D = values_BD.shape
    num_bytes = ceil_div(D, 8)
    block = block_size(num_bytes, largest=_BYTES_PER_PROGRAM)
    rows = torch.empty(B, D + num_bytes, dtype=torch.int8, device=values_BD.device)
    _quantize_rows[(B, ceil_div(num_bytes, block))](
        values_BD, rows, D, num_bytes, block, device_pdl(pdl), **launch_options(pdl, num_warps=4)
    )
    return rows


def quantize_rows_twin(values_BD: Tensor) -> Tensor:
    """`quantize_rows` in torch."""
    finite_BD = values_BD.isfinite()
    codes_BD = torch.where(finite_BD, (127 * torch.tanh(values_BD)).round(), NOT_FINITE).to(torch.int8)
    num_bytes = ceil_div(values_BD.shape[1], 8)
    bits = torch.zeros(len(values_BD), num_bytes * 8, dtype=torch.uint8, device=values_BD.device)
    bits[:, : values_BD.shape[1]] = values_BD >= 0
    places = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=values_BD.device)
    packed = (bits.view(-1, num_bytes, 8) * places).sum(-1, dtype=torch.uint8)
    return torch.cat((codes_BD, packed.view(torch.int8)), dim=1)


@jit
def _quantize_rows(
    values: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, 8)[None, :]
    column = byte[:, None] * 8 + place
    here = column < D
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(values + row * D + column, mask=here, other=-1.0)
    bits = tl.sum((x >= 0).to(tl.int32) << (7 - place), 1)
    finite = tl.abs(x) < float("inf")
    tanh = 1 - 2 / (tl.exp(2 * tl.minimum(tl.where(finite, x, 0.0), 32.0)) + 1)  # 1 from far below 32
    # Adding and taking away 1.5 * 2^23 leaves a float32 rounded to an integer, ties to even.
    code = tl.where(finite, (127 * tanh + 12582912.0) - 12582912.0, -128.0)
    tl.store(rows + row * (D + NUM_BYTES) + column, code.to(tl.int8), mask=here)
    tl.store(rows + row * (D + NUM_BYTES) + D + byte, bits.to(tl.int8), mask=byte < NUM_BYTES)
