"""The `perplexityai` library against a small quantising model."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.models import tiny_pplx

pytestmark = pytest.mark.filterwarnings("ignore")

MODEL = "pplx-embed-v1-0.6b"  # the library sends no other names than its own
TEXTS = ["ferry", "A ship that carries people."]


@pytest.fixture(scope="module")
def pooled(tmp_path_factory):
    """A contextual model's folder, the pooled values of `TEXTS` before they are quantised, the reference."""
    model = tiny_pplx.reference_model()
    folder = tiny_pplx.write_contextual_folder(model, tmp_path_factory.mktemp("pplx"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    values = tiny_pplx.pooled_values(model, [tokenizer.encode(text).ids for text in TEXTS])
    return folder, values, model


@pytest.fixture(scope="module")
def stack(fleet, pooled):
    aliases = [flag for name in (MODEL, "pplx-embed-context-v1-0.6b") for flag in ("--alias", name)]
    return fleet.start("pplx", pooled[0], "--any-dimensions", *aliases)


@pytest.fixture
def client(library, stack):
    with library("perplexity").Perplexity(api_key="any", base_url=f"{stack.base}/perplexity") as client:
        yield client


def test_codes_by_default(client, pooled):
    reply = client.embeddings.create(model=MODEL, input=TEXTS)
    codes = np.stack([np.frombuffer(base64.b64decode(item.embedding), np.int8) for item in reply.data])
    tiny_pplx.assert_codes(codes, pooled[1])
    assert [item.index for item in reply.data] == [0, 1]
    assert reply.usage.prompt_tokens == sum(map(len, TEXTS))


def test_signs(client, pooled):
    reply = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="base64_binary")
    bits = np.stack([np.frombuffer(base64.b64decode(item.embedding), np.uint8) for item in reply.data])
    tiny_pplx.assert_bits(bits, pooled[1], bitorder="little")


def test_contextualized(client, pooled):
    documents = [["one chunk", "another"], ["a document of one"]]
    reply = client.contextualized_embeddings.create(model="pplx-embed-context-v1-0.6b", input=documents)
    assert [document.index for document in reply.data] == [0, 1]
    assert [[chunk.index for chunk in document.data] for document in reply.data] == [[0, 1], [0]]
    folder, _, model = pooled
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for document, texts in zip(reply.data, documents, strict=True):
        packed = [base64.b64decode(chunk.embedding) for chunk in document.data]
        wanted = tiny_pplx.chunk_values(model, [tokenizer.encode(text).ids for text in texts])
        tiny_pplx.assert_codes(np.stack([np.frombuffer(row, np.int8) for row in packed]), wanted)


def test_errors_are_of_the_right_class(library, client):
    with pytest.raises(library("perplexity").BadRequestError, match="empty"):
        client.embeddings.create(model=MODEL, input=["a", ""])
