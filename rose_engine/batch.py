"""What the engine computes on: sequences of token ids, packed one after the other without padding.

Knows nothing of devices, tensors, text or queues; numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """One input: token ids `[length]` and, where the model has segments, a segment id for each.

    It makes one row, pooled from all its tokens, unless it says otherwise: `spans` `[S, 2]`, a start and an
    end each, in order and apart, make a row each, pooled from the tokens between; with `per_token`, every
    token makes one, its hidden state.
    """

    token_ids: Int32Array
    segment_ids: Int32Array | None = None
    spans: Int32Array | None = None
    per_token: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens, special tokens included."""
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """Rows it makes."""
        if self.per_token:
            return self.num_tokens
        return 1 if self.spans is None else len(self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """Where each of B sequences lies in T packed tokens: number i is `cu_lengths[i]:cu_lengths[i + 1]`."""

    cu_lengths: Int32Array  # [B + 1]
    max_length: int
    num_tokens: int  # T

    @classmethod
    def of(cls, lengths: Int32Array) -> PackedLayout:
        """Lay out sequences of `lengths` `[B]` one after the other."""
        cu_lengths = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=cu_lengths[1:])
        return cls(cu_lengths, int(lengths.max()), int(cu_lengths[-1]))

    @classmethod
    def of_one(cls, length: int) -> PackedLayout:
        """Lay out a single sequence."""
        return cls(np.array((0, length), np.int32), length, length)

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.cu_lengths) - 1

    @property
    def lengths(self) -> Int32Array:
        """Tokens of each sequence, `[B]`."""
        return self.cu_lengths[1:] - self.cu_lengths[:-1]

    def positions(self) -> Int32Array:
        """Position of every token inside its own sequence, from 0, `[T]`."""
        if self.num_sequences == 1:
            return np.arange(self.num_tokens, dtype=np.int32)
        starts = np.repeat(self.cu_lengths[:-1], self.lengths)
        return np.arange(self.num_tokens, dtype=np.int32) - starts

    def reordered(self, order_B: Int32Array) -> tuple[PackedLayout, Int32Array]:
        """The layout of the same sequences in another order, and where here each of its tokens is, `[T]`."""
        layout = PackedLayout.of(self.lengths[order_B])
        return layout, np.repeat(self.cu_lengths[order_B], layout.lengths) + layout.positions()


@dataclass(frozen=True, slots=True, eq=False)
class RowLayout:
    """Which tokens make which of a step's R rows, where that is not one row from each whole sequence."""

    of_sequences: PackedLayout  # where each sequence's rows lie among the R
    spans_R2: Int32Array | None  # start and end, in its sequence, of each row's tokens; None: a row a token

    @classmethod
    def of(cls, sequences: tuple[Sequence, ...]) -> RowLayout | None:
        """The rows that `sequences` ask for; `None` for one from each.

        Sequences with and without spans go together; rows of tokens, of another width, go alone.
        """
        if all(s.spans is None and not s.per_token for s in sequences):
            return None
        assert len({s.per_token for s in sequences}) == 1, "pooled rows among those of tokens: this is a bug"
        counts = PackedLayout.of(np.fromiter((s.num_rows for s in sequences), np.int32, len(sequences)))
        return cls(counts, None if sequences[0].per_token else np.concatenate([_spans(s) for s in sequences]))

    @property
    def num_rows(self) -> int:
        """R."""
        return self.of_sequences.num_tokens

    def packed_spans(self, layout: PackedLayout) -> Int32Array | None:
        """`spans_R2` among the packed tokens of `layout`, that of the same sequences."""
        if self.spans_R2 is None:
            return None
        starts_R: Int32Array = np.repeat(layout.cu_lengths[:-1], self.of_sequences.lengths)
        return self.spans_R2 + starts_R[:, None]

    def reordered(self, order_B: Int32Array) -> tuple[RowLayout, Int32Array]:
        """The rows of the same sequences in another order, and where here each of them is, `[R]`."""
        of_sequences, row_R = self.of_sequences.reordered(order_B)
        return RowLayout(of_sequences, None if self.spans_R2 is None else self.spans_R2[row_R]), row_R

    def part(self, first: int, last: int) -> RowLayout:
        """The rows of the sequences from `first` to before `last`."""
        start, end = (int(self.of_sequences.cu_lengths[i]) for i in (first, last))
        spans = None if self.spans_R2 is None else self.spans_R2[start:end]
        return RowLayout(PackedLayout.of(self.of_sequences.lengths[first:last]), spans)


def _spans(sequence: Sequence) -> Int32Array:
    if sequence.spans is not None:
        return sequence.spans
    return np.array([[0, sequence.num_tokens]], np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Sequences that go through the model together, as host arrays of T packed tokens."""

    token_ids_T: Int32Array
    position_ids_T: Int32Array
    segment_ids_T: Int32Array | None  # None: every token is in segment 0
    layout: PackedLayout
    rows: RowLayout | None = None  # None: one row from each sequence

    @classmethod
    def pack(cls, sequences: Iterable[Sequence]) -> Batch:
        """Pack at least one sequence, each of at least one token, in the order given.

        The arrays of a single one are taken as they are.
        """
        items = tuple(sequences)
        assert items, "an empty batch: this is a bug of the caller"
        if len(items) == 1:
            (alone,) = items
            layout = PackedLayout.of_one(alone.num_tokens)
            return cls(alone.token_ids, layout.positions(), alone.segment_ids, layout, RowLayout.of(items))
        layout = PackedLayout.of(np.fromiter((s.num_tokens for s in items), np.int32, len(items)))
        token_ids_T = np.concatenate([s.token_ids for s in items])
        return cls(token_ids_T, layout.positions(), _pack_segments(items), layout, RowLayout.of(items))

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.layout.num_sequences

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.layout.num_tokens

    @property
    def num_rows(self) -> int:
        """R."""
        return self.num_sequences if self.rows is None else self.rows.num_rows


def _pack_segments(sequences: tuple[Sequence, ...]) -> Int32Array | None:
    if all(s.segment_ids is None for s in sequences):
        return None
    zeros = (np.zeros(s.num_tokens, np.int32) if s.segment_ids is None else s.segment_ids for s in sequences)
    return np.concatenate(list(zeros))
