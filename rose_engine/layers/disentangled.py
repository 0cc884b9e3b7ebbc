"""Disentangled attention: content meets content, content meets position, position meets content.

    score(i, j) = (q_i k_j + q_i K[b(i - j)] + Q[b(i - j)] k_j) / sqrt(3 H)

b puts distances into buckets; K and Q are the key and query projections of one learned vector a bucket.
He et al., 2021, arXiv:2006.03654. Shapes: T packed tokens, R sequences of L tokens, D model width, N heads,
H head width, K buckets, Q distances key - query, from the most negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rose_engine.attention.base import Attend, AttentionSpec, with_bias
from rose_engine.layers.encoder import SelfAttention
from rose_engine.layers.relative_bias import distance_indices


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """What one layer's scores know of positions; it does not depend on the tokens."""

    keys_NHK: Tensor
    queries_NHK: Tensor
    buckets_Q: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DisentangledBias:
    """The two terms of the scores that positions take part in: a `ScoreBias`."""

    q_TNH: Tensor
    k_TNH: Tensor
    positions: Positions
    scale: float

    def between(self, start: int, count: int, length: int) -> Tensor:
        """`[R, N, L, L]`."""
        run = slice(start, start + count * length)
        q_RNLH, k_RNLH = (
            heads_TNH[run].view(count, length, *heads_TNH.shape[1:]).transpose(1, 2)
            for heads_TNH in (self.q_TNH, self.k_TNH)
        )
        buckets_Q = self.positions.buckets_Q
        buckets_LL = buckets_Q[distance_indices(length, buckets_Q)]
        at_query = buckets_LL.expand(*q_RNLH.shape[:2], length, length)
        by_query_RNLL = (q_RNLH @ self.positions.keys_NHK).gather(-1, at_query)
        by_key_RNLL = (k_RNLH @ self.positions.queries_NHK).gather(-1, at_query.transpose(-1, -2))
        bias_RNLL: Tensor = (by_query_RNLL + by_key_RNLL.transpose(-1, -2)) * self.scale
        return bias_RNLL


class DistanceVectors(nn.Module):
    """The learned vectors of buckets, and the bucket of every distance."""

    def __init__(
        self, width: int, num_buckets: int, max_distance: int, max_positions: int, norm: nn.Module
    ) -> None:
        super().__init__()
        self.vectors = nn.Embedding(2 * num_buckets, width)
        self.norm = norm
        self._num_buckets = num_buckets
        self._max_distance = max_distance
        self._farthest = max_positions - 1

    def buckets(self) -> Tensor:
        """`[Q]`, on the CPU: a logarithm rounded otherwise would move a distance to the next bucket."""
        # Buckets count query - key.
        distances_Q = torch.arange(self._farthest, -self._farthest - 1, -1, device="cpu")
        buckets_Q = log_buckets(distances_Q, self._num_buckets, self._max_distance) + self._num_buckets
        return buckets_Q.clamp(0, 2 * self._num_buckets - 1)

    def forward(self) -> Tensor:
        """The vectors `[K, D]`, normalised."""
        vectors_KD: Tensor = self.norm(self.vectors.weight)
        return vectors_KD


class DisentangledAttention(SelfAttention):
    """Self-attention whose key and query projections serve positions as well."""

    def __init__(self, width: int, spec: AttentionSpec) -> None:
        super().__init__(width, spec)
        self._positions: Positions | None = None

    @torch.no_grad()
    def adopt_positions(self, vectors_KD: Tensor, buckets_Q: Tensor) -> None:
        """Project the vectors of the buckets once; called when the weights are there."""
        spec = self._spec
        heads_K3NH = self.qkv(vectors_KD).unflatten(1, (3, spec.num_heads, spec.head_dim))
        queries_NHK, keys_NHK = (heads_K3NH[:, part].permute(1, 2, 0).contiguous() for part in (0, 1))
        self._positions = Positions(keys_NHK, queries_NHK, buckets_Q)

    def forward(self, hidden_TD: Tensor, attend: Attend, rotary_TH: Tensor | None = None) -> Tensor:
        """Attention's output `[T, D]`, projected, before the residual."""
        return super().forward(hidden_TD, self._disentangled(attend), rotary_TH)

    def _disentangled(self, attend: Attend) -> Attend:
        positions = self._positions
        assert positions is not None, "positions are adopted once the weights are there"

        def attend_disentangled(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, spec: AttentionSpec) -> Tensor:
            bias = DisentangledBias(q_TNH, k_TNH, positions, spec.scale)
            return with_bias(attend, bias)(q_TNH, k_TNH, v_TNH, spec)

        return attend_disentangled


def log_buckets(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Signed buckets of distances: exact up to half of `num_buckets`, by logarithm from there on.

    The distance `max_distance` - 1 is in bucket `num_buckets` - 1; farther ones are in later buckets.
    """
    exact = num_buckets // 2
    far = distances.abs().clamp(min=exact)
    growth = torch.log(far / exact) / torch.log(torch.tensor((max_distance - 1) / exact))
    grown = torch.ceil(growth * (exact - 1)) + exact
    return torch.where(distances.abs() <= exact, distances, (grown * distances.sign()).long())
