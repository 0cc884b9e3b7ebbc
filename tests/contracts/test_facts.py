"""The comparison behind the tables: it must see every kind of difference."""

from __future__ import annotations

import pytest

from tests.contracts.facts import ANY, NULLABLE_INT, mismatch

ITEM = {"index": int, "score": float, "text?": str}
SAME = [
    (1, int),
    (1, float),
    ([1.5, 2], [float]),
    (["a", 1], [str, int]),
    ({"index": 0, "score": 0.5}, ITEM),
    ({"index": 0, "score": 0.5, "text": "x"}, ITEM),
    (None, NULLABLE_INT),
    ({"a": [object()]}, {"a": ANY}),
]
DIFFERENT = [
    (True, int, "body is bool"),
    ("1", float, "body is str"),
    ([], [float], "empty"),
    ([1, 2, 3], [int, int], "has 3 items"),
    ([1, None], [int], "body[1]"),
    ({"index": 0}, ITEM, "has the keys"),
    ({"index": 0, "score": 1, "extra": 2}, ITEM, "extra"),
    ({"index": 0, "score": 1, "text": None}, ITEM, "body.text"),
    ("x", NULLABLE_INT, "body is str"),
    ({"code": 400}, {"code": 422}, "400"),
]


@pytest.mark.parametrize(("value", "shape"), SAME, ids=str)
def test_same(value, shape):
    assert mismatch(value, shape, "body") is None


@pytest.mark.parametrize(("value", "shape", "words"), DIFFERENT, ids=str)
def test_different(value, shape, words):
    assert words in mismatch(value, shape, "body")
