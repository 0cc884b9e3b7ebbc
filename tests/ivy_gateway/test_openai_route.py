"""/v1/embeddings: every way to write vectors read back, the extra fields, and faults of other servers."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import sys
import types

import numpy as np
import pytest

from ivy_gateway import vectors
from ivy_gateway.app import create_app
from ivy_gateway.config import GatewayConfig
from ivy_gateway.errors import StartupError
from protos.tulip.v1 import inference_pb2 as pb
from tests.ivy_gateway.fake_tulip import (
    DIMENSIONS,
    FakeTulip,
    embedding_row,
    quantized_row,
    quantizing,
    sign_bits,
)

TEXTS = ["plum jam", "oak shelf", "a ferry to the island"]
ROUTE = "/v1/embeddings"


@pytest.fixture
def rows(ids_of):
    """What the fake server computes for TEXTS: float32 [3, DIMENSIONS]."""
    return np.stack([embedding_row(ids_of(text)) for text in TEXTS])


@pytest.fixture
def units(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


async def embeddings_of(gateway, **fields):
    reply = await gateway.post(ROUTE, input=TEXTS, **fields)
    assert reply.status_code == 200, reply.text
    return [item["embedding"] for item in reply.json()["data"]]


async def assert_refused(gateway, param, words, **body):
    reply = await gateway.post(ROUTE, **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


# Floats as numbers, base64 and bytes.


def from_base64(values, dtype):
    return np.stack([np.frombuffer(base64.b64decode(value, validate=True), dtype) for value in values])


def widened(words):
    """bfloat16 words, as uint16 of either byte order, to float32."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def as_read(packed, dtype):
    return widened(packed) if dtype == "bfloat16" else packed.astype(np.float32)


NUMPY_NAMES = {"float32": "f4", "float16": "f2", "bfloat16": "u2"}
TOLERANCES = {"float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8}  # half a unit in the last place
ORDERS = {None: "<", "little": "<", "big": ">", "native": "="}
FORMATS = list(itertools.product(NUMPY_NAMES, ORDERS))


@pytest.mark.parametrize(("dtype", "order"), FORMATS)
async def test_base64_in_every_type_and_byte_order(start_gateway, units, dtype, order):
    async with start_gateway() as gateway:
        fields = {"encoding_format": "base64", "embed_dtype": dtype, "endianness": order}
        packed = from_base64(await embeddings_of(gateway, **fields), ORDERS[order] + NUMPY_NAMES[dtype])
        assert packed.shape == (3, DIMENSIONS)
        np.testing.assert_allclose(as_read(packed, dtype), units, rtol=TOLERANCES[dtype])


@pytest.mark.parametrize(("dtype", "order"), FORMATS)
async def test_bytes_are_found_by_their_metadata(start_gateway, units, ids_of, dtype, order):
    async with start_gateway() as gateway:
        fields = {"embed_dtype": dtype, "endianness": order}
        reply = await gateway.post(ROUTE, input=TEXTS, encoding_format="bytes", **fields)
        assert reply.headers["content-type"] == "application/octet-stream"
        assert {"x-truncated-inputs", "x-embedding-space"} <= reply.headers.keys()
        metadata = json.loads(reply.headers["metadata"])
        assert {"id", "created", "model"} <= metadata.keys()
        tokens = sum(len(ids_of(text)) for text in TEXTS)
        assert metadata["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        for i, item in enumerate(metadata["data"]):
            assert (item["index"], item["embed_dtype"], item["shape"]) == (i, dtype, [DIMENSIONS])
            stored = np.frombuffer(
                reply.content[item["start"] : item["end"]], ORDERS[item["endianness"]] + NUMPY_NAMES[dtype]
            )
            np.testing.assert_allclose(as_read(stored, dtype), units[i], rtol=TOLERANCES[dtype])
        bare = await gateway.post(ROUTE, input=TEXTS, encoding_format="bytes_only", **fields)
        assert bare.content == reply.content
        assert "metadata" not in bare.headers


async def test_bytes_of_more_inputs_than_a_header_can_describe(start_gateway):
    async with start_gateway() as gateway:
        body = {"input": [f"item {i}" for i in range(513)]}
        await assert_refused(gateway, "encoding_format", "bytes_only", encoding_format="bytes", **body)
        reply = await gateway.post(ROUTE, encoding_format="bytes_only", **body)
        assert len(reply.content) == 513 * DIMENSIONS * 4
        longest = {"encoding_format": "bytes", "embed_dtype": "bfloat16", "endianness": "native"}
        reply = await gateway.post(ROUTE, input=body["input"][:512], **longest)
        assert len(reply.headers["metadata"]) < 2**16


async def test_a_name_outside_ascii_fits_into_the_metadata(start_gateway):
    async with start_gateway(aliases=("übung",)) as gateway:
        reply = await gateway.post(ROUTE, input="x", model="übung", encoding_format="bytes")
        assert json.loads(reply.headers["metadata"])["model"] == "minilm"


@pytest.mark.parametrize(
    ("word", "rounded"),
    [(0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x3F808001, 0x3F81), (0xBF807FFF, 0xBF80), (0, 0)],
)
def test_bfloat16_rounds_to_nearest_ties_to_even(word, rounded):
    value = np.array([[word]], np.uint32).view(np.float32)
    assert vectors.float_bytes(value, "bfloat16", "little").view("<u2").tolist() == [[rounded]]


async def test_values_above_float16_are_refused_not_infinite(start_gateway):
    tulip = FakeTulip()
    tulip.row = lambda ids: np.full(DIMENSIONS, 1e6, np.float32)
    async with start_gateway(tulip) as gateway:
        raw = {"input": "x", "normalize": False, "encoding_format": "base64"}
        await assert_refused(gateway, "embed_dtype", "float16", embed_dtype="float16", **raw)
        assert (await gateway.post(ROUTE, embed_dtype="bfloat16", **raw)).status_code == 200


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "float64", 16])
async def test_other_types_are_refused(start_gateway, dtype):
    async with start_gateway() as gateway:
        for encoding in ("float", "base64", "bytes"):
            await assert_refused(
                gateway, "embed_dtype", "bfloat16", input="x", encoding_format=encoding, embed_dtype=dtype
            )


# Several types in one reply.


@pytest.mark.parametrize("field", ["embedding_type", "encoding_type"])
async def test_one_type_by_its_newer_names(start_gateway, units, rows, field):
    async with start_gateway() as gateway:
        np.testing.assert_allclose(await embeddings_of(gateway, **{field: "float"}), units, rtol=1e-6)
        np.testing.assert_allclose(
            from_base64(await embeddings_of(gateway, **{field: "base64"}), "<f4"), units, rtol=1e-6
        )
        bits = np.packbits(rows >= 0, axis=1)
        assert await embeddings_of(gateway, **{field: "ubinary"}) == bits.tolist()
        assert await embeddings_of(gateway, **{field: "binary"}) == (bits.astype(int) - 128).tolist()


@pytest.mark.parametrize("field", ["embedding_type", "encoding_type"])
async def test_a_list_of_types_gives_an_object_and_computes_once(start_gateway, field):
    names = ["float", "base64", "binary", "ubinary"]
    async with start_gateway() as gateway:
        keyed = await embeddings_of(gateway, **{field: names})
        assert len(gateway.tulips[0].requests) == 1
        for name in names:
            assert [item[name] for item in keyed] == await embeddings_of(gateway, **{field: name})
        lone = await embeddings_of(gateway, **{field: ["float", "float"]})
        assert lone == [{"float": item["float"]} for item in keyed]


async def test_types_of_a_model_that_quantises(start_gateway, ids_of):
    """Bits are the server's own, of values before they were rounded; codes are computed once."""
    codes = np.stack([quantized_row(ids_of(text)) for text in TEXTS])
    bits = np.stack([sign_bits(ids_of(text)) for text in TEXTS])
    async with start_gateway(quantizing()) as gateway:
        got = await embeddings_of(gateway, embedding_type=["float", "base64_int8", "ubinary"])
        assert [item["float"] for item in got] == codes.tolist()
        np.testing.assert_array_equal(from_base64([item["base64_int8"] for item in got], np.int8), codes)
        assert [item["ubinary"] for item in got] == bits.tolist()
        assert [r.output for r in gateway.tulips[0].requests] == [pb.OUTPUT_INT8, pb.OUTPUT_BITS]


@pytest.mark.parametrize("value", ["hex", [], ["float", "hex"], ["float", None], [["float"]], 3])
async def test_bad_types_are_told_what_is_allowed(start_gateway, value):
    async with start_gateway() as gateway:
        await assert_refused(
            gateway, "embedding_type", "a list of float, base64", input="x", embedding_type=value
        )


@pytest.mark.parametrize("value", ["hex", ["float", "base64"], ["float"], 3])
async def test_bc_012_unknown_or_listed_encoding_format(start_gateway, value):
    async with start_gateway() as gateway:
        await assert_refused(
            gateway,
            "encoding_format",
            "one of float, base64, base64_int8, base64_binary, ubinary, binary, bytes, bytes_only",
            input="x",
            encoding_format=value,
        )


async def test_bc_058_base64_equals_the_floats(start_gateway):
    async with start_gateway() as gateway:
        absent, numbers, packed = [
            await embeddings_of(gateway, **fields)
            for fields in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"})
        ]
        assert absent == numbers
        assert [len(base64.b64decode(item)) for item in packed] == [4 * DIMENSIONS] * 3
        np.testing.assert_array_equal(from_base64(packed, "<f4"), np.array(numbers, np.float32))


# Dimensions and length. M: a model whose files declare shorter vectors.


@pytest.fixture
def matryoshka(minilm, tmp_path):
    folder = shutil.copytree(minilm, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"matryoshka_dimensions": [1, 4, 8]}))
    return folder


async def test_bc_060_dimensions_too_large_or_not_supported(start_gateway, matryoshka):
    async with start_gateway() as gateway:  # E
        for dimensions in (4, DIMENSIONS + 1):
            await assert_refused(gateway, "dimensions", f"{DIMENSIONS} dim", input="x", dimensions=dimensions)
        assert await embeddings_of(gateway, dimensions=DIMENSIONS) == await embeddings_of(gateway)
    async with start_gateway(model=matryoshka) as gateway:
        for dimensions in (3, DIMENSIONS + 1):
            await assert_refused(gateway, "dimensions", "one of 1, 4, 8", input="x", dimensions=dimensions)
        assert await embeddings_of(gateway, dimensions=DIMENSIONS) == await embeddings_of(gateway)


@pytest.mark.parametrize("value", [0, -5, "64", 64.0, 10**9, True, [4]])
async def test_bc_061_odd_dimensions(start_gateway, matryoshka, value):
    async with start_gateway(model=matryoshka) as gateway:
        await assert_refused(gateway, "dimensions", "`dimensions`", input="x", dimensions=value)
        reply = await gateway.post("/embed", inputs="x", dimensions=value)
        assert reply.status_code == 422
        assert abs((await embeddings_of(gateway, dimensions=1))[0][0]) == 1


async def test_bc_062_shortened_vectors_are_normalised_again(start_gateway, matryoshka, rows):
    async with start_gateway(model=matryoshka) as gateway:
        full = np.array(await embeddings_of(gateway, normalize=False))
        np.testing.assert_allclose(full, rows, rtol=1e-6)
        short = np.array(await embeddings_of(gateway, dimensions=4))
        np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, rtol=1e-6)
        expected = full[:, :4] / np.linalg.norm(full[:, :4], axis=1, keepdims=True)
        np.testing.assert_allclose(short, expected, rtol=1e-5)
        raw = await embeddings_of(gateway, dimensions=4, normalize=False)
        np.testing.assert_array_equal(raw, full[:, :4])


@pytest.mark.parametrize("field", ["normalize", "normalized", "use_activation"])
async def test_bc_064_normalisation_on_and_off(start_gateway, rows, units, field):
    async with start_gateway() as gateway:
        assert (await gateway.client.get("/info")).json()["normalize_default"] is True
        np.testing.assert_allclose(await embeddings_of(gateway, **{field: False}), rows, rtol=1e-6)
        for value in (True, None):
            np.testing.assert_allclose(await embeddings_of(gateway, **{field: value}), units, rtol=1e-6)
        off = (await gateway.post("/embed", inputs=TEXTS, normalize=False)).json()
        on = (await gateway.post("/embed", inputs=TEXTS)).json()
        np.testing.assert_allclose(off, rows, rtol=1e-6)
        np.testing.assert_allclose(on, units, rtol=1e-6)


# Other fields.


async def test_ids_and_times_are_told(start_gateway):
    async with start_gateway() as gateway:
        replies = [(await gateway.post(ROUTE, input="x")).json() for _ in range(2)]
        assert replies[0]["id"] != replies[1]["id"]
        assert replies[0]["id"].startswith("embd-")
        assert isinstance(replies[0]["created"], int)


async def test_without_special_tokens(start_gateway, ids_of):
    async with start_gateway() as gateway:
        bare = ids_of(TEXTS[0])[1:-1]
        fields = {"add_special_tokens": False, "normalize": False}
        np.testing.assert_allclose(
            (await embeddings_of(gateway, **fields))[0], embedding_row(bare), rtol=1e-6
        )
        cut = await gateway.post(ROUTE, input="tea " * 20, truncate_prompt_tokens=5, **fields)
        assert cut.json()["usage"]["prompt_tokens"] == 5
        expected = embedding_row(ids_of("tea " * 5)[1:-1])
        np.testing.assert_allclose(cut.json()["data"][0]["embedding"], expected, rtol=1e-6)
        await assert_refused(gateway, "input[0]", "no token", input="\u200b", **fields)


PROMPTS = {"query": "q: ", "passage": "p: ", "classification": "c: "}


@pytest.mark.parametrize(
    ("fields", "prefix"),
    [
        ({"prompt_name": "query"}, "q: "),
        ({"input_type": "query"}, "q: "),
        ({"input_type": "search_query"}, "q: "),
        ({"task": "retrieval.query"}, "q: "),
        ({"input_type": "search_document"}, "p: "),
        ({"input_type": "document"}, "p: "),
        ({"task": "retrieval.passage"}, "p: "),
        ({"task": "classification"}, "c: "),
        ({"task": "text-matching"}, ""),
        ({"input_type": "clustering"}, ""),
        ({"task": "query", "prompt_name": "passage"}, "p: "),
        ({"task": "separation", "input_type": "search_query"}, "q: "),
    ],
)
async def test_hints_mean_the_models_own_prompts(start_gateway, ids_of, fields, prefix):
    async with start_gateway(prompts=PROMPTS) as gateway:
        reply = await gateway.post(ROUTE, input="oak", normalize=False, **fields)
        expected = embedding_row(ids_of(prefix + "oak"))
        np.testing.assert_allclose(reply.json()["data"][0]["embedding"], expected, rtol=1e-6)


async def test_a_document_of_a_model_with_a_default_prompt_is_no_query(start_gateway, ids_of):
    async with start_gateway(prompts={"query": "q: "}, default_prompt_name="query") as gateway:
        for hint, text in (("search_document", "oak"), ("clustering", "q: oak")):
            reply = await gateway.post(ROUTE, input="oak", normalize=False, input_type=hint)
            expected = embedding_row(ids_of(text))
            np.testing.assert_allclose(reply.json()["data"][0]["embedding"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages", "chat template"),
        ({"input": ["a"], "messages": [{"role": "user", "content": "hi"}]}, "messages", "`input`"),
        ({"input": ["a"], "late_chunking": True}, "late_chunking", "false or absent"),
        ({"input": ["a"], "prompt_name": "nope"}, "prompt_name", "'nope'"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(start_gateway, body, param, words):
    async with start_gateway() as gateway:
        await assert_refused(gateway, param, words, **body)
        harmless = {"late_chunking": False, "messages": None, "user": "u", "priority": 0, "task": "any"}
        assert (await gateway.post(ROUTE, input="a", **harmless)).status_code == 200


# Ids of OpenAI's vocabulary.


class Characters:
    """A stand-in for a tiktoken vocabulary: an id is a code point; decoding knows 128 of them."""

    name = "cl100k_base"

    def decode(self, ids, errors):
        assert errors == "replace"
        return "".join({i: chr(i) for i in range(128)}[i] for i in ids)


def stand_in(get_encoding):
    module = types.ModuleType("tiktoken")
    module.get_encoding = get_encoding
    return module


async def test_ids_of_openais_vocabulary_are_read_as_text(start_gateway, monkeypatch):
    asked = []
    monkeypatch.setitem(sys.modules, "tiktoken", stand_in(lambda name: asked.append(name) or Characters()))
    async with start_gateway(token_ids="cl100k_base") as gateway:
        assert asked == ["cl100k_base"]
        as_texts = (await gateway.post(ROUTE, input=["oak shelf", "[CLS] tea"])).json()
        as_ids = [list(map(ord, text)) for text in ("oak shelf", "[CLS] tea")]
        mixed = (await gateway.post(ROUTE, input=[as_ids[0], "[CLS] tea"])).json()
        assert mixed["data"] == (await gateway.post(ROUTE, input=as_ids)).json()["data"] == as_texts["data"]
        assert mixed["usage"] == as_texts["usage"]
        flat = (await gateway.post(ROUTE, input=as_ids[0])).json()
        assert flat["data"] == as_texts["data"][:1]
        await assert_refused(gateway, "input[1]", "cl100k_base", input=[as_ids[0], [65, 200]])


def test_the_librarys_own_vocabulary_class_reads_ids():
    tiktoken = pytest.importorskip("tiktoken")
    from ivy_gateway.errors import InvalidValue
    from ivy_gateway.foreign_vocabulary import ForeignVocabulary
    from ivy_gateway.jobs import TokenIds

    by_byte = {bytes([i]): i for i in range(256)}
    encoding = tiktoken.Encoding("bytes", pat_str=".", mergeable_ranks=by_byte, special_tokens={})
    vocabulary = ForeignVocabulary(encoding)
    ids = np.frombuffer("Zürich 東".encode(), np.uint8).astype(np.int32)
    assert vocabulary.decode(TokenIds(ids), "input[0]") == "Zürich 東"
    assert vocabulary.decode(TokenIds(ids[:2]), "input[0]") == "Z\ufffd"  # cut inside a character
    with pytest.raises(InvalidValue, match=r"input\[3\]"):
        vocabulary.decode(TokenIds(np.array([300], np.int32)), "input[3]")


def offline(name):
    raise OSError("no network")


@pytest.mark.parametrize(
    ("module", "words"), [(None, "needs the package tiktoken"), (stand_in(offline), "TIKTOKEN_CACHE_DIR")]
)
def test_without_library_or_vocabulary_the_gateway_does_not_start(minilm, monkeypatch, module, words):
    monkeypatch.setitem(sys.modules, "tiktoken", module)
    config = GatewayConfig(model=minilm, replicas=("127.0.0.1:1",), token_ids="cl100k_base")
    with pytest.raises(StartupError, match=words):
        create_app(config)


async def test_ids_are_refused_by_default_and_the_message_says_what_to_change(start_gateway):
    async with start_gateway() as gateway:
        for words in ("check_embedding_ctx_length=False", "--token-ids model", "--token-ids cl100k_base"):
            await assert_refused(gateway, "input", words, input=[[5, 6]])
