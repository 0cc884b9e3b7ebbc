"""Several vectors per input through all three tiers: chunks of documents, and tokens."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel, AutoTokenizer, Qwen3Model

from ivy_gateway.local_stack import running_stack
from tests.models.tiny_pplx import (
    DIMENSIONS,
    SEPARATOR,
    assert_bits,
    assert_codes,
    chunk_values,
    reference_model,
    states,
    write_contextual_folder,
)
from tests.stack.conftest import Client

DOCUMENTS = [["ferry", "A ship that carries people.", "x"], ["Zürich 東京 🙂"], ["a <|endoftext|> b", "c"]]
ROUTE = "/v1/contextualizedembeddings"


@pytest.fixture(scope="module")
def reference() -> Qwen3Model:
    return reference_model()


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    return write_contextual_folder(reference, tmp_path_factory.mktemp("context"))


@pytest.fixture(scope="module")
def client(folder) -> Iterator[Client]:
    with running_stack(str(folder), "--device", "cpu") as stack:
        yield Client(stack)


def chunk_ids(folder, text: str) -> list[int]:
    """Every byte is a token; no spelling of the separator becomes one."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = [i for character in text for i in tokenizer.encode(character).ids]
    assert SEPARATOR not in found
    return found


def embeddings(client: Client, **fields) -> list[list]:
    status, _, reply = client.call(ROUTE, fields)
    assert status == 200, reply
    return [[chunk["embedding"] for chunk in document["data"]] for document in reply["data"]]


def test_chunks_are_embedded_in_view_of_their_document(client, reference, folder):
    codes = embeddings(client, input=DOCUMENTS)
    bits = embeddings(client, input=DOCUMENTS, encoding_format="base64_binary")
    numbers = embeddings(client, inputs=DOCUMENTS)
    for document, packed, signs, plain in zip(DOCUMENTS, codes, bits, numbers, strict=True):
        values = chunk_values(reference, [chunk_ids(folder, text) for text in document])
        rows = np.stack([np.frombuffer(base64.b64decode(row), np.int8) for row in packed])
        assert_codes(rows, values)
        assert np.array_equal(rows, plain)
        assert_bits(np.stack([np.frombuffer(base64.b64decode(b), np.uint8) for b in signs]), values, "little")


def test_a_query_is_a_document_of_one_chunk(client):
    (((row,),),) = (embeddings(client, inputs=[["ferry"]]),)
    assert row == client.call("/embed", {"inputs": "ferry"})[2][0]


def test_an_empty_chunk_is_named(client):
    status, _, reply = client.call(ROUTE, {"input": [["a", "b"], ["c", ""]]})
    assert (status, reply["error"]["param"]) == (400, "input[1][1]")


def test_rows_of_tokens_are_not_quantised(client, reference, folder):
    rows = client.call("/embed_all", {"inputs": ["ferry", "x"]})[2]
    for got, text in zip(rows, ("ferry", "x"), strict=True):
        assert np.shape(got) == (len(text), DIMENSIONS)
        np.testing.assert_allclose(got, states(reference, chunk_ids(folder, text)), atol=1e-5)


@torch.inference_mode()
def test_rows_of_tokens_equal_transformers(one_replica, minilm):
    texts = ["A ferry.", "word " * 300, "Two boats lie at the old pier; the third is out at sea."]
    tokenizer, model = AutoTokenizer.from_pretrained(minilm), AutoModel.from_pretrained(minilm)
    rows = one_replica.call("/embed_all", {"inputs": texts})[2]
    shown = one_replica.call("/pooling", {"input": texts, "task": "token_embed", "use_activation": False})[2]
    for got, item, text in zip(rows, shown["data"], texts, strict=True):
        encoded = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        states_TD = model.float()(**encoded).last_hidden_state[0]
        np.testing.assert_allclose(got, states_TD, atol=2e-5)
        np.testing.assert_array_equal(item["data"], got)
