"""Ranks and shares that the reports of quality rest on."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.retrieval import Retrieval, nearest, ranks_among, ranks_among_all

PASSAGES = np.eye(4, dtype=np.float32)
QUESTIONS = np.array([[0.9, 0.5, 0.1, 0], [0.1, 0.2, 0.3, 0.4], [1, 1, 0, 0]], np.float32)


def test_ranks_count_the_passages_that_score_higher():
    answers = np.array([1, 0, 1])
    np.testing.assert_array_equal(ranks_among_all(QUESTIONS, PASSAGES, answers), [2, 4, 1])


def test_nearest_is_best_first():
    np.testing.assert_array_equal(nearest(QUESTIONS, PASSAGES, 2), [[0, 1], [3, 2], [0, 1]])


def test_a_rank_among_candidates_is_zero_where_the_passage_is_none():
    candidates = np.array([[5, 7, 9], [5, 7, 9], [5, 7, 9]])
    scores = np.array([[0.1, 0.3, 0.2]] * 3)
    np.testing.assert_array_equal(ranks_among(candidates, scores, np.array([5, 7, 8])), [3, 1, 0])


def test_no_rank_beyond_ten_and_no_missing_one_counts():
    found = Retrieval.of_ranks(np.array([1, 2, 10, 11, 0]))
    assert found.questions == 5
    assert found.hit_at_1 == pytest.approx(1 / 5)
    assert found.mrr_at_10 == pytest.approx((1 + 1 / 2 + 1 / 10) / 5)
