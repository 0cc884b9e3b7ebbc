"""Section G: rerank and score."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases.client import Stack, assert_near_reference, assert_refused, assert_same, message_of
from tests.models.parity import TOLERANCE

NORWAY = ["Bread recipe", "Car repair", "Swedish lakes", "Oslo is the capital of Norway", "Chess rules"]


def test_bc_065_field_names_of_the_rival_apis(b):
    documents = ["green tea", "a truck"]
    named = b.post("/rerank", query="tea", documents=documents)
    assert named.status_code == 200, named.text
    results = named.json()["results"]
    assert {"index", "relevance_score"} <= set(results[0])
    objects = b.rerank("tea", [{"text": text} for text in documents])
    assert [(r["index"], r["relevance_score"]) for r in objects] == [
        (r["index"], r["relevance_score"]) for r in results
    ]
    texts = b.post("/rerank", query="tea", texts=documents)
    assert texts.status_code == 200, texts.text
    assert [(r["index"], r["score"]) for r in texts.json()] == [
        (r["index"], r["relevance_score"]) for r in results
    ]
    assert_refused(b.post("/rerank", query="tea"), "documents", "texts")


@pytest.mark.parametrize(
    ("top_n", "wanted"), [(None, 2), (3, 2), (2, 2), (1, 1), (0, 2), (-1, None), ("2", None), (1.5, None)]
)
def test_bc_066_top_n(b, top_n, wanted):
    documents = ["green tea", "a truck"]
    reply = b.post("/rerank", query="tea", documents=documents, top_n=top_n)
    if wanted is None:
        assert_refused(reply, "top_n", status=[400])
        return
    assert reply.status_code == 200, reply.text
    assert reply.json()["results"] == b.rerank("tea", documents)[:wanted]


def test_bc_068_duplicate_documents(b):
    results = b.rerank("tea", ["green tea", "black tea", "green tea", "green tea"], top_n=4)
    assert len(results) == 4
    green = [r for r in results if r["index"] != 1]
    assert [r["index"] for r in green] == [0, 2, 3]
    assert len({r["relevance_score"] for r in green}) == 1


@pytest.mark.parametrize("documents", [NORWAY, NORWAY[3:4]], ids=["five", "one"])
@pytest.mark.parametrize("kind", ["b", "x", "y"])
def test_bc_070_order_of_rerank_and_of_score(kind, documents, request):
    stack: Stack = request.getfixturevalue(kind)
    scores = stack.score("capital of Norway", documents, raw_scores=True)
    results = stack.rerank("capital of Norway", documents, raw_scores=True)
    shown = [r["relevance_score"] for r in results]
    assert shown == sorted(shown, reverse=True)
    assert [r["index"] for r in results] == np.argsort(-scores, kind="stable").tolist()
    assert_same(np.array(shown), scores[[r["index"] for r in results]], 1e-3)


@pytest.mark.parametrize("kind", ["b", "x"])
def test_bc_071_raw_scores_or_between_0_and_1(kind, request):
    stack: Stack = request.getfixturevalue(kind)
    raw = stack.score("tea", NORWAY, raw_scores=True)
    shown = stack.score("tea", NORWAY)
    np.testing.assert_allclose(shown, 1 / (1 + np.exp(-raw)), atol=1e-4)
    assert_same(stack.score("tea", NORWAY, use_activation=False), raw)
    by_index = {r["index"]: r["relevance_score"] for r in stack.rerank("tea", NORWAY)}
    assert_same(np.array([by_index[i] for i in range(5)]), shown)
    orders = [[r["index"] for r in stack.rerank("tea", NORWAY, raw_scores=flag)] for flag in (True, False)]
    assert orders[0] == orders[1]
    tei = stack.post("/rerank", query="tea", texts=NORWAY, raw_scores=True).json()
    assert_same(np.array([item["score"] for item in tei]), np.sort(raw)[::-1], 1e-3)
    assert stack.get("/info").json()["score_kind"] == "sigmoid"


def test_bc_073_segment_ids_of_pairs(b, reference_b):
    documents = [" ".join([NORWAY[i % 5]] * (1 + 4 * i)) for i in range(20)]
    scores = b.score("capital of Norway", documents, raw_scores=True)
    assert_near_reference(scores, reference_b.logits("capital of Norway", documents))
    assert np.ptp(scores) > 100 * TOLERANCE


def test_bc_074_shapes_of_score(b):
    three = ["green tea", "a truck", "oolong"]

    def scores(text_1, text_2):
        reply = b.post("/score", text_1=text_1, text_2=text_2)
        assert reply.status_code == 200, reply.text
        return [item["score"] for item in reply.json()["data"]]

    one_to_three = scores("best tea", three)
    assert len(one_to_three) == 3
    assert_same(np.array(scores(["best tea"] * 3, three)), np.array(one_to_three))
    assert_same(np.array(scores("best tea", "green tea")), np.array(one_to_three[:1]))
    for left, right in ((three, three[:2]), (three, three[:1]), (three, "green tea")):
        assert_refused(b.post("/score", text_1=left, text_2=right), "text_1", "text_2", status=[400])
    for left, right in (([], three), (three, []), ("best tea", [])):
        assert_refused(b.post("/score", text_1=left, text_2=right), "empty", status=[400])


def test_bc_076_the_wrong_task_for_the_model(e, b, y):
    """An embedder reranks by cosine, which is a right answer; a scorer embeds nothing."""
    cosines = e.embed("tea") @ e.embed(["cup", "road"]).T
    by_index = {r["index"]: r["relevance_score"] for r in e.rerank("tea", ["cup", "road"])}
    assert_same(np.array([by_index[0], by_index[1]]), cosines[0])
    for stack in (b, y):
        reply = stack.post("/v1/embeddings", input="tea")
        assert_refused(reply, "/score", "/rerank", status=[400])
        assert reply.json()["error"]["code"] == "model_not_supported"
        reply = stack.post("/embed", inputs="tea")
        assert reply.status_code == 424
        assert "not an embedding model" in message_of(reply)
