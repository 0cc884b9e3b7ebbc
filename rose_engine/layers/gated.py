"""The gated feed-forward block's matrices: down(SiLU(gate x) * up x).   (Shazeer, 2020, arXiv:2002.05202)

How they are multiplied is the business of the path that runs the stack. Shapes: D model width, I inner width.
"""

from __future__ import annotations

from torch import nn


class GatedFeedForward(nn.Module):
    """Gate and up in one matrix, `[2I, D]`: gates first."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner_width, bias=False)
        self.down = nn.Linear(inner_width, width, bias=False)
