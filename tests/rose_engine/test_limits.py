"""Impossible sequences are refused, naming value and bound."""

from __future__ import annotations

import pytest

from rose_engine.errors import InvalidSequence
from rose_engine.limits import EngineLimits
from tests.rose_engine.samples import sequence

LIMITS = EngineLimits(
    max_length=4, vocabulary_size=10, num_segments=2, max_batch_tokens=16, max_batch_sequences=4
)


@pytest.mark.parametrize(
    "item",
    [sequence(0), sequence(9, 9, 9, 9), sequence(1, 2, segments=[0, 1])],
    ids=["one", "long", "segments"],
)
def test_what_fits_passes(item):
    LIMITS.check(item)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (sequence(), "at least one token"),
        (sequence(1, 1, 1, 1, 1), "5 tokens; the model takes at most 4"),
        (sequence(1, 10), "token id 10 is outside 0 to 9"),
        (sequence(-1, 3), "token id -1 is outside 0 to 9"),
        (sequence(1, segments=[2]), "segment id 2 is outside 0 to 1"),
        (sequence(1, segments=[-3]), "segment id -3 is outside 0 to 1"),
        (sequence(1, 2, segments=[0]), "1 segment ids, 2 tokens"),
    ],
)
def test_what_does_not_fit_is_named(item, message):
    with pytest.raises(InvalidSequence, match=message):
        LIMITS.check(item)
