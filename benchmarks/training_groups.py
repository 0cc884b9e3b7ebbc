"""What a reranker is trained on: groups of a query, the passage it belongs to, and passages like that one.

Articles are held out as a whole, so that no question is measured whose text was seen. Few questions are left,
so sentences of the training passages are made into further queries, as in the inverse cloze task
(arXiv:1906.00300): which passage was this sentence cut out of? Knows no model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.retrieval import Array
from benchmarks.xquad import Xquad

HELD_OUT_EVERY = 5
VALIDATION_REMAINDER = 2  # article 2, 7, 12 ...
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(\[])")
_LEAST_CLOZE_WORDS = 6
_ENDING = re.compile(r"(?<=\w{4})(ing|ed|es|s|ly)$")

Sentences = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """Indices of questions, by their article: 0, 5, 10 ... are held out, 2, 7, 12 ... validate."""

    training: Array
    validation: Array
    held_out: Array

    @classmethod
    def by_article(cls, data: Xquad, *, validate: bool = False) -> Split:
        """The split of `data`; without `validate` those articles are trained on too."""
        part = np.array([data.articles[passage] % HELD_OUT_EVERY for passage in data.answers])
        validating = (part == VALIDATION_REMAINDER) & validate
        held_out = part == 0
        indices = map(np.flatnonzero, (~validating & ~held_out, validating, held_out))
        return cls(*indices)

    def passages(self, data: Xquad) -> tuple[Array, Array]:
        """Indices of the passages of the training articles, and of those that validate."""
        answers = np.array(data.answers)
        return np.unique(answers[self.training]), np.unique(answers[self.validation])


@dataclass(frozen=True, slots=True)
class Group:
    """A query and passages, the one it belongs to first; all groups of a source have the same number."""

    query: str
    passages: tuple[Sentences, ...]
    numbers: tuple[int, ...]  # indices of the passages


class GroupSource:
    """Groups without end, drawn from the questions of `split` and the passages of their articles."""

    def __init__(
        self,
        data: Xquad,
        split: Split,
        question_candidates: Array,
        passage_neighbours: Array,
        negatives: int,
        chance: random.Random,
    ) -> None:
        """`question_candidates [Q, C]` and `passage_neighbours [P, N]`: passages like each, nearest first."""
        self._data, self._negatives, self._chance = data, negatives, chance
        self._questions = split.training.tolist()
        self._allowed = set(split.passages(data)[0].tolist())
        self._sentences = {number: sentences(data.passages[number]) for number in self._allowed}
        self._question_candidates, self._passage_neighbours = question_candidates, passage_neighbours
        self._openings = [opening(data.questions[q]) for q in self._questions]
        self._waiting: list[int] = []

    def draw(self, count: int, cloze_share: float) -> list[Group]:
        """`count` groups; about this share of them are of cloze queries."""
        return [
            self.cloze_group() if self._chance.random() < cloze_share else self.question_group()
            for _ in range(count)
        ]

    def question_group(self) -> Group:
        """Of the next question; all have had their turn before one has a second."""
        if not self._waiting:
            self._waiting = self._chance.sample(self._questions, len(self._questions))
        question = self._waiting.pop()
        own = self._data.answers[question]
        answering = sentence_at(self._data.passages[own], self._data.answer_starts[question])
        query = self._data.questions[question]
        if self._chance.random() < 0.5:
            query = some_words(query, 0.15, self._chance)
        passage = self._shortened(own, keep=answering)
        return self._group(query, own, passage, self._question_candidates[question].tolist())

    def cloze_group(self) -> Group:
        """Of a sentence of some passage, worded like a question or not, and the rest of that passage."""
        while True:
            own = self._chance.choice(self._data.answers)
            if own not in self._allowed:
                continue
            position = self._chance.randrange(len(self._sentences[own]))
            if len(self._sentences[own][position].split()) >= _LEAST_CLOZE_WORDS:
                break
        query = self._cloze_query(self._sentences[own][position])
        passage = self._shortened(own, keep=position)
        rest = tuple(s for s in passage if s != self._sentences[own][position])
        if rest and self._chance.random() < 0.5:
            passage = rest
        return self._group(query, own, passage, [])

    def _cloze_query(self, sentence: str) -> str:
        words = sentence.rstrip(".!?").split()
        length = self._chance.randint(_LEAST_CLOZE_WORDS, max(_LEAST_CLOZE_WORDS, min(len(words), 16)))
        start = self._chance.randint(0, max(0, len(words) - length))
        query = some_words(" ".join(words[start : start + length]), 0.3, self._chance)
        query = without_endings(query, 0.3, self._chance)
        return f"{self._chance.choice(self._openings)} {query}?" if self._chance.random() < 0.6 else query

    def _group(self, query: str, own: int, passage: Sentences, likest: Sequence[int]) -> Group:
        others = self._others(own, likest)
        passages = (passage, *(self._shortened(other) for other in others))
        return Group(query, passages, (own, *others))

    def _others(self, own: int, likest: Sequence[int]) -> list[int]:
        """Negatives: from `likest`, then from the nearest of `own`, drawn from twice as many."""
        ordered = dict.fromkeys([*likest, *self._passage_neighbours[own].tolist()])
        usable = [number for number in ordered if number in self._allowed and number != own]
        return self._chance.sample(usable[: 2 * self._negatives], self._negatives)

    def _shortened(self, number: int, keep: int | None = None) -> Sentences:
        """The passage of this number, every other time without some sentences; the one at `keep` stays."""
        whole = self._sentences[number]
        if self._chance.random() < 0.5:
            return whole
        left = tuple(s for i, s in enumerate(whole) if i == keep or self._chance.random() > 0.3)
        return left or whole


def sentences(text: str) -> Sentences:
    """`text` cut at the ends of its sentences, roughly: abbreviations may end one."""
    return tuple(_SENTENCE_END.split(text))


def sentence_at(text: str, position: int) -> int:
    """The number of the sentence that holds the character at `position`."""
    return sum(match.end() <= position for match in _SENTENCE_END.finditer(text))


def some_words(text: str, dropped: float, chance: random.Random) -> str:
    """`text` without about this share of its words; never empty."""
    return " ".join(word for word in text.split() if chance.random() >= dropped) or text


def without_endings(text: str, cut: float, chance: random.Random) -> str:
    """`text` with about this share of inflected words cut to their stems: questions inflect otherwise."""
    return " ".join(_ENDING.sub("", word) if chance.random() < cut else word for word in text.split())


def opening(question: str) -> str:
    """The first two words: how questions begin."""
    return " ".join(question.split()[:2])
