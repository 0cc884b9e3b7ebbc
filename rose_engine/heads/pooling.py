"""Pooling: one vector per sequence, or per span of one, out of its tokens' hidden states.

Works on packed tokens by cumulative lengths (or spans) alone, without host syncs or shapes that depend on
values, so that it runs inside a captured graph: sequences of length zero get a row without meaning, tokens
behind the last sequence and outside every span touch no row. Sums are float32 whatever the hidden states are.

Shapes: T packed tokens, B sequences, R rows, which are the sequences unless there are spans, D model width.
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
    def start_R(self) -> Tensor:
        """First token of every row."""
        spans_R2 = self.layout.spans_R2
        return self.layout.cu_lengths[:-1] if spans_R2 is None else spans_R2[:, 0].contiguous()

    @cached_property
    def end_R(self) -> Tensor:
        """The token behind every row's last."""
        spans_R2 = self.layout.spans_R2
        return self.layout.cu_lengths[1:] if spans_R2 is None else spans_R2[:, 1].contiguous()

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
    def row_T(self) -> Tensor:
        """Row of every token; R for tokens of none."""
        if self.layout.spans_R2 is None:
            return self.sequence_T
        row_T = torch.searchsorted(self.end_R, self.token_T, right=True)
        start_T = torch.cat([self.start_R, self.end_R[-1:]])[row_T]
        return torch.where(self.token_T < start_T, len(self.start_R), row_T)

    @cached_property
    def offset_R(self) -> Tensor | None:
        """Tokens of its sequence before every row's first; `None` where there are none."""
        if self.layout.spans_R2 is None:
            return None
        cu_lengths = self.layout.cu_lengths
        return self.start_R - cu_lengths[torch.searchsorted(cu_lengths[1:], self.start_R, right=True)]

    @cached_property
    def rank_T(self) -> Tensor:
        """1, 2, ... along each sequence, float32."""
        return (self.token_T - self.layout.cu_lengths[self.sequence_T] + 1).float()

    @cached_property
    def length_R1(self) -> Tensor:
        """Tokens of every row, at least 1, float32 `[R, 1]`."""
        return (self.end_R - self.start_R).clamp(min=1).float()[:, None]

    @cached_property
    def sum_RD(self) -> Tensor:
        """Sum over every row's tokens."""
        return self.sum_of(self.hidden_TD.float())

    def sum_of(self, values_TD: Tensor) -> Tensor:
        """Sum of float32 `values_TD` over every row's tokens; a row more takes what belongs to none."""
        sums_RD = values_TD.new_zeros(len(self.start_R) + 1, values_TD.shape[1])
        return sums_RD.index_add_(0, self.row_T, values_TD)[:-1]

    def rows_at(self, token_R: Tensor) -> Tensor:
        """Hidden states of one token per row, float32; the index is clamped for empty sequences."""
        return self.hidden_TD[token_R.clamp(0, self.hidden_TD.shape[0] - 1)].float()


def _cls(segments: Segments) -> Tensor:
    return segments.rows_at(segments.start_R)


def _lasttoken(segments: Segments) -> Tensor:
    return segments.rows_at(segments.end_R - 1)


def _mean(segments: Segments) -> Tensor:
    return segments.sum_RD / segments.length_R1


def _mean_sqrt_len(segments: Segments) -> Tensor:
    return segments.sum_RD / segments.length_R1.sqrt()


def _weightedmean(segments: Segments) -> Tensor:
    """Weights are places in the whole sequence, also where a span leaves out what comes before it."""
    weighted_RD = segments.sum_of(segments.hidden_TD.float() * segments.rank_T[:, None])
    length_R1, offset_R = segments.length_R1, segments.offset_R
    total_R1 = length_R1 * (length_R1 + 1) / 2
    if offset_R is not None:
        total_R1 = total_R1 + length_R1 * offset_R.float()[:, None]
    return weighted_RD / total_R1


def _max(segments: Segments) -> Tensor:
    hidden_TD = segments.hidden_TD.float()
    lowest_RD = hidden_TD.new_full((len(segments.start_R) + 1, hidden_TD.shape[1]), float("-inf"))
    row_TD = segments.row_T[:, None].expand_as(hidden_TD)
    return lowest_RD.scatter_reduce_(0, row_TD, hidden_TD, "amax")[:-1]


_MODES: dict[str, Callable[[Segments], Tensor]] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weightedmean,
    "lasttoken": _lasttoken,
}


def pool(modes: tuple[str, ...], hidden_TD: Tensor, layout: RaggedLayout) -> Tensor:
    """Pooled rows, float32 `[R, D * len(modes)]`: the modes of sentence-transformers, concatenated."""
    segments = Segments(hidden_TD, layout)
    pooled = [_MODES[mode](segments) for mode in modes]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
