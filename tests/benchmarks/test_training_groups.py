"""Nothing that is held out is trained on, and the own passage's crop holds the answer."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.training_groups import (
    SHORTEST_CROP,
    Split,
    crop,
    in_held_out_article,
    steps_of,
    training_groups,
)
from benchmarks.xquad import Xquad


@pytest.fixture(scope="module")
def data(shared) -> Xquad:
    return Xquad.load("en", shared / "data" / "xquad")


@pytest.fixture(scope="module")
def candidates(data) -> np.ndarray:
    """Ten passages a question, the own one among most of them."""
    generator = np.random.default_rng(2)
    rows = [generator.choice(len(data.passages), 10, replace=False) for _ in data.questions]
    for row, own in zip(rows, data.answers, strict=True):
        if own not in row:
            row[0] = own
    return np.stack(rows)


def test_articles_are_held_out_as_a_whole(data):
    split = Split.by_article(data)
    articles = [{data.articles[data.answers[q]] for q in part} for part in (split.training, split.held_out)]
    assert not articles[0] & articles[1]
    assert len(articles[0] | articles[1]) == 48
    assert len(split.training) + len(split.held_out) == len(data.questions)


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_groups_hold_training_passages_with_the_own_one_first(data, candidates, progress):
    split = Split.by_article(data)
    groups = training_groups(data, split, candidates, 3, progress, random.Random(0))
    asked = {data.questions[q]: q for q in split.training}
    held_out = [text for i, text in enumerate(data.passages) if in_held_out_article(data, i)]
    assert len(groups) == len(split.training)
    for group in groups:
        own = data.passages[data.answers[asked[group.question]]]
        assert group.passages[0] in own
        assert not any(passage in own for passage in group.passages[1:])
        assert not any(passage in text for passage in group.passages for text in held_out)


def test_a_crop_holds_its_position_and_whole_words():
    words = [f"word{i}" for i in range(200)]
    text, chance = " ".join(words), random.Random(1)
    for position in range(0, len(text), 7):
        part = crop(text, position, SHORTEST_CROP, chance)
        start = text.index(part)
        assert start <= position <= start + len(part)
        assert set(part.split()) <= set(words)
        assert SHORTEST_CROP <= len(part) <= SHORTEST_CROP + 2 * len("word199 ")
    assert crop(text, 5, len(text), chance) == text


def test_steps_hold_every_group_once(data, candidates):
    groups = training_groups(data, Split.by_article(data), candidates, 2, 0.0, random.Random(0))
    steps = list(steps_of(groups, 16))
    assert sorted(id(g) for step in steps for g in step) == sorted(map(id, groups))
    assert all(len(step) <= 16 for step in steps)
    assert len(steps) == -(-len(groups) // 16)
