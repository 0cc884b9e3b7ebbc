"""LlamaIndex's integrations for text-embeddings-inference."""

from __future__ import annotations

import numpy as np
import pytest

from tests.clients.conftest import QUERY, TEXTS

pytestmark = pytest.mark.filterwarnings("ignore")


def test_embeddings(library, embedder, vectors):
    module = library("llama_index.embeddings.text_embeddings_inference")
    model = module.TextEmbeddingsInference(model_name="demo", base_url=embedder.base, embed_batch_size=2)
    np.testing.assert_allclose(model.get_text_embedding_batch(TEXTS), vectors, atol=1e-6)
    np.testing.assert_allclose(model.get_query_embedding(TEXTS[0]), vectors[0], atol=1e-6)


def test_rerank(library, reranker, order):
    module = library("llama_index.postprocessor.tei_rerank")
    schema = library("llama_index.core.schema")
    nodes = [schema.NodeWithScore(node=schema.TextNode(text=text), score=0.0) for text in TEXTS]
    model = module.TextEmbeddingInference(base_url=reranker.base, top_n=2, model_name="B")
    found = model.postprocess_nodes(nodes, query_str=QUERY)
    assert [node.text for node in found] == [TEXTS[i] for i in order[:2]]
