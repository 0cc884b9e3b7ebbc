"""What a reranker is trained on: questions, each with crops of its own passage and of passages like it.

Articles are held out as a whole, so that no question is measured whose text was seen. Knows no model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.retrieval import Array
from benchmarks.xquad import Xquad

HELD_OUT_EVERY = 5
SHORTEST_CROP, LONGEST_CROP = 160, 660  # characters; most passages have 500 to 900
_STEPS_SORTED_TOGETHER = 10


@dataclass(frozen=True, slots=True)
class Split:
    """Indices of questions, by whether their article is held out: articles 0, 5, 10 ... are."""

    training: Array
    held_out: Array

    @classmethod
    def by_article(cls, data: Xquad) -> Split:
        """The split of `data`."""
        is_held_out = np.array([in_held_out_article(data, passage) for passage in data.answers])
        return cls(np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out))


@dataclass(frozen=True, slots=True)
class Group:
    """A question, its own passage, and passages that look like it."""

    question: str
    passages: tuple[str, ...]  # the own one first

    @property
    def longest(self) -> int:
        """Characters of the longest passage."""
        return max(map(len, self.passages))


def in_held_out_article(data: Xquad, passage: int) -> bool:
    """Whether the passage of this index must not be trained on."""
    return data.articles[passage] % HELD_OUT_EVERY == 0


def training_groups(
    data: Xquad, split: Split, candidates: Array, negatives: int, progress: float, chance: random.Random
) -> list[Group]:
    """One group a training question, in random order; negatives are drawn from `candidates [Q, C]`.

    Crops grow with `progress` (0 to 1) to most of a passage: short ones cost little, and show sooner what to
    look for. The own passage's crop is around the answer.
    """
    length = SHORTEST_CROP + int(progress**2 * (LONGEST_CROP - SHORTEST_CROP))

    def random_crop(passage: int) -> str:
        text = data.passages[passage]
        return crop(text, chance.randrange(len(text)), length, chance)

    groups = []
    for question in chance.sample(split.training.tolist(), len(split.training)):
        own = data.answers[question]
        others = [i for i in candidates[question].tolist() if i != own and not in_held_out_article(data, i)]
        chosen = chance.sample(others, min(negatives, len(others)))
        own_crop = crop(data.passages[own], data.answer_starts[question], length, chance)
        groups.append(Group(data.questions[question], (own_crop, *map(random_crop, chosen))))
    return groups


def crop(text: str, position: int, length: int, chance: random.Random) -> str:
    """About `length` characters of `text`, whole words, among them the one at `position`."""
    if length >= len(text):
        return text
    start = min(max(0, position - chance.randrange(length * 3 // 4)), len(text) - length)
    begin = text.rfind(" ", 0, start) + 1
    end = text.find(" ", start + length)
    return text[begin:] if end < 0 else text[begin:end]


def steps_of(groups: Sequence[Group], size: int) -> Iterator[Sequence[Group]]:
    """`size` groups at a time, of about the same length among those of ten steps: less padding."""
    stretch = _STEPS_SORTED_TOGETHER * size
    for start in range(0, len(groups), stretch):
        alike = sorted(groups[start : start + stretch], key=lambda group: group.longest)
        yield from (alike[first : first + size] for first in range(0, len(alike), size))
