"""Pooling: one vector per sequence out of its tokens' hidden states.

Works on packed tokens by cumulative lengths alone, without host syncs or shapes that depend on values, so
that it runs inside a captured graph: sequences of length zero get a row without meaning, tokens behind the
last sequence touch no row. Sums are float32 whatever the hidden states are.

Shapes: T packed tokens, B sequences, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rose_engine.attention.base import RaggedLayout


@dataclass(frozen=True)
class Segments:
    """Packed hidden states with what several pooling modes derive from their layout, each derived once."""

    hidden_TD: Tensor
    layout: RaggedLayout

    @cached_property
    def token_T(self) -> Tensor:
        """Index of every token."""
        cu_lengths = self.layout.cu_lengths
        return torch.arange(self.hidden_TD.shape[0], dtype=cu_lengths.dtype, device=cu_lengths.device)

    @cached_property
    def sequence_T(self) -> Tensor:
        """Sequence of every token; B for tokens behind the last sequence."""
        return torch.searchsorted(self.layout.cu_lengths[1:], self.token_T, right=True)

    @cached_property
    def rank_T(self) -> Tensor:
        """1, 2, ... along each sequence, float32."""
        return (self.token_T - self.layout.cu_lengths[self.sequence_T] + 1).float()

    @cached_property
    def length_B1(self) -> Tensor:
        """Tokens of every sequence, at least 1, float32 `[B, 1]`."""
        return self.layout.cu_lengths.diff().clamp(min=1).float()[:, None]

    @cached_property
    def sum_BD(self) -> Tensor:
        """Sum over every sequence's tokens."""
        return self.sum_of(self.hidden_TD.float())

    def sum_of(self, values_TD: Tensor) -> Tensor:
        """Sum of float32 `values_TD` over every sequence; a row more takes what lies behind the last."""
        sums_BD = values_TD.new_zeros(self.layout.num_sequences + 1, values_TD.shape[1])
        return sums_BD.index_add_(0, self.sequence_T, values_TD)[:-1]

    def rows_at(self, token_B: Tensor) -> Tensor:
        """Hidden states of one token per sequence, float32; the index is clamped for empty sequences."""
        return self.hidden_TD[token_B.clamp(0, self.hidden_TD.shape[0] - 1)].float()


def _cls(segments: Segments) -> Tensor:
    return segments.rows_at(segments.layout.cu_lengths[:-1])


def _lasttoken(segments: Segments) -> Tensor:
    return segments.rows_at(segments.layout.cu_lengths[1:] - 1)


def _mean(segments: Segments) -> Tensor:
    return segments.sum_BD / segments.length_B1


def _mean_sqrt_len(segments: Segments) -> Tensor:
    return segments.sum_BD / segments.length_B1.sqrt()


def _weightedmean(segments: Segments) -> Tensor:
    weighted_BD = segments.sum_of(segments.hidden_TD.float() * segments.rank_T[:, None])
    length_B1 = segments.length_B1
    return weighted_BD / (length_B1 * (length_B1 + 1) / 2)


def _max(segments: Segments) -> Tensor:
    hidden_TD = segments.hidden_TD.float()
    lowest_BD = hidden_TD.new_full((segments.layout.num_sequences + 1, hidden_TD.shape[1]), float("-inf"))
    sequence_TD = segments.sequence_T[:, None].expand_as(hidden_TD)
    return lowest_BD.scatter_reduce_(0, sequence_TD, hidden_TD, "amax")[:-1]


_MODES: dict[str, Callable[[Segments], Tensor]] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weightedmean,
    "lasttoken": _lasttoken,
}


def pool(modes: tuple[str, ...], hidden_TD: Tensor, layout: RaggedLayout) -> Tensor:
    """Pooled rows, float32 `[B, D * len(modes)]`: the modes of sentence-transformers, concatenated."""
    segments = Segments(hidden_TD, layout)
    pooled = [_MODES[mode](segments) for mode in modes]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
