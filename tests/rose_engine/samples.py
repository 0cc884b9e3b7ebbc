"""Batches and layouts that the engine's tests share."""

from __future__ import annotations

import numpy as np
import torch

from rose_engine.attention.base import RaggedLayout
from rose_engine.batch import Batch, Sequence


def sequence(*token_ids, segments=None):
    return Sequence(np.array(token_ids, np.int32), None if segments is None else np.array(segments, np.int32))


def random_sequences(lengths, vocabulary_size=100, segments=False, seed=0):
    random = np.random.default_rng(seed)
    return [
        Sequence(
            random.integers(0, vocabulary_size, length, dtype=np.int32),
            random.integers(0, 2, length, dtype=np.int32) if segments else None,
        )
        for length in lengths
    ]


def random_batch(lengths, **options):
    return Batch.pack(random_sequences(lengths, **options))


def ragged(lengths, in_graph=False):
    """A layout; `in_graph` hides the lengths from the host, as a captured graph does."""
    cu_lengths = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return RaggedLayout(cu_lengths, max(lengths), len(lengths), None if in_graph else tuple(lengths))


def spans(lengths):
    ends = np.cumsum(lengths)
    return [slice(int(end - length), int(end)) for end, length in zip(ends, lengths, strict=True)]
