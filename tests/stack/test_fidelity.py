"""Vectors and hits of the running stack against sentence-transformers on the same real weights."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(scope="module")
def passages(xquad):
    return list(xquad.passages)


@pytest.fixture(scope="module")
def questions(xquad):
    return list(xquad.questions[::6])


@pytest.fixture(scope="module")
def our_passages(one_replica, passages):
    return one_replica.embed(passages)


@pytest.fixture(scope="module")
def our_questions(one_replica, questions):
    return one_replica.embed(questions)


def test_vectors_equal_the_reference(one_replica, reference, xquad, passages, our_passages):
    more_questions = list(xquad.questions[:260])
    ours = np.concatenate([our_passages, one_replica.embed(more_questions)])
    theirs = reference.encode(passages + more_questions)
    assert len(ours) == 500
    cosines = (ours * theirs).sum(axis=1)
    assert cosines.min() >= 0.99999
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-5)


def test_retrieval_finds_what_the_reference_finds(
    reference, xquad, passages, questions, our_passages, our_questions
):
    answers = np.array(xquad.answers[::6])
    ours = ranks(our_questions, our_passages, answers)
    theirs = ranks(reference.encode(questions), reference.encode(passages), answers)
    assert len(ours) == 199
    np.testing.assert_array_equal(ours, theirs)
    assert round(float((ours == 1).mean()), 3) == 0.859
    assert round(float(np.where(ours <= 10, 1 / ours, 0).mean()), 3) == 0.912


def ranks(questions, passages, answers):
    """The rank, from 1, of each question's own passage."""
    scores = questions @ passages.T
    own = scores[np.arange(len(answers)), answers]
    return 1 + (scores > own[:, None]).sum(axis=1)


def test_a_batch_equals_its_items_alone(one_replica, passages, our_passages):
    for i in (0, 7, 99, 239):
        np.testing.assert_allclose(one_replica.embed([passages[i]])[0], our_passages[i], atol=1e-5)


def test_two_replicas_equal_one_in_the_callers_order(
    two_replicas, passages, questions, our_passages, our_questions
):
    mixed = passages + questions
    np.testing.assert_allclose(
        two_replicas.embed(mixed), np.concatenate([our_passages, our_questions]), atol=1e-5
    )


def test_scores_of_a_bi_encoder_are_cosines(one_replica, passages, questions, our_passages, our_questions):
    status, _, reply = one_replica.call("/score", {"query": questions[0], "documents": passages[:9]})
    assert status == 200
    assert [item["index"] for item in reply["data"]] == list(range(9))
    scores = [item["score"] for item in reply["data"]]
    np.testing.assert_allclose(scores, our_passages[:9] @ our_questions[0], atol=1e-5)


def test_counts_are_tokens_after_truncation(one_replica, reference, passages):
    status, headers, reply = one_replica.call("/v1/embeddings", {"input": [passages[0], "word " * 1000]})
    assert status == 200
    length = len(reference.tokenizer(passages[0], truncation=True, max_length=256)["input_ids"])
    assert reply["usage"] == {"prompt_tokens": length + 256, "total_tokens": length + 256}
    cut_alone = length == 256
    assert headers["x-truncated-inputs"] == ("2" if cut_alone else "1")
