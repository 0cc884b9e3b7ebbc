"""The `openai` library, synchronous and asynchronous, and LangChain on top of it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.clients.conftest import TEXTS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def openai(library):
    return library("openai")


@pytest.fixture
def client(openai, embedder):
    with openai.OpenAI(base_url=f"{embedder.base}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("fields", [{}, {"encoding_format": "float"}], ids=["default", "float"])
def test_embeddings(client, vectors, fields):
    reply = client.embeddings.create(model="demo", input=TEXTS, **fields)
    np.testing.assert_allclose([item.embedding for item in reply.data], vectors, atol=1e-6)
    assert [item.index for item in reply.data] == [0, 1, 2]
    assert reply.model == "demo"
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 0


async def test_embeddings_asynchronously(openai, embedder, vectors):
    async with openai.AsyncOpenAI(base_url=f"{embedder.base}/v1", api_key="any") as client:
        reply = await client.embeddings.create(model="demo", input=TEXTS)
    np.testing.assert_allclose([item.embedding for item in reply.data], vectors, atol=1e-6)


def test_one_text(client, vectors):
    reply = client.embeddings.create(model="demo", input=TEXTS[0])
    np.testing.assert_allclose(reply.data[0].embedding, vectors[0], atol=1e-6)


def test_the_list_of_models(client):
    assert [model.id for model in client.models.list()] == ["demo"]


def test_errors_are_shown_with_all_their_parts(openai, client):
    with pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(model="demo", input=["a", ""])
    error = raised.value
    assert (error.type, error.param) == ("invalid_request_error", "input[1]")
    assert "input[1]" in error.message
    assert error.request_id
    with pytest.raises(openai.NotFoundError) as raised:
        client.embeddings.create(model="gpt-4", input="a")
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="demo", input="a", dimensions=100)


def test_ids_of_another_vocabulary_are_refused_with_the_way_out(openai, client):
    """What LangChain sends unless told otherwise: ids of cl100k_base."""
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        client.embeddings.create(model="demo", input=[[791, 76007, 11141], [32, 8448]])


def test_extra_fields_reach_the_server(openai, client):
    with pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(model="demo", input="word " * 600, extra_body={"truncate": False})
    assert raised.value.code == "context_length_exceeded"


def test_langchain(library, embedder, vectors):
    langchain = library("langchain_openai")
    embeddings = langchain.OpenAIEmbeddings(
        model="demo", base_url=f"{embedder.base}/v1", api_key="any", check_embedding_ctx_length=False
    )
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), vectors, atol=1e-6)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[0]), vectors[0], atol=1e-6)
