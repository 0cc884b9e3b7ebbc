"""Clients without a library of their own here: what they send, and what they read of the reply.

Dify's two plugins, Open WebUI, Weaviate, Haystack, and Jina's clients.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.clients.conftest import QUERY, TEXTS


@pytest.fixture
def scores(reranker):
    return reranker.score(QUERY, TEXTS)


def test_dify_for_text_embeddings_inference(embedder, reranker, vectors, order):
    """It asks for the kind of model first, sends no model name, and wants texts back."""
    for stack, kind in ((embedder, "embedding"), (reranker, "reranker")):
        info = stack.get("/info").json()
        assert next(iter(info["model_type"])) == kind
        assert info["max_input_length"] > 0
        assert info["max_client_batch_size"] >= 32
    data = embedder.post("/v1/embeddings", input=TEXTS).json()["data"]
    np.testing.assert_allclose([item["embedding"] for item in data], vectors, atol=1e-6)
    ranked = reranker.post("/rerank", query=QUERY, texts=TEXTS, return_text=True).json()
    assert [(item["index"], item["text"]) for item in ranked] == [(i, TEXTS[i]) for i in order]


def test_dify_for_openai_compatible_servers(embedder, reranker, order):
    body = embedder.openai(TEXTS, model="demo", encoding_format="float")
    assert body["usage"]["total_tokens"] > 0
    reply = reranker.post("/rerank", model="B", query=QUERY, documents=TEXTS, top_n=3, return_documents=True)
    results = reply.json()["results"]
    assert [(r["index"], r["document"]["text"]) for r in results] == [(i, TEXTS[i]) for i in order]


def test_open_webui(embedder, reranker, vectors, scores):
    data = embedder.post("/v1/embeddings", input=TEXTS, model="demo").json()["data"]
    np.testing.assert_allclose([item["embedding"] for item in data], vectors, atol=1e-6)
    body = {"model": "B", "query": QUERY, "documents": TEXTS, "top_n": len(TEXTS)}
    results = sorted(reranker.post("/v1/rerank", body).json()["results"], key=lambda result: result["index"])
    np.testing.assert_allclose([r["relevance_score"] for r in results], scores, atol=1e-6)


def test_weaviate_for_openai(embedder, vectors):
    """An error that is a string would not decode there."""
    reply = embedder.post("/v1/embeddings", input=TEXTS, model="demo").json()
    np.testing.assert_allclose([item["embedding"] for item in reply["data"]], vectors, atol=1e-6)
    assert reply.get("error") is None
    assert isinstance(embedder.post("/v1/embeddings", input="").json()["error"], dict)


def test_weaviate_for_hugging_face(embedder, vectors):
    """An error that is an object would not decode there."""
    options = {"use_gpu": False, "use_cache": True, "wait_for_model": True}
    rows = embedder.post("/", inputs=TEXTS, options=options).json()
    np.testing.assert_allclose(rows, vectors, atol=1e-6)
    assert isinstance(embedder.post("/", inputs="", options=options).json()["error"], str)


def test_haystack(reranker, order):
    body = {
        "query": QUERY,
        "texts": TEXTS,
        "raw_scores": False,
        "truncate": True,
        "truncation_direction": "Right",
    }
    ranked = reranker.post("/rerank", body).json()
    assert [item["index"] for item in ranked] == order
    failure = reranker.post("/rerank", body | {"texts": []}).json()
    assert {"error", "error_type"} <= set(failure)


def test_jina_embeddings(embedder, vectors):
    body = {
        "model": "demo",
        "input": [{"text": TEXTS[0]}, *TEXTS[1:]],
        "task": "retrieval.passage",
        "normalized": True,
        "late_chunking": False,
        "embedding_type": "float",
    }
    reply = embedder.http.post("/v1/embeddings", json=body, headers={"accept-encoding": "identity"})
    data = reply.json()["data"]
    np.testing.assert_allclose([item["embedding"] for item in data], vectors, atol=1e-6)
    bits = np.packbits(vectors >= 0, axis=1)
    for kind, wanted in (("ubinary", bits), ("binary", bits.astype(int) - 128)):
        data = embedder.post("/v1/embeddings", body | {"embedding_type": kind}).json()["data"]
        assert np.array_equal([item["embedding"] for item in data], wanted)
    # Its clients look for `detail` when the data is missing, whatever the status.
    assert "input" in embedder.post("/v1/embeddings", body | {"input": []}).json()["detail"]


def test_jina_rerank(reranker, order):
    body = {"model": "B", "query": QUERY, "documents": [{"text": text} for text in TEXTS], "top_n": 2}
    reply = reranker.post("/v1/rerank", body).json()
    assert [(r["index"], r["document"]["text"]) for r in reply["results"]] == [
        (i, TEXTS[i]) for i in order[:2]
    ]
    assert reply["usage"]["total_tokens"] > 0
    shown = reranker.post("/v1/rerank", body | {"return_documents": False}).json()["results"]
    assert not any("document" in result for result in shown)
    assert reranker.post("/v1/rerank", body | {"query": ""}).json()["detail"]
