"""/perplexity/v1/embeddings: codes by default, bits on demand, never floats."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from tests.ivy_gateway.fake_tulip import FakeTulip, embedding_row, quantized_row, quantizing

TEXTS = ["plum jam", "oak shelf", "a ferry to the island"]
ROUTE = "/perplexity/v1/embeddings"
PUBLIC_NAME = "pplx-embed-v1-0.6b"


def decoded(reply, dtype):
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [(item["index"], item["object"]) for item in data] == [(i, "embedding") for i in range(len(data))]
    return np.stack([np.frombuffer(base64.b64decode(item["embedding"]), dtype) for item in data])


@pytest.mark.parametrize("fields", [{}, {"encoding_format": None}, {"encoding_format": "base64_int8"}])
async def test_codes_are_the_default(start_gateway, ids_of, fields):
    async with start_gateway(quantizing(), aliases=(PUBLIC_NAME,)) as gateway:
        reply = await gateway.post(ROUTE, input=TEXTS, model=PUBLIC_NAME, normalize=True, **fields)
        np.testing.assert_array_equal(decoded(reply, np.int8), [quantized_row(ids_of(t)) for t in TEXTS])
        tokens = sum(len(ids_of(text)) for text in TEXTS)
        assert reply.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        assert reply.json()["object"] == "list"
        lone = await gateway.post(ROUTE, input=TEXTS[0])
        np.testing.assert_array_equal(decoded(lone, np.int8), [quantized_row(ids_of(TEXTS[0]))])


@pytest.mark.parametrize("tulip", [FakeTulip, quantizing])
async def test_bits_start_at_the_least_significant(start_gateway, ids_of, tulip):
    async with start_gateway(tulip()) as gateway:
        packed = decoded(await gateway.post(ROUTE, input=TEXTS, encoding_format="base64_binary"), np.uint8)
        signs = np.stack([embedding_row(ids_of(text)) for text in TEXTS]) >= 0
        np.testing.assert_array_equal(np.unpackbits(packed, axis=1, bitorder="little"), signs)


async def test_cut_codes_are_the_first_codes(start_gateway, ids_of):
    async with start_gateway(quantizing(), any_dimensions=True) as gateway:
        codes = decoded(await gateway.post(ROUTE, input=TEXTS, dimensions=3), np.int8)
        np.testing.assert_array_equal(codes, [quantized_row(ids_of(text))[:3] for text in TEXTS])


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": "a"}, "encoding_format", "float32"),  # a model without codes
        ({"input": "a", "encoding_format": "float"}, "encoding_format", "one of base64_int8, base64_binary"),
        ({"input": "a", "encoding_format": ["base64_int8"]}, "encoding_format", "one of base64_int8"),
        ({"encoding_format": "base64_binary"}, "input", "required"),
        ({"input": ["a", ""], "encoding_format": "base64_binary"}, "input[1]", "input[1]"),
        ({"input": "a", "dimensions": 4, "encoding_format": "base64_binary"}, "dimensions", "multiple of 8"),
        ({"input": "a", "model": PUBLIC_NAME}, "model", "served: minilm"),
    ],
)
async def test_refusals_name_the_field(start_gateway, body, param, words):
    async with start_gateway(any_dimensions=True) as gateway:
        reply = await gateway.post(ROUTE, **body)
        assert reply.status_code == (404 if param == "model" else 400)
        assert reply.json()["error"]["param"] == param
        assert words in reply.json()["detail"]


async def test_unknown_routes_answer_in_openais_shape(start_gateway):
    async with start_gateway() as gateway:
        reply = await gateway.post("/perplexity/v1/embedding")
        assert reply.status_code == 404
        assert ROUTE in reply.json()["error"]["message"]
