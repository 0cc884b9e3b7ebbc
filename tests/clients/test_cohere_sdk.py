"""The `cohere` library, its first version and its second."""

from __future__ import annotations

import numpy as np
import pytest

from tests.clients.conftest import QUERY, TEXTS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def cohere(library):
    return library("cohere")


@pytest.fixture(params=["Client", "ClientV2"])
def client_class(cohere, request):
    return getattr(cohere, request.param)


def test_rerank(client_class, reranker, order):
    client = client_class(api_key="any", base_url=reranker.base)
    reply = client.rerank(model="B", query=QUERY, documents=TEXTS)
    assert [result.index for result in reply.results] == order
    scores = [result.relevance_score for result in reply.results]
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)
    assert reply.meta.billed_units.search_units == 1
    best = client.rerank(model="B", query=QUERY, documents=TEXTS, top_n=1)
    assert [result.index for result in best.results] == order[:1]


def test_rerank_v1_shows_documents_on_request(cohere, reranker, order):
    client = cohere.Client(api_key="any", base_url=reranker.base)
    reply = client.rerank(model="B", query=QUERY, documents=TEXTS, return_documents=True)
    assert [result.document.text for result in reply.results] == [TEXTS[i] for i in order]


def test_embed_v2(cohere, embedder, vectors):
    client = cohere.ClientV2(api_key="any", base_url=embedder.base)
    types = ["float", "binary", "ubinary"]
    reply = client.embed(model="demo", texts=TEXTS, input_type="search_document", embedding_types=types)
    np.testing.assert_allclose(reply.embeddings.float_, vectors, atol=1e-6)
    bits = np.packbits(vectors >= 0, axis=1)
    assert np.array_equal(reply.embeddings.ubinary, bits)
    assert np.array_equal(reply.embeddings.binary, bits.astype(int) - 128)
    assert reply.meta.billed_units.input_tokens > 0


def test_embed_v1_in_several_requests(cohere, embedder, vectors):
    """Its client cuts a list into requests of 96 and puts the replies together."""
    client = cohere.Client(api_key="any", base_url=embedder.base)
    reply = client.embed(model="demo", texts=TEXTS * 40)
    np.testing.assert_allclose(reply.embeddings, np.tile(vectors, (40, 1)), atol=1e-5)


def test_errors_are_of_the_right_class(cohere, client_class, embedder, reranker):
    with pytest.raises(cohere.NotFoundError):
        client_class(api_key="any", base_url=reranker.base).rerank(model="x", query="q", documents=["d"])
    with pytest.raises(cohere.BadRequestError) as raised:
        client_class(api_key="any", base_url=reranker.base).rerank(model="B", query=" ", documents=["d"])
    assert "query" in raised.value.body["message"]
