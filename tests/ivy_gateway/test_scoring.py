"""Score arithmetic, alone."""

from __future__ import annotations

import numpy as np
import pytest

from ivy_gateway.scoring import activate, cosine, distinct, normalized, sigmoid


def test_sigmoid_is_exact_at_both_ends_and_never_overflows():
    logits = np.array([-1e30, -100, -1, 0, 1, 100, 1e30], np.float32)
    scores = sigmoid(logits)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, [0, 0, 0.26894143, 0.5, 0.73105857, 1, 1], atol=1e-7)


@pytest.mark.parametrize(
    ("name", "expected"), [("sigmoid", 0.880797), ("softmax", 0.880797), ("tanh", 0.9640276)]
)
def test_activation_by_name(name, expected):
    assert activate(np.array([2.0], np.float32), name)[0] == pytest.approx(expected)


def test_softmax_shares_out_every_row_and_never_overflows():
    shares = activate(np.array([[0, np.log(3)], [-1e30, 1e30], [100, 100]], np.float32), "softmax")
    assert shares.dtype == np.float32
    np.testing.assert_allclose(shares, [[0.25, 0.75], [0, 1], [0.5, 0.5]], atol=1e-6)
    np.testing.assert_allclose(activate(np.array([[2.0]], np.float32), "softmax"), [[0.880797]], atol=1e-6)


def test_normalized_rows_have_length_one_and_a_zero_row_stays():
    rows = normalized(np.array([[3, 4], [0, 0], [1e-20, 0]], np.float32))
    np.testing.assert_allclose(rows[0], [0.6, 0.8], rtol=1e-6)
    assert not rows[1].any()
    assert np.isfinite(rows).all()


def test_cosine_stays_within_its_bounds():
    vectors = np.random.default_rng(0).standard_normal((100, 5)).astype(np.float32)
    assert cosine(vectors, vectors).max() <= 1
    np.testing.assert_allclose(cosine(vectors, -3 * vectors), -1, atol=1e-6)
    assert cosine(np.eye(2, dtype=np.int8)[:1], np.eye(2, dtype=np.int8)[1:])[0] == 0


def test_distinct_keeps_first_places():
    firsts, places = distinct(["b", "a", "b", "c", "a"])
    assert firsts == [0, 1, 3]
    assert places.tolist() == [0, 1, 0, 2, 1]
