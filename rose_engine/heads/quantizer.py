"""The pplx-embed models' quantiser: pooled rows to int8 codes and sign bits in one int8 row.

A row holds D codes, round(127 tanh x), then ceil(D / 8) bytes with the bits x >= 0, the first value in the
most significant bit. A code is -128 where its input was not finite and nowhere else; the bits' bytes may hold
any value. Both forms are elementwise: the first d codes, and the first d bits, are those of the first d
values. Knows nothing of pooling.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rose_engine.kernels.quantize_rows import quantize_rows


@dataclass(frozen=True, slots=True)
class TanhQuantizer:
    """Float rows of D values to int8 rows of D codes and the packed bits."""

    dimensions: int  # D

    @property
    def row_width(self) -> int:
        """Columns of a quantised row."""
        return self.dimensions + -(-self.dimensions // 8)

    def __call__(self, values_BD: Tensor) -> Tensor:
        """int8 `[B, row_width]` from float `[B, D]`; bits are taken before rounding."""
        assert values_BD.shape[1] == self.dimensions, "as many values as the head was made for"
        return quantize_rows(values_BD.float().contiguous())
