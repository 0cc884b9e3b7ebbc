"""Nothing that is held out is trained on, and the own passage comes first with the sentence that answers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.training_groups import (
    Group,
    GroupSource,
    Split,
    sentence_at,
    sentences,
    some_words,
    without_endings,
)
from benchmarks.xquad import Xquad

NEGATIVES = 4


@pytest.fixture(scope="module")
def data(shared) -> Xquad:
    return Xquad.load("en", shared / "data" / "xquad")


@pytest.fixture(scope="module")
def split(data) -> Split:
    return Split.by_article(data, validate=True)


@pytest.fixture
def source(data, split) -> GroupSource:
    """All passages in random order stand for the nearest ones."""
    generator = np.random.default_rng(2)
    candidates = np.stack([generator.permutation(len(data.passages))[:10] for _ in data.questions])
    neighbours = np.stack([generator.permutation(len(data.passages)) for _ in data.passages])
    return GroupSource(data, split, candidates, neighbours, NEGATIVES, random.Random(0))


def articles_of(data: Xquad, questions: np.ndarray) -> set[int]:
    return {data.articles[data.answers[q]] for q in questions}


def test_articles_are_held_out_as_a_whole(data, split):
    parts = [articles_of(data, part) for part in (split.training, split.validation, split.held_out)]
    assert [len(part) for part in parts] == [28, 10, 10]
    assert len(set.union(*parts)) == 48
    everything = np.concatenate((split.training, split.validation, split.held_out))
    assert sorted(everything) == list(range(len(data.questions)))


def test_without_validation_its_articles_are_trained_on(data, split):
    other = Split.by_article(data)
    assert len(other.validation) == 0
    assert np.array_equal(other.held_out, split.held_out)
    assert sorted(other.training) == sorted((*split.training, *split.validation))


def assert_of_training_passages(data: Xquad, split: Split, group: Group) -> None:
    allowed = set(split.passages(data)[0].tolist())
    assert set(group.numbers) <= allowed
    assert len(set(group.numbers)) == len(group.passages) == NEGATIVES + 1
    for number, passage in zip(group.numbers, group.passages, strict=True):
        assert passage
        assert all(sentence in data.passages[number] for sentence in passage)


def test_groups_of_questions(data, split, source):
    groups = source.draw(len(split.training), cloze_share=0)
    answers = {data.questions[q]: data.answers[q] for q in split.training}
    whole = [group for group in groups if group.query in answers]
    assert len(whole) > len(groups) / 3
    assert all(answers[group.query] == group.numbers[0] for group in whole)
    for group in groups:
        assert_of_training_passages(data, split, group)
    seen = sorted(group.numbers[0] for group in groups)
    assert seen == sorted(data.answers[q] for q in split.training)  # every question once


def test_the_own_passage_keeps_the_sentence_that_answers(data, split, source):
    asked = {data.questions[q]: q for q in split.training}
    for group in source.draw(500, cloze_share=0):
        if (question := asked.get(group.query)) is not None:
            text = data.passages[data.answers[question]]
            answering = sentences(text)[sentence_at(text, data.answer_starts[question])]
            assert answering in group.passages[0]


def test_groups_of_sentences(data, split, source):
    groups = source.draw(300, cloze_share=1)
    assert len({group.query for group in groups}) > 250
    for group in groups:
        assert_of_training_passages(data, split, group)
        stated = {word.rstrip(".!?") for word in data.passages[group.numbers[0]].split()}
        for word in group.query.rstrip("?").split()[2:]:  # after the words of a question
            assert any(each.startswith(word.rstrip(".!?")) for each in stated)


def test_sentences_hold_all_words_and_the_character_asked_for(data):
    for text in data.passages[:60]:
        parts = sentences(text)
        assert " ".join(parts).split() == text.split()
        for position in range(0, len(text), 50):
            if not text[position].isspace():
                word = text[position:].split()[0]
                assert word in parts[sentence_at(text, position)]


def test_endings_are_cut_off():
    chance = random.Random(0)
    assert without_endings("building walked us quickly his", 1.0, chance) == "build walk us quick his"
    assert without_endings("building walked", 0.0, chance) == "building walked"


def test_some_words_are_never_none():
    chance = random.Random(0)
    text = " ".join(map(str, range(1000)))
    left = some_words(text, 0.3, chance).split()
    assert 600 < len(left) < 800
    assert sorted(left, key=int) == left
    assert some_words("one", 1.0, chance) == "one"
