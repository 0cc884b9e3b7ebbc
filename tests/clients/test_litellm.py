"""`litellm` under every provider name that people point at servers like this one."""

from __future__ import annotations

import numpy as np
import pytest

from tests.clients.conftest import QUERY, TEXTS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def litellm(library, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the network
    litellm = library("litellm")
    monkeypatch.setattr(litellm, "telemetry", False)
    return litellm


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "infinity"])
def test_embeddings(litellm, embedder, vectors, provider):
    base = embedder.base if provider == "infinity" else f"{embedder.base}/v1"
    reply = litellm.embedding(model=f"{provider}/demo", input=TEXTS, api_base=base, api_key="any")
    np.testing.assert_allclose([item["embedding"] for item in reply.data], vectors, atol=1e-6)
    assert reply.usage.prompt_tokens > 0


def test_hugging_face_embeddings(litellm, embedder, vectors):
    reply = litellm.embedding(
        model="huggingface/demo",
        input=TEXTS,
        api_base=f"{embedder.base}/embed",
        api_key="any",
        input_type="feature-extraction",  # or it asks the hub what the model does
    )
    np.testing.assert_allclose([item["embedding"] for item in reply.data], vectors, atol=1e-6)


# Under `infinity` it reads a repeated document as a bare string, which vLLM's and Jina's clients do not.
RERANKING = {
    "hosted_vllm": ("", {}),
    "cohere": ("/v1/rerank", {}),
    "jina_ai": ("/v1/rerank", {}),
    "infinity": ("", {"return_documents": False}),
    "huggingface": ("", {}),
}


@pytest.mark.parametrize("provider", RERANKING)
def test_rerank(litellm, reranker, order, provider):
    path, fields = RERANKING[provider]
    base = reranker.base + path
    reply = litellm.rerank(
        model=f"{provider}/B", query=QUERY, documents=TEXTS, top_n=3, api_base=base, api_key="any", **fields
    )
    assert [result["index"] for result in reply.results] == order
    scores = [result["relevance_score"] for result in reply.results]
    assert scores == sorted(scores, reverse=True)


def test_errors_are_of_the_right_class(litellm, embedder):
    with pytest.raises(litellm.BadRequestError, match=r"input\[1\]"):
        litellm.embedding(model="openai/demo", input=["a", ""], api_base=f"{embedder.base}/v1", api_key="any")
