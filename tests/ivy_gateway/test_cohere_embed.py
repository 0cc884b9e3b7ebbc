"""/v1/embed and /v2/embed: every type read back, reply shapes, truncation, prompts, refusals."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from protos.tulip.v1 import inference_pb2 as pb
from tests.ivy_gateway.fake_tulip import FakeTulip, embedding_row, quantized_row, quantizing, sign_bits

TEXTS = ["plum jam", "oak shelf", "a ferry to the island"]
FLOAT_TYPES = ["float", "base64", "binary", "ubinary"]


@pytest.fixture
def rows(ids_of):
    return np.stack([embedding_row(ids_of(text)) for text in TEXTS])


async def embed(gateway, path="/v2/embed", **fields):
    body = {"texts": TEXTS, "model": "minilm", "input_type": "classification"} | fields
    reply = await gateway.post(path, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("path", ["/v1/embed", "/v2/embed"])
async def test_every_type_of_a_model_with_floats_in_one_pass(start_gateway, rows, path):
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    async with start_gateway() as gateway:
        reply = await embed(gateway, path, embedding_types=FLOAT_TYPES)
        assert reply["response_type"] == "embeddings_by_type"
        assert list(reply["embeddings"]) == FLOAT_TYPES
        got = reply["embeddings"]
        np.testing.assert_allclose(got["float"], units, rtol=1e-6)
        packed = [np.frombuffer(base64.b64decode(item), "<f4") for item in got["base64"]]
        np.testing.assert_array_equal(packed, np.array(got["float"], np.float32))
        np.testing.assert_array_equal(np.unpackbits(np.array(got["ubinary"], np.uint8), axis=1), rows >= 0)
        np.testing.assert_array_equal(np.array(got["binary"]) + 128, got["ubinary"])
        assert [r.output for r in gateway.tulips[0].requests] == [pb.OUTPUT_OWN]


async def test_codes_and_bits_of_a_model_that_quantises(start_gateway, ids_of):
    codes = np.stack([quantized_row(ids_of(text)) for text in TEXTS])
    async with start_gateway(quantizing()) as gateway:
        got = (await embed(gateway, embedding_types=["int8", "uint8", "ubinary"]))["embeddings"]
        assert got["int8"] == codes.tolist()
        assert got["uint8"] == (codes.astype(int) + 128).tolist()
        assert got["ubinary"] == [sign_bits(ids_of(text)).tolist() for text in TEXTS]
        outputs = [r.output for r in gateway.tulips[0].requests]
        assert outputs == [pb.OUTPUT_INT8, pb.OUTPUT_BITS]


@pytest.mark.parametrize("kind", ["int8", "uint8"])
async def test_codes_of_a_model_with_floats_are_refused(start_gateway, kind):
    async with start_gateway() as gateway:
        reply = await gateway.post("/v2/embed", texts=TEXTS, embedding_types=["float", kind])
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "embedding_types"
        assert not gateway.tulips[0].requests


async def test_without_types_the_first_version_is_bare_floats(start_gateway, ids_of):
    async with start_gateway() as gateway:
        first = await embed(gateway, "/v1/embed")
        second = await embed(gateway, "/v2/embed")
        assert first["response_type"] == "embeddings_floats"
        assert second["response_type"] == "embeddings_by_type"
        assert second["embeddings"] == {"float": first["embeddings"]}
        tokens = sum(len(ids_of(text)) for text in TEXTS)
        for version, reply in (("1", first), ("2", second)):
            assert reply["texts"] == TEXTS
            assert reply["meta"] == {
                "api_version": {"version": version},
                "billed_units": {"input_tokens": tokens},
            }
            assert reply["id"]


async def test_inputs_of_text_parts_are_one_vector_each(start_gateway):
    async with start_gateway() as gateway:
        inputs = [
            {"content": [{"type": "text", "text": "plum jam"}]},
            {"content": [{"type": "text", "text": "oak"}, {"type": "text", "text": "shelf"}]},
        ]
        got = await embed(gateway, texts=None, inputs=inputs)
        assert got["embeddings"] == (await embed(gateway, texts=["plum jam", "oak\nshelf"]))["embeddings"]


@pytest.mark.parametrize(
    ("fields", "tokens", "kept"),
    [
        ({"truncate": "END", "max_tokens": 5}, 5, "first"),
        ({"truncate": "START", "max_tokens": 5}, 5, "last"),
        ({"max_tokens": 5}, 5, "first"),
        ({"truncate": "END"}, 256, None),
        ({"truncate": "START"}, 256, None),
        ({}, 256, None),
        ({"truncate": None, "max_tokens": 1000}, 256, None),
    ],
)
async def test_truncation(start_gateway, fields, tokens, kept):
    async with start_gateway() as gateway:
        long = "tea tea tea " + "jam " * 300 + "oak oak oak"
        reply = await embed(gateway, texts=[long], **fields)
        assert reply["meta"]["billed_units"]["input_tokens"] == tokens
        if kept:
            text = "tea tea tea" if kept == "first" else "oak oak oak"
            assert reply["embeddings"] == (await embed(gateway, texts=[text]))["embeddings"]


async def test_truncate_none_refuses(start_gateway):
    async with start_gateway() as gateway:
        for fields in ({}, {"max_tokens": 100}):
            reply = await gateway.post("/v2/embed", texts=["a", "tea " * 300], truncate="NONE", **fields)
            assert reply.status_code == 400
            assert reply.json()["error"]["code"] == "context_length_exceeded"
            assert reply.json()["error"]["param"] == "texts[1]"


@pytest.mark.parametrize(
    ("input_type", "prefix"),
    [("search_query", "q: "), ("search_document", "d: "), ("clustering", ""), (None, "")],
)
async def test_input_types_are_the_models_prompts_where_it_has_them(
    start_gateway, ids_of, input_type, prefix
):
    async with start_gateway(prompts={"query": "q: ", "document": "d: "}) as gateway:
        reply = await embed(gateway, texts=["oak"], input_type=input_type)
        row = embedding_row(ids_of(prefix + "oak"))
        np.testing.assert_allclose(reply["embeddings"]["float"], [row / np.linalg.norm(row)], rtol=1e-5)


async def test_output_dimension(start_gateway, rows):
    tulip = FakeTulip(dimensions=16)
    tulip.row = lambda ids: np.tile(embedding_row(ids), 2)
    async with start_gateway(tulip, any_dimensions=True) as gateway:
        got = (await embed(gateway, output_dimension=8, embedding_types=["float", "ubinary"]))["embeddings"]
        np.testing.assert_allclose(
            got["float"], rows / np.linalg.norm(rows, axis=1, keepdims=True), rtol=1e-6
        )
        np.testing.assert_array_equal(got["ubinary"], np.packbits(rows >= 0, axis=1))


REFUSED = [
    ({}, "texts", "required"),
    ({"texts": []}, "texts", "cannot be empty"),
    ({"texts": ["a", ""]}, "texts[1]", "texts[1]"),
    ({"texts": "a"}, "texts", "must be a list"),
    ({"texts": ["a", 3]}, "texts[1]", "must be a string"),
    ({"texts": [3]}, "texts[0]", "must be a string"),
    ({"texts": [[5, 6]]}, "texts[0]", "must be a string"),
    ({"texts": ["a"], "inputs": []}, "inputs", "not both"),
    ({"texts": ["a"], "images": ["data:"]}, "images", "texts only"),
    ({"images": ["data:"]}, "images", "texts only"),
    ({"inputs": ["a"]}, "inputs[0].content", "list of parts"),
    ({"inputs": [{"content": []}]}, "inputs[0].content", "cannot be empty"),
    ({"inputs": [{"content": [{"type": "text", "text": ""}]}]}, "inputs[0]", "inputs[0]"),
    ({"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs[0].content[0]", "no images"),
    ({"texts": ["a"] * 51}, None, "batch size 51"),
    ({"texts": ["a"], "embedding_types": ["hex"]}, "embedding_types", "float, int8, uint8"),
    ({"texts": ["a"], "embedding_types": []}, "embedding_types", "empty list"),
    ({"texts": ["a"], "truncate": "LEFT"}, "truncate", "NONE, START, END"),
    ({"texts": ["a"], "truncate": True}, "truncate", "NONE, START, END"),
    ({"texts": ["a"], "max_tokens": 0}, "max_tokens", "max_tokens"),
    ({"texts": ["a"], "output_dimension": 4}, "output_dimension", "--any-dimensions"),
    ({"texts": ["a"], "output_dimension": 9}, "output_dimension", "--any-dimensions"),
    ({"texts": ["a"], "output_dimension": "8"}, "output_dimension", "an integer"),
    ({"texts": ["a"], "model": "nope"}, "model", "served: minilm"),
]


@pytest.mark.parametrize(("body", "param", "words"), REFUSED)
async def test_refusals_name_the_field(start_gateway, body, param, words):
    async with start_gateway(max_client_batch_size=50) as gateway:
        for path in ("/v1/embed", "/v2/embed"):
            reply = await gateway.post(path, **body)
            assert reply.status_code == (404 if param == "model" else 400)
            assert reply.json()["error"]["param"] == param
            assert words in reply.json()["message"]


async def test_bits_of_a_part_of_a_byte_are_refused_by_the_clients_field(start_gateway):
    async with start_gateway(any_dimensions=True) as gateway:
        reply = await gateway.post(
            "/v2/embed", texts=["a"], output_dimension=5, embedding_types=["float", "binary"]
        )
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "output_dimension"
        assert "multiple of 8" in reply.json()["message"]
