"""The pplx-embed models' quantiser: pooled rows to int8 codes and sign bits in one int8 row.

A row holds D codes, round(127 tanh x), then ceil(D / 8) bytes with the bits x >= 0, the first value in the
most significant bit. A code is -128 where its input was not finite and nowhere else; the bits' bytes may hold
any value. Both forms are elementwise: the first d codes, and the first d bits, are those of the first d
values. Knows nothing of pooling.
"""

from __future__ import annotations

from torch import Tensor

from rose_engine.kernels.quantize_rows import quantize_rows


def quantize(values_BD: Tensor) -> Tensor:
    """int8 `[B, row_width(D)]` from float `[B, D]`; bits are taken before rounding."""
    return quantize_rows(values_BD.float().contiguous())


def row_width(dimensions: int) -> int:
    """Columns of a quantised row of `dimensions` values: the codes, then the bytes of the packed bits."""
    return dimensions + -(-dimensions // 8)
