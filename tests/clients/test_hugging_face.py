"""`huggingface_hub.InferenceClient` with the server's own address as the model."""

from __future__ import annotations

import numpy as np
import pytest

from tests.clients.conftest import TEXTS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def hub(library):
    return library("huggingface_hub")


def test_feature_extraction(hub, embedder, vectors):
    client = hub.InferenceClient(model=embedder.base)
    np.testing.assert_allclose(client.feature_extraction(TEXTS[0]), vectors[:1], atol=1e-6)
    given = client.feature_extraction(TEXTS, normalize=False, truncate=True, truncation_direction="right")
    np.testing.assert_allclose(given, vectors, atol=1e-6)


async def test_feature_extraction_asynchronously(hub, embedder, vectors):
    async with hub.AsyncInferenceClient(model=f"{embedder.base}/embed") as client:
        np.testing.assert_allclose(await client.feature_extraction(TEXTS), vectors, atol=1e-6)


def test_sentence_similarity(hub, embedder, vectors):
    client = hub.InferenceClient(model=embedder.base)
    scores = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:])
    np.testing.assert_allclose(scores, vectors[1:] @ vectors[0], atol=1e-5)


def test_text_classification(hub, reranker):
    client = hub.InferenceClient(model=reranker.base)
    (label,) = client.text_classification(TEXTS[0])
    assert label.label == "LABEL_0"
    assert 0 <= label.score <= 1


def test_information(hub, embedder):
    client = hub.InferenceClient(provider="hf-inference")
    info = client.get_endpoint_info(model=embedder.base)
    assert client.health_check(model=embedder.base)
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}


def test_errors_are_shown(hub, embedder):
    client = hub.InferenceClient(model=embedder.base)
    with pytest.raises(hub.errors.HfHubHTTPError, match="unknown prompt name"):
        client.feature_extraction(TEXTS[0], prompt_name="nope")
