"""How well questions find their passages: ranks, hit@1 and MRR@10. Knows arrays and no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
DEPTH = 10


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Shares over all questions: first of all passages, and the mean of 1 / rank (0 below rank 10)."""

    questions: int
    hit_at_1: float
    mrr_at_10: float

    @classmethod
    def of_ranks(cls, ranks: Array) -> Retrieval:
        """From each question's rank of its own passage, counted from 1; 0 = not among those ranked."""
        within = (ranks >= 1) & (ranks <= DEPTH)
        reciprocal = np.where(within, 1 / np.maximum(ranks, 1), 0)
        return cls(len(ranks), float((ranks == 1).mean()), float(reciprocal.mean()))

    def __str__(self) -> str:
        return f"hit@1 {self.hit_at_1:.3f}, MRR@10 {self.mrr_at_10:.3f}"


def ranks_among_all(questions: Array, passages: Array, answers: Array) -> Array:
    """Rank `[Q]` of each question's own passage, by dot product with all; ties count in its favour."""
    scores = questions @ passages.T
    own = scores[np.arange(len(answers)), answers]
    ranks: Array = 1 + (scores > own[:, None]).sum(axis=1)
    return ranks


def nearest(questions: Array, passages: Array, count: int = DEPTH) -> Array:
    """The `count` passages of the highest dot product, best first: indices `[Q, count]`."""
    order: Array = np.argsort(-(questions @ passages.T), axis=1, kind="stable")[:, :count]
    return order


def ranks_among(candidates: Array, scores: Array, answers: Array) -> Array:
    """Rank `[Q]` of the own passage by `scores [Q, C]` of `candidates [Q, C]`; 0 where it is no candidate."""
    order = np.argsort(-scores, axis=1, kind="stable")
    is_own = np.take_along_axis(candidates, order, axis=1) == answers[:, None]
    ranks: Array = np.where(is_own.any(axis=1), 1 + is_own.argmax(axis=1), 0)
    return ranks
