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
    """One input: token ids `[length]` and, where the model has segments, a segment id for each."""

    token_ids: Int32Array
    segment_ids: Int32Array | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens, special tokens included."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """Where each of B sequences lies in T packed tokens: number i is `cu_lengths[i]:cu_lengths[i + 1]`."""

    cu_lengths: Int32Array  # [B + 1]
    max_length: int

    @classmethod
    def of(cls, lengths: Int32Array) -> PackedLayout:
        """Lay out sequences of `lengths` `[B]` one after the other."""
        cu_lengths = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=cu_lengths[1:])
        return cls(cu_lengths, int(lengths.max()))

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.cu_lengths) - 1

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.cu_lengths[-1])

    @property
    def lengths(self) -> Int32Array:
        """Tokens of each sequence, `[B]`."""
        return np.diff(self.cu_lengths)

    def positions(self) -> Int32Array:
        """Position of every token inside its own sequence, from 0, `[T]`."""
        starts = np.repeat(self.cu_lengths[:-1], self.lengths)
        return np.arange(self.num_tokens, dtype=np.int32) - starts


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Sequences that go through the model together, as host arrays of T packed tokens."""

    token_ids_T: Int32Array
    position_ids_T: Int32Array
    segment_ids_T: Int32Array | None  # None: every token is in segment 0
    layout: PackedLayout

    @classmethod
    def pack(cls, sequences: Iterable[Sequence]) -> Batch:
        """Pack at least one sequence, each of at least one token, in the order given."""
        items = tuple(sequences)
        assert items, "an empty batch: this is a bug of the caller"
        layout = PackedLayout.of(np.fromiter((s.num_tokens for s in items), np.int32, len(items)))
        token_ids_T = np.concatenate([s.token_ids for s in items])
        return cls(token_ids_T, layout.positions(), _pack_segments(items), layout)

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.layout.num_sequences

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.layout.num_tokens


def _pack_segments(sequences: tuple[Sequence, ...]) -> Int32Array | None:
    if all(s.segment_ids is None for s in sequences):
        return None
    zeros = (np.zeros(s.num_tokens, np.int32) if s.segment_ids is None else s.segment_ids for s in sequences)
    return np.concatenate(list(zeros))
