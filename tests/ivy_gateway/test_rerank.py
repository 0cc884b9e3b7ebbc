"""The rerank routes: three dialects, order, ties, what is echoed, what is cut, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import lzma

import numpy as np
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from protos.codec import decode_tensor
from protos.tulip.v1 import inference_pb2 as pb
from tests.ivy_gateway.fake_tulip import FakeTulip, embedding_row, score_row

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUERY = "best tea"
DOCUMENTS = ["plum jam", "oak shelf", "a ferry to the island", "green tea"]
OBJECT_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
LONG = "tea " * 300


def reranker(**description) -> FakeTulip:
    return FakeTulip(task=pb.TASK_SCORE, dimensions=1, **description)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scorer(start_gateway):
    async with start_gateway(reranker(), max_client_batch_size=50) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder(start_gateway):
    async with start_gateway(prompts={"query": "ask: ", "passage": "answer: "}) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def ids(minilm):
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda *texts: np.array(tokenizer.encode(*texts).ids, np.int32)


@pytest.fixture(scope="module")
def logits(ids):
    return [float(score_row(ids(QUERY, document))[0]) for document in DOCUMENTS]


def by_falling(values) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def sigmoid(values):
    return 1 / (1 + np.exp(-np.array(values, np.float64)))


# three dialects


async def test_texts_give_teis_bare_list(scorer, logits):
    reply = await scorer.post("/rerank", query=QUERY, texts=DOCUMENTS)
    assert reply.status_code == 200
    assert [item["index"] for item in reply.json()] == by_falling(logits)
    assert all(item.keys() == {"index", "score"} for item in reply.json())
    expected = sorted(sigmoid(logits), reverse=True)
    np.testing.assert_allclose([item["score"] for item in reply.json()], expected, rtol=1e-5)
    characters = sum(len(QUERY) + len(document) for document in DOCUMENTS)
    assert reply.headers["x-compute-characters"] == str(characters)
    assert reply.headers["x-inference-time"] == "2"


@pytest.mark.parametrize("path", OBJECT_PATHS)
async def test_documents_give_a_rerank_object(scorer, logits, ids, path):
    reply = (await scorer.post(path, query=QUERY, documents=DOCUMENTS, model="minilm")).json()
    assert reply["object"] == "rerank"
    assert reply["id"].startswith("rerank-")
    assert reply["model"] == "minilm"
    assert [item["index"] for item in reply["results"]] == by_falling(logits)
    expected = sorted(sigmoid(logits), reverse=True)
    np.testing.assert_allclose([r["relevance_score"] for r in reply["results"]], expected, rtol=1e-5)
    tokens = sum(len(ids(QUERY, document)) for document in DOCUMENTS)
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert reply["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": tokens, "output_tokens": 0},
    }


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
async def test_texts_are_a_synonym_under_a_version(scorer, path):
    documents = (await scorer.post(path, query=QUERY, documents=DOCUMENTS)).json()["results"]
    assert (await scorer.post(path, query=QUERY, texts=DOCUMENTS)).json()["results"] == documents


@pytest.mark.parametrize(
    ("path", "field", "fields", "echoed"),
    [
        ("/rerank", "texts", {}, False),
        ("/rerank", "texts", {"return_text": True}, True),
        ("/rerank", "texts", {"return_documents": True}, True),
        ("/rerank", "documents", {}, True),
        ("/rerank", "documents", {"return_documents": None}, True),
        ("/rerank", "documents", {"return_documents": False}, False),
        ("/v1/rerank", "documents", {}, True),
        ("/v1/rerank", "documents", {"return_documents": False}, False),
        ("/v2/rerank", "documents", {}, False),
        ("/v2/rerank", "documents", {"return_documents": True}, True),
    ],
)
async def test_what_is_echoed(scorer, path, field, fields, echoed):
    reply = (await scorer.post(path, query=QUERY, **{field: DOCUMENTS}, **fields)).json()
    if field == "texts":
        shown = [item.get("text") for item in reply]
        indexes = [item["index"] for item in reply]
    else:
        shown = [item.get("document", {}).get("text") for item in reply["results"]]
        indexes = [item["index"] for item in reply["results"]]
    assert shown == [DOCUMENTS[i] if echoed else None for i in indexes]


@pytest.mark.parametrize(
    ("documents", "fields", "texts"),
    [
        ("lone", {}, ["lone"]),
        ([{"text": "a"}, "b"], {}, ["a", "b"]),
        ({"text": "a"}, {}, ["a"]),
        ([{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}, ["a\nb"]),
        (
            [{"title": "T", "text": "x", "body": "B"}, "plain"],
            {"rank_fields": ["body", "title"]},
            ["B\nT", "plain"],
        ),
        ([{"title": "T", "text": "x"}], {"rank_fields": []}, ["x"]),
        (["", "  ", "a"], {}, ["", "  ", "a"]),
    ],
)
async def test_documents_in_every_spelling(scorer, ids, documents, fields, texts):
    reply = (await scorer.post("/rerank", query=QUERY, documents=documents, raw_scores=True, **fields)).json()
    results = sorted(reply["results"], key=lambda item: item["index"])
    assert [item["document"]["text"] for item in results] == texts
    expected = [score_row(ids(QUERY, text))[0] for text in texts]
    np.testing.assert_allclose([item["relevance_score"] for item in results], expected, rtol=1e-6)


# order and number


@pytest.mark.parametrize(
    ("top_n", "count"), [(None, 4), (0, 4), (1, 1), (3, 3), (4, 4), (5, 4), (2**31 - 1, 4)]
)
@pytest.mark.parametrize(
    ("path", "field"), [("/rerank", "texts"), ("/rerank", "documents"), ("/v2/rerank", "documents")]
)
async def test_top_n(scorer, logits, path, field, top_n, count):
    reply = (await scorer.post(path, query=QUERY, top_n=top_n, **{field: DOCUMENTS})).json()
    rows = reply if field == "texts" else reply["results"]
    assert [item["index"] for item in rows] == by_falling(logits)[:count]


async def test_equal_documents_tie_by_index(scorer):
    documents = ["green tea", "black tea", "green tea", "green tea"]
    results = (await scorer.post("/rerank", query="tea", documents=documents, top_n=4)).json()["results"]
    assert [item["index"] for item in results if item["index"] != 1] == [0, 2, 3]
    assert len({item["relevance_score"] for item in results if item["index"] != 1}) == 1


async def test_order_is_that_of_logits_where_shown_scores_saturate(start_gateway):
    tulip = reranker()
    tulip.row = lambda ids: np.array([30 + len(ids) / 10], np.float32)
    async with start_gateway(tulip) as gateway:
        documents = ["water " * n for n in (5, 1, 9, 3)]
        reply = (await gateway.post("/rerank", query="boiling", texts=documents)).json()
        assert [item["index"] for item in reply] == [2, 0, 3, 1]
        assert {item["score"] for item in reply} == {1.0}


@pytest.mark.parametrize("fields", [{"raw_scores": True}, {"use_activation": False}])
@pytest.mark.parametrize("field", ["texts", "documents"])
async def test_raw_scores_are_logits(scorer, logits, fields, field):
    reply = (await scorer.post("/rerank", query=QUERY, **{field: DOCUMENTS}, **fields)).json()
    shown = (
        [r["score"] for r in reply] if field == "texts" else [r["relevance_score"] for r in reply["results"]]
    )
    np.testing.assert_allclose(shown, sorted(logits, reverse=True), rtol=1e-6)


async def test_declared_activation_is_shown(start_gateway, logits):
    async with start_gateway(reranker()) as gateway:
        gateway.pipeline.profile = dataclasses.replace(gateway.pipeline.profile, score_activation="tanh")
        reply = (await gateway.post("/rerank", query=QUERY, texts=DOCUMENTS)).json()
        expected = np.tanh(sorted(logits, reverse=True))
        np.testing.assert_allclose([item["score"] for item in reply], expected, rtol=1e-5)


async def test_rerank_and_score_agree(scorer):
    scores = (await scorer.post("/score", query=QUERY, documents=DOCUMENTS)).json()["data"]
    results = (await scorer.post("/rerank", query=QUERY, documents=DOCUMENTS)).json()["results"]
    assert [item["index"] for item in scores] == [0, 1, 2, 3]
    by_index = {item["index"]: item["relevance_score"] for item in results}
    assert [item["score"] for item in scores] == [by_index[i] for i in range(4)]


# bi-encoders


def unit(vector):
    return vector / np.linalg.norm(vector)


async def test_an_embedder_scores_by_cosine_behind_the_prompts_of_the_two_sides(embedder, ids):
    query = unit(embedding_row(ids("ask: " + QUERY)))
    cosines = [query @ unit(embedding_row(ids("answer: " + document))) for document in DOCUMENTS]
    for path in ("/v1/rerank", "/rerank"):
        reply = (await embedder.post(path, query=QUERY, documents=DOCUMENTS)).json()
        assert [item["index"] for item in reply["results"]] == by_falling(cosines)
        shown = [item["relevance_score"] for item in reply["results"]]
        np.testing.assert_allclose(shown, sorted(cosines, reverse=True), atol=1e-6)
    scores = (await embedder.post("/score", query=QUERY, documents=DOCUMENTS)).json()["data"]
    np.testing.assert_allclose([item["score"] for item in scores], cosines, atol=1e-6)


async def test_sides_that_are_alike_get_no_prompt_of_a_side(embedder, ids):
    reply = (await embedder.post("/score", text_1=QUERY, text_2=QUERY)).json()["data"]
    assert reply[0]["score"] == pytest.approx(1, abs=1e-6)


async def test_without_prompts_of_its_own_an_embedder_keeps_its_default(start_gateway, ids):
    async with start_gateway(prompts={"all": "text: "}, default_prompt_name="all") as gateway:
        reply = (await gateway.post("/rerank", query=QUERY, texts=["oak"])).json()
        expected = unit(embedding_row(ids("text: " + QUERY))) @ unit(embedding_row(ids("text: oak")))
        assert reply[0]["score"] == pytest.approx(float(expected), abs=1e-6)


# limits


def lengths(tulip: FakeTulip) -> list[int]:
    return [int(n) for request in tulip.requests for n in decode_tensor(request.lengths, "lengths")]


@pytest.mark.parametrize(
    ("fields", "tokens", "truncated"),
    [
        ({}, [256, 5], 1),
        ({"max_tokens_per_doc": 7}, [11, 5], 1),
        ({"max_tokens_per_doc": 0}, [256, 5], 1),
        ({"max_tokens_per_doc": None}, [256, 5], 1),
        ({"max_tokens_per_doc": 4096}, [256, 5], 1),
        ({"max_tokens_per_doc": 7, "truncate": False}, [11, 5], 1),
        ({"truncate_prompt_tokens": 9}, [9, 5], 1),
        ({"truncate_prompt_tokens": -1}, [256, 5], 1),
        ({"truncate": True, "truncation_direction": "Left"}, [256, 5], 1),
    ],
)
async def test_what_is_cut(start_gateway, fields, tokens, truncated):
    tulip = reranker()
    async with start_gateway(tulip) as gateway:
        reply = await gateway.post("/v2/rerank", query="tea", documents=[LONG, "cup"], **fields)
        assert reply.status_code == 200
        assert lengths(tulip) == tokens
        assert reply.headers["x-truncated-inputs"] == str(truncated)


async def test_documents_are_cut_on_the_side_that_is_asked_for(start_gateway, ids):
    tulip = reranker()
    async with start_gateway(tulip) as gateway:
        for field in ("truncation_side", "truncation_direction"):
            for side, kept in (("left", "three four"), ("right", "one two")):
                tulip.requests.clear()
                fields = {"max_tokens_per_doc": 2, field: side}
                await gateway.post("/rerank", query="tea", documents=["one two three four"], **fields)
                sent = decode_tensor(tulip.requests[0].token_ids, "token_ids")
                np.testing.assert_array_equal(sent, ids("tea", kept))


async def test_an_embedder_cuts_documents_and_queries_too(start_gateway):
    tulip = FakeTulip()
    async with start_gateway(tulip) as gateway:
        fields = {"max_tokens_per_doc": 7, "max_tokens_per_query": 3}
        reply = await gateway.post("/rerank", query=LONG, documents=[LONG, "cup"], **fields)
        assert lengths(tulip) == [3 + 2, 7 + 2, 1 + 2]
        assert reply.headers["x-truncated-inputs"] == "2"


async def test_score_cuts_documents_too(start_gateway):
    for tulip, tokens in ((reranker(), [1 + 7 + 3, 1 + 1 + 3]), (FakeTulip(), [1 + 2, 7 + 2, 1 + 2])):
        async with start_gateway(tulip) as gateway:
            await gateway.post("/score", query="tea", documents=[LONG, "cup"], max_tokens_per_doc=7)
            assert lengths(tulip) == tokens


async def test_one_long_document_among_good_ones(scorer):
    documents = ["cup", "green tea", "road", "compost " * 5000]
    cut = (await scorer.post("/rerank", query="tea", documents=documents)).json()["results"]
    alone = (await scorer.post("/rerank", query="tea", documents=documents[:3])).json()["results"]
    assert [item for item in cut if item["index"] != 3] == alone
    refused = await scorer.post("/rerank", query="tea", documents=documents, truncate=False)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["param"] == "documents[3]"


# instructions


@pytest.fixture(scope="module")
def qwen3_folder(shared, tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3-reranker")
    packed = shared / "tokenizers" / "qwen3" / "tokenizer.json.xz"
    (path / "tokenizer.json").write_bytes(lzma.decompress(packed.read_bytes()))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "max_position_embeddings": 200,
        "classifier_from_token": ["no", "yes"],
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


async def test_instructions_reach_the_template_in_both_spellings(start_gateway, qwen3_folder):
    tulip = reranker(max_length=200)
    async with start_gateway(tulip, model=qwen3_folder) as gateway:
        text = "Find recipes"
        spellings = [
            {},
            {"instruction": text},
            {"chat_template_kwargs": {"instruction": text}},
            {"instruction": text, "chat_template_kwargs": {"instruction": text, "other": None}},
        ]
        sent = []
        for path, field in (("/rerank", "texts"), ("/v2/rerank", "documents")):
            for fields in spellings:
                tulip.requests.clear()
                reply = await gateway.post(path, query="tea", **{field: ["cup"]}, **fields)
                assert reply.status_code == 200
                sent.append(decode_tensor(tulip.requests[0].token_ids, "token_ids").tolist())
        plain = Tokenizer.from_file(str(qwen3_folder / "tokenizer.json"))
        assert [text in plain.decode(one) for one in sent] == [False, True, True, True] * 2
        assert sent[1] == sent[2] == sent[3] == sent[5]
        assert sent[0] == sent[4]
        differ = {"instruction": text, "chat_template_kwargs": {"instruction": "Other"}}
        refused = await gateway.post("/rerank", query="tea", documents=["cup"], **differ)
        assert refused.json()["error"]["param"] == "instruction"


# refusals

REFUSED = [
    ({"query": "tea", "documents": []}, "documents", "`documents` cannot be empty"),
    ({"query": "", "documents": ["a"]}, "query", "`query` cannot be blank"),
    ({"query": " \n", "documents": ["a"]}, "query", "`query` cannot be blank"),
    ({"documents": ["a"]}, "query", "`query` is required"),
    ({"query": ["tea"], "documents": ["a"]}, "query", "`query` must be a string"),
    ({"query": "tea", "documents": ["a", None]}, "documents[1]", "`documents[1]`"),
    ({"query": "tea", "documents": ["a", 3]}, "documents[1]", "got an integer"),
    ({"query": "tea", "documents": [{"title": "a"}]}, "documents[0].text", "`documents[0].text`"),
    ({"query": "tea", "documents": [{"title": "a"}], "rank_fields": ["b"]}, "documents[0].b", "got null"),
    ({"query": "tea", "documents": ["a"], "rank_fields": "text"}, "rank_fields", "must be a list of strings"),
    ({"query": "tea", "documents": ["a"], "rank_fields": [3]}, "rank_fields[0]", "must be a string"),
    (
        {"query": "tea", "documents": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "documents[0].content[0].type",
        "only texts",
    ),
    ({"query": "tea", "documents": ["a"], "texts": ["a"]}, "texts", "give one of them"),
    ({"query": "tea", "documents": ["a"] * 51}, None, "batch size 51 > maximum allowed batch size 50"),
    ({"query": "tea", "documents": ["a"], "top_n": -1}, "top_n", "`top_n` must be 0 to"),
    ({"query": "tea", "documents": ["a"], "top_n": "2"}, "top_n", "`top_n` must be an integer, got a string"),
    ({"query": "tea", "documents": ["a"], "top_n": 1.0}, "top_n", "must be an integer"),
    ({"query": "tea", "documents": ["a"], "top_n": True}, "top_n", "must be an integer"),
    ({"query": "tea", "documents": ["a"], "return_documents": "no"}, "return_documents", "must be a boolean"),
    ({"query": "tea", "documents": ["a"], "raw_scores": 1}, "raw_scores", "must be a boolean"),
    ({"query": "tea", "documents": ["a"], "max_tokens_per_doc": -1}, "max_tokens_per_doc", "0 to"),
    ({"query": "tea", "documents": ["a"], "truncate": "END"}, "truncate", "must be a boolean"),
    ({"query": "tea", "documents": ["a"], "truncation_side": "up"}, "truncation_side", "right, left"),
    ({"query": "tea", "documents": ["a"], "instruction": "x"}, "instruction", "is not supported"),
    ({"query": "tea", "documents": ["a"], "chat_template": "x"}, "chat_template", "the server's own"),
    ({"query": "tea", "documents": ["a"], "chat_template_kwargs": [1]}, "chat_template_kwargs", "an object"),
    ({"query": "tea", "documents": ["a"], "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", "'x'"),
    ({"query": "tea", "documents": ["a"], "relevant_spans": {"mode": "on"}}, "relevant_spans", "not"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "words"), REFUSED)
async def test_refused_in_the_words_of_the_dialect(scorer, body, param, words):
    for path in OBJECT_PATHS:
        reply = await scorer.post(path, **body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
        assert words in reply.json()["error"]["message"]
    if "texts" not in body and "documents" in body:
        native = {("texts" if name == "documents" else name): value for name, value in body.items()}
        reply = await scorer.post("/rerank", **native)
        assert reply.status_code in (400, 422)
        assert (
            words.replace("documents", "texts").replace("return_texts", "return_documents")
            in reply.json()["error"]
        )


async def test_neither_key_is_told_both_names(scorer):
    reply = await scorer.post("/rerank", query="tea")
    assert (reply.status_code, reply.json()["error_type"]) == (422, "Validation")
    assert "`documents`" in reply.json()["error"]
    assert "`texts`" in reply.json()["error"]


async def test_model_names_count_where_documents_are_ranked(scorer):
    for path in OBJECT_PATHS:
        reply = await scorer.post(path, query="tea", documents=["a"], model="nope")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert (await scorer.post("/rerank", query="tea", texts=["a"], model="nope")).status_code == 200


async def test_a_model_of_several_labels_ranks_nothing(start_gateway):
    tulip = FakeTulip(task=pb.TASK_SCORE, dimensions=3)
    async with start_gateway(tulip) as gateway:
        native = await gateway.post("/rerank", query="tea", texts=["a"])
        assert (native.status_code, native.json()["error_type"]) == (424, "Backend")
        reply = await gateway.post("/rerank", query="tea", documents=["a"])
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "model_not_supported")
