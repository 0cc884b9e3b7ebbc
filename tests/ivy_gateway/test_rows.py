"""Several vectors per input, and prompts left out of one: what goes out, and what each dialect shows."""

from __future__ import annotations

import base64
import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer

from ivy_gateway import pipeline
from ivy_gateway.chunking import merge, split
from ivy_gateway.errors import EmptyInput, StartupError, TooLong
from ivy_gateway.jobs import EncodedInput, Output, Truncation
from ivy_gateway.model_profile import ModelProfile
from ivy_gateway.special_tokens import Piece, Template
from ivy_gateway.templates import Prompt, apply_prompt
from ivy_gateway.tokenizer import TextTokenizer
from ivy_gateway.truncation import Cut, checked_lengths, fit_text
from protos.codec import decode_tensor
from protos.tulip.v1 import inference_pb2 as pb
from tests.ivy_gateway.fake_tulip import DIMENSIONS, FakeTulip, embedding_row, quantized_row, sign_bits

DOCUMENTS = [["plum jam", "oak shelf"], ["a ferry to the island"], ["one", "two", "three [SEP] four"]]
CONTEXTUAL = "/v1/contextualizedembeddings"


def embedder(**description) -> FakeTulip:
    outputs = [pb.OUTPUT_OWN, pb.OUTPUT_TOKENS]
    return FakeTulip(outputs=outputs, hidden_size=DIMENSIONS, **description)


def contextual_tulip() -> FakeTulip:
    outputs = [pb.OUTPUT_OWN, pb.OUTPUT_INT8, pb.OUTPUT_BITS, pb.OUTPUT_TOKENS]
    tulip = FakeTulip(row_dtype=pb.DTYPE_INT8, outputs=outputs, hidden_size=DIMENSIONS)
    tulip.row = quantized_row
    return tulip


@pytest.fixture(scope="module")
def ids(minilm):
    """Ids of a text without special tokens; none of these texts spells one but `[SEP]`, which is words."""
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def of(text: str) -> list[int]:
        return tokenizer.encode(text.replace("[SEP]", "[ sep ]"), add_special_tokens=False).ids

    return of


def copied(minilm, folder, **files):
    shutil.copytree(minilm, folder, dirs_exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def contextual(minilm, tmp_path_factory):
    """A folder that says it is contextual, whose separator is `[SEP]`."""
    config = json.loads((minilm / "config.json").read_text())
    code = {"auto_map": {"AutoModel": "modeling.PPLXQwen3ContextualModel"}}
    return copied(
        minilm,
        tmp_path_factory.mktemp("contextual"),
        config=config | code,
        tokenizer_config={"sep_token": "[SEP]"},
    )


@pytest.fixture(scope="module")
def unprompted(minilm, tmp_path_factory):
    """A folder whose pooling leaves prompts out."""
    folder = copied(
        minilm,
        tmp_path_factory.mktemp("unprompted"),
        config_sentence_transformers={"prompts": {"query": "find this: "}},
    )
    pooling = {"pooling_mode": "mean", "include_prompt": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


# -- prompts


async def test_a_prompt_that_is_not_pooled_travels_as_a_span(start_gateway, unprompted, ids):
    tulip = embedder()
    async with start_gateway(tulip, model=unprompted) as gateway:
        reply = await gateway.post("/embed", inputs=["jam", "oak"], prompt_name="query", normalize=False)
        (request,) = tulip.requests
        start = 1 + len(ids("find this: "))
        spans = decode_tensor(request.spans, "spans", ndim=2)
        assert spans.tolist() == [[start, start + 2]] * 2  # the text and [SEP]
        assert decode_tensor(request.span_counts, "span_counts").tolist() == [1, 1]
        wanted = [embedding_row(np.array([*ids(text), 102])) for text in ("jam", "oak")]
        np.testing.assert_allclose(reply.json(), wanted, rtol=1e-5)
        await gateway.post("/embed", inputs=["jam", "oak"])
        assert not tulip.requests[-1].HasField("spans")


async def test_cosine_scores_leave_prompts_out_too(start_gateway, unprompted):
    tulip = embedder()
    async with start_gateway(tulip, model=unprompted, default_prompt_name="query") as gateway:
        reply = await gateway.post("/score", data_1="jam", data_2="oak")
        assert reply.status_code == 200
        assert all(request.HasField("spans") for request in tulip.requests)


async def test_whether_prompts_are_pooled_is_part_of_the_fingerprint(
    start_gateway, minilm, unprompted, tmp_path
):
    pooled = copied(unprompted, tmp_path / "pooled")
    shutil.copy(minilm / "1_Pooling" / "config.json", pooled / "1_Pooling" / "config.json")
    seen = set()
    for folder in (unprompted, pooled):
        async with start_gateway(embedder(), model=folder) as gateway:
            seen.add((await gateway.client.get("/info")).json()["embedding_space"])
    assert len(seen) == 2


TEMPLATE = Template((Piece((1,), (0,)), Piece((2,), (0,))), (0,))


@pytest.mark.parametrize(
    ("limit", "side", "token_ids", "span"),
    [
        (20, "right", [1, 5, 6, 7, 8, 9, 2], [3, 7]),
        (5, "right", [1, 5, 6, 7, 2], [3, 5]),
        (4, "right", [1, 5, 6, 2], [3, 4]),
        (6, "left", [1, 6, 7, 8, 9, 2], [2, 6]),
        (4, "left", [1, 8, 9, 2], [1, 4]),
    ],
)
def test_what_is_left_of_a_prompt_is_left_out(limit, side, token_ids, span):
    item = fit_text(0, [5, 6, 7, 8, 9], TEMPLATE, Cut(True, limit, side), num_unpooled=3)
    assert (item.token_ids.tolist(), item.spans.tolist()) == (token_ids, [span])


def test_a_text_of_which_only_the_prompt_is_left_is_refused():
    cut = Cut(True, 3, "right")
    bare = Template((Piece(), Piece()), (0,))
    items = [fit_text(i, [5, 6, 7, 8], bare, cut, num_unpooled=n) for i, n in enumerate((2, 3))]
    with pytest.raises(EmptyInput, match=r"`input\[1\]`: no token of its own"):
        checked_lengths(items, cut, "input")


def test_prompts_are_left_out_where_files_say_so(minilm, unprompted):
    profile = ModelProfile.read(unprompted)
    assert apply_prompt(["a"], profile, "query") == [Prompt(0, "find this: a", unpooled="find this: ")]
    assert apply_prompt(["a"], profile) == [Prompt(0, "a")]
    pooled = ModelProfile.read(minilm, prompts={"query": "find this: "})
    assert apply_prompt(["a"], pooled, "query") == [Prompt(0, "find this: a")]


# -- documents


async def documents_of(gateway, path=CONTEXTUAL, **fields) -> list[list]:
    reply = await gateway.post(path, **fields)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert [document["index"] for document in body["data"]] == list(range(len(body["data"])))
    for document in body["data"]:
        assert [chunk["index"] for chunk in document["data"]] == list(range(len(document["data"])))
    return [[chunk["embedding"] for chunk in document["data"]] for document in body["data"]]


def each(row, ids):
    return [[row(np.array(ids(text))) for text in chunks] for chunks in DOCUMENTS]


async def test_a_document_travels_as_one_sequence_with_a_span_per_chunk(start_gateway, contextual, ids):
    tulip = contextual_tulip()
    async with start_gateway(tulip, model=contextual) as gateway:
        await documents_of(gateway, input=DOCUMENTS)
        (request,) = tulip.requests
        joined = [
            [101, *(i for n, text in enumerate(chunks) for i in [*([102] if n else []), *ids(text)]), 102]
            for chunks in DOCUMENTS
        ]
        sent = decode_tensor(request.token_ids, "token_ids").tolist()
        assert sent == [i for sequence in joined for i in sequence]
        assert decode_tensor(request.span_counts, "span_counts").tolist() == [2, 1, 3]
        assert sent.count(102) == 3 + 3  # the ends, and between; none that the text spelled


async def test_each_chunk_has_its_vector_in_perplexitys_encodings(start_gateway, contextual, ids):
    async with start_gateway(contextual_tulip(), model=contextual) as gateway:
        codes, bits = each(quantized_row, ids), each(sign_bits, ids)
        for path in (CONTEXTUAL, f"/perplexity{CONTEXTUAL}"):
            packed = await documents_of(gateway, path, input=DOCUMENTS)
            for got, wanted in zip(packed, codes, strict=True):
                np.testing.assert_array_equal(
                    [np.frombuffer(base64.b64decode(p), np.int8) for p in got], wanted
                )
        packed = await documents_of(gateway, input=DOCUMENTS, encoding_format="base64_binary")
        for got, wanted in zip(packed, bits, strict=True):
            octets = np.array([np.frombuffer(base64.b64decode(p), np.uint8) for p in got])
            reversed_bits = np.packbits(np.unpackbits(octets, axis=1, bitorder="little"), axis=1)
            np.testing.assert_array_equal(reversed_bits, wanted)


async def test_voyages_dialect(start_gateway, contextual, ids):
    async with start_gateway(contextual_tulip(), model=contextual) as gateway:
        codes = [[row.tolist() for row in rows] for rows in each(quantized_row, ids)]
        for fields in ({}, {"output_dtype": "int8"}, {"output_dtype": "float", "input_type": "document"}):
            assert await documents_of(gateway, inputs=DOCUMENTS, **fields) == codes
        unsigned = await documents_of(gateway, inputs=DOCUMENTS, output_dtype="uint8")
        assert unsigned[0][0] == [code + 128 for code in codes[0][0]]
        for dtype, kind in (
            ("int8", "i1"),
            ("float", "<f4"),
            ("uint8", "u1"),
            ("binary", "i1"),
            ("ubinary", "u1"),
        ):
            plain = await documents_of(gateway, inputs=DOCUMENTS, output_dtype=dtype)
            packed = await documents_of(
                gateway, inputs=DOCUMENTS, output_dtype=dtype, encoding_format="base64"
            )
            for got, wanted in zip(packed, plain, strict=True):
                assert [np.frombuffer(base64.b64decode(p), kind).tolist() for p in got] == wanted


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": [["a", ""], [""]]}, "input[0][1]", "input[0][1], input[1][0]"),
        ({"inputs": [["a"], []]}, "inputs[1]", "cannot be empty"),
        ({"input": []}, "input", "cannot be empty"),
        ({"input": ["a"]}, "input[0]", "must be a list"),
        ({"input": [["a", 3]]}, "input[0][1]", "must be a string"),
        ({"input": [["a"]], "inputs": [["a"]]}, "input", "either"),
        ({}, "input", "either"),
        ({"input": [["a"]], "encoding_format": "base64"}, "encoding_format", "base64_int8"),
        ({"inputs": [["a"]], "output_dtype": "base64_int8"}, "output_dtype", "ubinary"),
        ({"inputs": [["a"]], "output_dimension": 5}, "output_dimension", "output_dimension"),
        ({"input": [["a\u200b"], ["b", "\u200b"]]}, "input[1][1]", "no token of its own"),
        ({"input": [["a"] * 16_001]}, "input", "at most 16000"),
        ({"input": [["a"]] * 2049}, None, "batch size 2049"),
        ({"input": [["tea "] * 200, ["b"]]}, "input[0]", "truncation is off"),
    ],
)
async def test_documents_that_cannot_be_embedded_name_what_is_wrong(
    start_gateway, contextual, fields, param, words
):
    tulip = contextual_tulip()
    async with start_gateway(tulip, model=contextual) as gateway:
        reply = await gateway.post(CONTEXTUAL, **fields)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == param
        assert words in reply.json()["error"]["message"]
        assert not tulip.requests


async def test_documents_need_a_contextual_model(start_gateway):
    async with start_gateway(embedder()) as gateway:
        reply = await gateway.post(CONTEXTUAL, input=[["a"]])
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "model_not_supported")


def test_a_separator_that_the_tokenizer_lacks_stops_the_start(minilm):
    with pytest.raises(StartupError, match=r"no special token '<\|sep\|>'"):
        TextTokenizer.load(
            minilm, literal=True, max_length=9, workers=1, lower_case=False, separator="<|sep|>"
        )


async def test_documents_are_tokenized_alike_here_and_on_threads(minilm):
    tokenizer = TextTokenizer.load(
        minilm, literal=True, max_length=5000, workers=3, lower_case=False, separator="[SEP]"
    )
    documents = [[f"chunk {n} of {d} " * (d + 1) for n in range(3)] for d in range(40)]
    together = await tokenizer.encode_documents(documents, None, "input")
    for document, item in zip(documents, together, strict=True):
        (alone,) = await tokenizer.encode_documents([document], None, "input")
        np.testing.assert_array_equal(alone.token_ids, item.token_ids)
        np.testing.assert_array_equal(alone.spans, item.spans)
        assert len(alone.spans) == 3
    with pytest.raises(TooLong, match=r"`input\[39\]`"):
        await tokenizer.encode_documents(documents, together[-1].num_tokens - 1, "input")
    tokenizer.close()


# -- tokens


def token_rows(ids, text: str, normalize: bool = False) -> np.ndarray:
    rows = np.stack([embedding_row(np.array([i])) for i in (101, *ids(text), 102)])
    return rows / np.linalg.norm(rows, axis=1, keepdims=True) if normalize else rows


TEXTS = ["plum jam", "a ferry to the island", "x"]


async def test_embed_all_shows_every_token_as_it_is(start_gateway, ids):
    async with start_gateway(embedder(normalized=True)) as gateway:
        reply = await gateway.post("/embed_all", inputs=TEXTS)
        assert reply.status_code == 200, reply.text
        for got, text in zip(reply.json(), TEXTS, strict=True):
            np.testing.assert_allclose(got, token_rows(ids, text), rtol=1e-5)
        assert int(reply.headers["x-compute-tokens"]) == sum(map(len, reply.json()))
        (alone,) = (await gateway.post("/embed_all", inputs="x")).json()
        np.testing.assert_allclose(alone, token_rows(ids, "x"), rtol=1e-5)


async def test_prompts_have_rows_whether_they_are_pooled_or_not(start_gateway, unprompted, ids):
    tulip = embedder()
    async with start_gateway(tulip, model=unprompted) as gateway:
        (rows,) = (await gateway.post("/embed_all", inputs="jam", prompt_name="query")).json()
        assert len(rows) == 2 + len(ids("find this: jam"))
        assert not tulip.requests[0].HasField("spans")


async def test_token_rows_over_several_servers_stay_in_order(start_gateway, ids):
    texts = [f"text {i} " + "colour " * (i % 9) for i in range(90)]
    async with start_gateway(embedder(), embedder(), max_chunk_tokens=64) as gateway:
        rows = (await gateway.post("/embed_all", inputs=texts)).json()
        assert all(len(tulip.requests) > 3 for tulip in gateway.tulips)
        for got, text in zip(rows, texts, strict=True):
            np.testing.assert_allclose(got, token_rows(ids, text), rtol=1e-5)


async def test_pooling_as_vllm_does(start_gateway, ids):
    async with start_gateway(embedder()) as gateway:

        async def data(**fields) -> list:
            reply = await gateway.post("/pooling", input=TEXTS, **fields)
            assert reply.status_code == 200, reply.text
            assert {item["object"] for item in reply.json()["data"]} == {"pooling"}
            return [item["data"] for item in reply.json()["data"]]

        plain = (await gateway.post("/v1/embeddings", input=TEXTS)).json()["data"]
        assert await data() == await data(task="embed") == [item["embedding"] for item in plain]
        packed = await data(encoding_format="base64")
        np.testing.assert_allclose(
            [np.frombuffer(base64.b64decode(p), "<f4") for p in packed], await data(), rtol=1e-6
        )
        for fields in ({}, {"use_activation": False}):
            for got, text in zip(await data(task="token_embed", **fields), TEXTS, strict=True):
                np.testing.assert_allclose(got, token_rows(ids, text, normalize=not fields), rtol=1e-5)
        rows = await data(
            task="token_embed", use_activation=False, encoding_format="base64", endianness="big"
        )
        for got, text in zip(rows, TEXTS, strict=True):
            array = np.frombuffer(base64.b64decode(got), ">f4").reshape(-1, DIMENSIONS)
            np.testing.assert_allclose(array, token_rows(ids, text), rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"task": "token_classify"}, "task"),
        ({"task": "plugin"}, "task"),
        ({"dimensions": 4}, "dimensions"),
        ({"encoding_format": "octets"}, "encoding_format"),
        ({"task": "token_embed", "encoding_format": "bytes"}, "encoding_format"),
        ({"task": "token_embed", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"task": "token_embed", "encoding_format": "base64_int8"}, "encoding_format"),
    ],
)
async def test_pooling_refuses_by_field(start_gateway, fields, param):
    async with start_gateway(embedder()) as gateway:
        reply = await gateway.post("/pooling", input="a", **fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_pooling_of_a_model_that_scores_is_classification(start_gateway):
    async with start_gateway(FakeTulip(task=pb.TASK_SCORE, dimensions=1)) as gateway:
        reply = await gateway.post("/pooling", input=["a", "b"])
        assert [len(item["data"]) for item in reply.json()["data"]] == [1, 1]
        for path, body in (
            ("/pooling", {"input": "a", "task": "token_embed"}),
            ("/embed_all", {"inputs": "a"}),
        ):
            reply = await gateway.post(path, **body)
            assert reply.status_code == (424 if path == "/embed_all" else 400)
            assert "not an embedding model" in reply.text


async def test_more_token_rows_than_a_reply_holds_are_refused_at_once(start_gateway, monkeypatch):
    monkeypatch.setattr(pipeline, "MAX_ROW_BYTES", 4 * DIMENSIONS * 10)
    tulip = embedder()
    async with start_gateway(tulip) as gateway:
        reply = await gateway.post("/embed_all", inputs=["tea " * 4, "tea " * 5])
        assert reply.status_code == 422
        assert "13 tokens, of which one reply holds the vectors of 10" in reply.json()["error"]
        assert not tulip.requests
        assert (await gateway.post("/embed_all", inputs="tea")).status_code == 200


async def test_a_token_row_that_is_not_finite_names_its_input(start_gateway, monkeypatch, ids):
    tulip = embedder()
    (poison,) = ids("poison")
    tulip.row_of = lambda request, own: np.full(DIMENSIONS, np.nan if poison in own else 0, np.float32)
    async with start_gateway(tulip) as gateway:
        reply = await gateway.post("/embed_all", inputs=["a b c", "d", "e poison f poison"])
        assert reply.status_code == 424
        assert reply.json()["error"].endswith("for input 2")


# -- the pure functions


def test_rows_of_shuffled_chunks_come_back_by_input():
    inputs = [
        EncodedInput(0, np.zeros(3, np.int32), None, False, np.array([[0, 1], [1, 3]], np.int32)),
        EncodedInput(1, np.zeros(2, np.int32), None, False),
        EncodedInput(2, np.zeros(4, np.int32), None, False, np.array([[0, 1], [1, 2], [3, 4]], np.int32)),
    ]
    for output, counts in ((Output.OWN, [2, 1, 3]), (Output.TOKENS, [3, 2, 4])):
        chunks = split(inputs, max_tokens=4, max_inputs=1, output=output)
        assert [chunk.num_rows for chunk in chunks] == counts
        rows = [np.full((n, 2), i) for i, n in enumerate(counts)]
        merged = merge(rows[::-1], chunks[::-1])
        np.testing.assert_array_equal(merged[:, 0], np.repeat([0, 1, 2], counts))


async def test_prompt_lengths_do_not_depend_on_the_thread(unprompted):
    profile = ModelProfile.read(unprompted)
    tokenizer = TextTokenizer.load(
        unprompted, literal=True, max_length=256, workers=3, lower_case=profile.do_lower_case
    )
    texts = [f"text number {i} " * (1 + i % 20) for i in range(200)]
    encoded = await tokenizer.encode(apply_prompt(texts, profile, "query"), Truncation(), True, "inputs")
    assert len({int(item.spans[0, 0]) for item in encoded}) == 1
    assert all(item.spans[0, 1] == item.num_tokens for item in encoded)
    tokenizer.close()
