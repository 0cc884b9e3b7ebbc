"""A learned bias for every head and distance between query and key, the same in all layers.

Raffel et al., 2020, arXiv:1910.10683. Shapes: N heads, P positions, L tokens of a sequence, K buckets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class DistanceBias:
    """A `ScoreBias` that knows distances only. Lives for one forward pass: each length is laid out once."""

    by_distance_NQ: Tensor  # [N, 2P - 1], from distance key - query = -(P - 1) on
    _laid_out: dict[int, Tensor] = field(default_factory=dict)

    def between(self, start: int, count: int, length: int) -> Tensor:  # noqa: ARG002 - equal everywhere
        """`[1, N, L, L]`; distances beyond the positions there are have the bias of the farthest."""
        if length not in self._laid_out:
            indices_LL = distance_indices(length, self.by_distance_NQ)
            self._laid_out[length] = self.by_distance_NQ[:, indices_LL][None]
        return self._laid_out[length]


def distance_indices(length: int, by_distance: Tensor) -> Tensor:
    """`[L, L]`: where in the last dimension of `by_distance`, 2P - 1 wide, each key - query is found."""
    tokens_L = torch.arange(length, device=by_distance.device)
    last = by_distance.shape[-1] - 1
    return (tokens_L[None, :] - tokens_L[:, None] + last // 2).clamp(0, last)


class RelativePositionBias(nn.Module):
    """The bias of each bucket of distances, `[K, N]`, spread over distances once the weights are there."""

    by_distance_NQ: Tensor

    def __init__(self, num_buckets: int, num_heads: int, max_distance: int, max_positions: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))
        self.register_buffer("by_distance_NQ", torch.empty(0), persistent=False)
        self._max_distance = max_distance
        self._max_positions = max_positions

    def fill_buffers(self, device: torch.device) -> None:
        """Look up the bucket of every distance."""
        farthest = self._max_positions - 1
        # On the CPU: a logarithm rounded otherwise would move a distance to the next bucket.
        distances_Q = torch.arange(-farthest, farthest + 1, device="cpu")
        buckets_Q = distance_buckets(distances_Q, self.weight.shape[0], self._max_distance)
        self.by_distance_NQ = self.weight[buckets_Q.to(device)].t().contiguous()

    def forward(self) -> DistanceBias:
        """The bias of one forward pass."""
        return DistanceBias(self.by_distance_NQ)


def distance_buckets(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Buckets of distances key - query: half of them for keys that follow.

    Of each half, one half is one distance wide each; the other grows by a constant factor and ends at
    `max_distance`, beyond which all distances are alike.
    """
    half = num_buckets // 2
    exact = half // 2
    far = distances.abs()
    growth = torch.log(far.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    grown = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(far < exact, far, grown) + half * (distances > 0)
