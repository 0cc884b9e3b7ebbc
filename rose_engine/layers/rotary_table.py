"""The rows of a rotary table for the tokens of a batch.

Shapes: P positions, T packed tokens, H head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rose_engine.layers.rotary import RotarySpec


class RotaryTable(nn.Module):
    """The table of one basis, in float32 whatever the dtype of the weights."""

    table_PH: Tensor

    def __init__(self, spec: RotarySpec) -> None:
        super().__init__()
        self._spec = spec
        self.register_buffer("table_PH", torch.empty(0), persistent=False)

    def fill_buffers(self, device: torch.device) -> None:
        """Compute the table."""
        self.table_PH = self._spec.table(torch.float32, device)

    def forward(self, position_ids_T: Tensor) -> Tensor:
        """Rows `[T, H]` of int32 positions: cosines, then sines."""
        return functional.embedding(position_ids_T, self.table_PH)
