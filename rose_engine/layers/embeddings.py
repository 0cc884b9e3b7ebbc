"""Token embeddings and, where a model has them, positions and segments: summed and normalised.

Shapes: T packed tokens, D model width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class EncoderEmbeddings(nn.Module):
    """Learned positions; `position_offset` is the table's row for a sequence's first token.

    Models that say positions elsewhere have `max_positions` 0; models without segments have `num_segments` 0.
    """

    def __init__(
        self,
        width: int,
        vocabulary_size: int,
        max_positions: int,
        num_segments: int,
        norm_eps: float,
        position_offset: int = 0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(max_positions, width) if max_positions else None
        self.segments = nn.Embedding(num_segments, width) if num_segments else None
        self.norm = nn.LayerNorm(width, eps=norm_eps)
        self._position_offset = position_offset

    def forward(self, token_ids_T: Tensor, position_ids_T: Tensor, segment_ids_T: Tensor | None) -> Tensor:
        """Embeddings `[T, D]` of int32 ids; without segment ids every token is in segment 0."""
        hidden_TD = F.embedding(token_ids_T, self.tokens.weight)
        if self.positions is not None:
            hidden_TD += F.embedding(position_ids_T + self._position_offset, self.positions.weight)
        if self.segments is not None and segment_ids_T is not None:
            hidden_TD += F.embedding(segment_ids_T, self.segments.weight)
        elif self.segments is not None:
            hidden_TD += self.segments.weight[0]
        normed_TD: Tensor = self.norm(hidden_TD)
        return normed_TD
