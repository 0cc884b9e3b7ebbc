"""A model that quantises through all three tiers, tiny and random, against transformers and the formulas."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import Qwen3Model

from ivy_gateway.local_stack import running_stack
from tests.models.tiny_pplx import (
    DIMENSIONS,
    assert_bits,
    assert_codes,
    pooled_values,
    reference_model,
    write_folder,
)
from tests.stack.conftest import Client

TEXTS = ["ferry", "A ship that carries people.", "Zürich 東京 🙂", "x"]


@pytest.fixture(scope="module")
def reference() -> Qwen3Model:
    return reference_model()


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    return write_folder(reference, tmp_path_factory.mktemp("pplx"))


@pytest.fixture(scope="module")
def client(folder) -> Iterator[Client]:
    with running_stack(str(folder), "--device", "cpu", "--any-dimensions") as stack:
        yield Client(stack)


@pytest.fixture(scope="module")
def values(reference, folder) -> np.ndarray:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return pooled_values(reference, [tokenizer.encode(text).ids for text in TEXTS])


def embeddings(client: Client, **fields) -> list:
    status, _, reply = client.call("/v1/embeddings", {"input": TEXTS, **fields})
    assert status == 200, reply
    return [item["embedding"] for item in reply["data"]]


def unpacked(client: Client, dtype, **fields) -> np.ndarray:
    return np.stack([np.frombuffer(base64.b64decode(row), dtype) for row in embeddings(client, **fields)])


def test_codes(client, values):
    codes = np.array(embeddings(client))
    assert_codes(codes, values)
    assert np.array_equal(unpacked(client, np.int8, encoding_format="base64_int8"), codes)
    assert np.array_equal(client.call("/embed", {"inputs": TEXTS})[2], codes)
    short = unpacked(client, np.int8, encoding_format="base64_int8", dimensions=20)
    assert np.array_equal(short, codes[:, :20])


def test_bits(client, values):
    bits = unpacked(client, np.uint8, encoding_format="base64_binary")
    assert bits.shape == (len(TEXTS), DIMENSIONS // 8)
    assert_bits(bits, values, bitorder="little")
    assert_bits(np.array(embeddings(client, encoding_format="ubinary")), values)
    assert np.array_equal(
        unpacked(client, np.uint8, encoding_format="base64_binary", dimensions=16), bits[:, :2]
    )


def test_info(client):
    info = client.call("/info")[2]
    assert (info["dimensions"], info["outputs"]) == (DIMENSIONS, ["own", "int8", "bits", "tokens"])
