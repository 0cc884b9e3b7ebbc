"""int8 codes and packed bits: what servers are asked for, and how each encoding spells it."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ivy_gateway import vectors
from ivy_gateway.errors import InvalidValue
from ivy_gateway.jobs import EmbedJob, Output
from protos.tulip.v1 import inference_pb2 as pb
from tests.ivy_gateway.fake_tulip import FakeTulip, embedding_row, quantized_row, quantizing

TEXTS = ["plum jam", "oak shelf", "a ferry to the island"]


@pytest.fixture(scope="module")
def ids(minilm):
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [np.array(tokenizer.encode(text).ids, np.int32) for text in TEXTS]


async def vectors_of(gateway, **fields):
    reply = await gateway.post("/v1/embeddings", input=TEXTS, **fields)
    assert reply.status_code == 200, reply.text
    return [item["embedding"] for item in reply.json()["data"]]


async def test_codes_show_as_numbers_and_are_never_rescaled(start_gateway, ids):
    codes = [quantized_row(i).tolist() for i in ids]
    async with start_gateway(quantizing()) as gateway:
        for fields in ({}, {"normalize": True}, {"normalize": False}, {"encoding_format": "float"}):
            assert await vectors_of(gateway, **fields) == codes
        assert (await gateway.post("/embed", inputs=TEXTS)).json() == codes
        packed = await vectors_of(gateway, encoding_format="base64")
        assert [np.frombuffer(base64.b64decode(p), "<f4").tolist() for p in packed] == codes


async def test_base64_int8_is_the_codes_bytes(start_gateway, ids):
    async with start_gateway(quantizing()) as gateway:
        packed = await vectors_of(gateway, encoding_format="base64_int8")
        got = [np.frombuffer(base64.b64decode(p), np.int8) for p in packed]
        np.testing.assert_array_equal(got, [quantized_row(i) for i in ids])
        assert {r.output for r in gateway.tulips[0].requests} == {pb.OUTPUT_INT8}


@pytest.mark.parametrize("tulip", [FakeTulip, quantizing])
async def test_bits_are_the_signs_in_each_encodings_order(start_gateway, ids, tulip):
    """The same bits from a server's own and, for a model that gives floats, from these."""
    signs = np.stack([embedding_row(i) for i in ids]) >= 0
    async with start_gateway(tulip()) as gateway:
        packed = await vectors_of(gateway, encoding_format="base64_binary")
        lsb_first = np.stack([np.frombuffer(base64.b64decode(p), np.uint8) for p in packed])
        np.testing.assert_array_equal(np.unpackbits(lsb_first, axis=1, bitorder="little"), signs)
        msb_first = np.array(await vectors_of(gateway, embedding_type="ubinary"), np.uint8)
        np.testing.assert_array_equal(np.unpackbits(msb_first, axis=1), signs)
        shifted = np.array(await vectors_of(gateway, encoding_format="binary"))
        np.testing.assert_array_equal(shifted, msb_first.astype(int) - 128)
        asked = {r.output for r in gateway.tulips[0].requests}
        assert asked == ({pb.OUTPUT_BITS} if tulip is quantizing else {pb.OUTPUT_OWN})


async def test_int8_of_a_model_that_gives_floats_is_refused_by_the_clients_field(start_gateway):
    async with start_gateway() as gateway:
        for field in ("encoding_format", "embedding_type"):
            reply = await gateway.post("/v1/embeddings", input="a", **{field: "base64_int8"})
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == field
            assert "float32" in reply.json()["error"]["message"]
        assert not gateway.tulips[0].requests


async def test_bits_end_at_whole_bytes(start_gateway):
    async with start_gateway(any_dimensions=True) as gateway:
        reply = await gateway.post("/v1/embeddings", input="a", encoding_format="ubinary", dimensions=5)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "dimensions"


async def test_cosine_scores_of_codes(start_gateway, ids):
    async with start_gateway(quantizing()) as gateway:
        reply = await gateway.post("/score", query=TEXTS[0], documents=TEXTS)
        left, *right = (quantized_row(i).astype(float) for i in (ids[0], *ids))
        expected = [left @ r / np.linalg.norm(left) / np.linalg.norm(r) for r in right]
        np.testing.assert_allclose([item["score"] for item in reply.json()["data"]], expected, rtol=1e-5)


async def test_info_lists_outputs(start_gateway):
    for tulip, outputs in ((quantizing(), ["own", "int8", "bits"]), (FakeTulip(outputs=[0]), ["own"])):
        async with start_gateway(tulip) as gateway:
            assert (await gateway.client.get("/info")).json()["outputs"] == outputs


# The pure functions, on vectors of more than one byte.


def job(output=Output.OWN, dimensions=None):
    return EmbedJob(("a",), "input", deadline=0.0, dimensions=dimensions, output=output)


@given(width=st.integers(1, 40), seed=st.integers(0, 99), data=st.data())
def test_cutting_commutes_with_codes_and_bits(width, seed, data):
    values = np.random.default_rng(seed).standard_normal((3, width)).astype(np.float32)
    codes = np.round(127 * np.tanh(values)).astype(np.int8)
    dimensions = data.draw(st.one_of(st.none(), st.integers(1, width)))
    cut = slice(None, dimensions)
    got = vectors.finish(codes, job(Output.INT8, dimensions), already_normalized=False)
    np.testing.assert_array_equal(got, codes[:, cut])
    if dimensions in (None, width) or dimensions % 8 == 0:
        expected = np.packbits(values[:, cut] >= 0, axis=1)
        for rows in (values, np.packbits(values >= 0, axis=1)):  # the server's floats, or its bits
            got = vectors.finish(rows, job(Output.BITS, dimensions), already_normalized=False)
            np.testing.assert_array_equal(got, expected)
    else:
        with pytest.raises(InvalidValue):
            vectors.wire_output(job(Output.BITS, dimensions), width, quantized=True)


def test_zero_is_not_negative():
    values = np.array([[0.0, -0.0, -1e-30, 1e-30]], np.float32)
    assert vectors.packed_signs(values).tolist() == [[0b1101_0000]]
