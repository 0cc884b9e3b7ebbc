"""vLLM's request forms and replies on its pooling routes, a row a fact."""

from __future__ import annotations

import json
import struct
import sys

import numpy as np
import pytest

from tests.contracts.facts import ANY, NULLABLE_STR, Fact

TEXTS = ["green tea", "a truck"]
CHAT = {"role": "user", "content": "tea"}
LONG = "word " * 600
USAGE = {
    "prompt_tokens": int,
    "total_tokens": int,
    "completion_tokens?": 0,
    "prompt_tokens_details?": None,
}
ENVELOPE = {"id": str, "object": "list", "created": int, "model": str, "usage": USAGE}
PROBLEM = {
    "error": {"message": str, "type": str, "param": NULLABLE_STR, "code": NULLABLE_STR},
    **dict.fromkeys(("message", "detail", "type", "error_type"), str),
    "code": int,
}


def refused(name: str, path: str, send: object, status: int = 400, **more) -> Fact:
    return Fact(name, path, send, PROBLEM | {"code": status}, status, **more)


EMBEDDING = {"index": int, "object": "embedding", "embedding": [float]}
EMBEDDINGS = ENVELOPE | {"data": [EMBEDDING]}
ENCODED = ENVELOPE | {"data": [EMBEDDING | {"embedding": str}]}


def embedding(name: str, shape: object = EMBEDDINGS, **send) -> Fact:
    return Fact(name, "/v1/embeddings", {"input": "tea"} | send, shape)


EMBED = [
    embedding("one text"),
    embedding(
        "several", ENVELOPE | {"data": [EMBEDDING | {"index": 0}, EMBEDDING | {"index": 1}]}, input=TEXTS
    ),
    embedding("base64", ENCODED, encoding_format="base64"),
    embedding("half precision", ENCODED, encoding_format="base64", embed_dtype="float16"),
    embedding("brain floats", ENCODED, encoding_format="base64", embed_dtype="bfloat16"),
    embedding("big endian", ENCODED, encoding_format="base64", endianness="big"),
    embedding("no scaling", use_activation=False),
    embedding(
        "cut to ten tokens",
        EMBEDDINGS | {"usage": USAGE | {"prompt_tokens": 10}},
        input=LONG,
        truncate_prompt_tokens=10,
    ),
    embedding(
        "cut to the limit",
        EMBEDDINGS | {"usage": USAGE | {"prompt_tokens": 512}},
        input=LONG,
        truncate_prompt_tokens=-1,
    ),
    embedding("cut on the left", input=LONG, truncate_prompt_tokens=10, truncation_side="left"),
    embedding(
        "without special tokens",
        EMBEDDINGS | {"usage": USAGE | {"prompt_tokens": 1}},
        add_special_tokens=False,
    ),
    embedding("a served model", model="E", user="someone", priority=0, request_id="r1", cache_salt="s"),
    embedding("unknown fields", surprise={"a": 1}),
    refused(
        "a conversation is refused, not ignored", "/v1/embeddings", {"messages": [CHAT]}, message="messages"
    ),
    refused("an unknown model", "/v1/embeddings", {"input": "x", "model": "nope"}, 404),
    refused("no input", "/v1/embeddings", {"model": "E"}),
    refused(
        "input beside messages", "/v1/embeddings", {"input": "x", "messages": [CHAT]}, message="not both"
    ),
    refused("an empty text", "/v1/embeddings", {"input": ""}),
    refused("dimensions it was not trained for", "/v1/embeddings", {"input": "x", "dimensions": 32}),
    refused("a side that is none", "/v1/embeddings", {"input": "x", "truncation_side": "middle"}),
    refused("a limit that is none", "/v1/embeddings", {"input": "x", "truncate_prompt_tokens": -2}),
    refused("a type that is none", "/v1/embeddings", {"input": "x", "embed_dtype": "int3"}),
    refused("too long", "/v1/embeddings", {"input": LONG, "truncate": False}),
]
POOLED = {"index": int, "object": "pooling", "data": ANY}
POOLED_TOKENS = ENVELOPE | {"data": [POOLED | {"data": [[float]]}]}
POOLING = [
    Fact(
        "as the model pools", "/pooling", {"input": TEXTS}, ENVELOPE | {"data": [POOLED | {"data": [float]}]}
    ),
    Fact(
        "asked for",
        "/pooling",
        {"input": "tea", "task": "embed"},
        ENVELOPE | {"data": [POOLED | {"data": [float]}]},
    ),
    Fact(
        "token by token",
        "/pooling",
        {"input": "tea", "task": "token_embed"},
        ENVELOPE | {"data": [POOLED | {"data": [[float]]}]},
    ),
    Fact(
        "base64",
        "/pooling",
        {"input": "tea", "encoding_format": "base64"},
        ENVELOPE | {"data": [POOLED | {"data": str}]},
    ),
    refused("dimensions are not taken", "/pooling", {"input": "tea", "dimensions": 32}),
    refused("a task that it has not", "/pooling", {"input": "tea", "task": "classify"}),
]
CLASSIFIED = {"index": int, "label": "LABEL_0", "probs": [float], "num_classes": 1}
CLASSIFY = [
    Fact(
        "probabilities",
        "/classify",
        {"input": TEXTS},
        ENVELOPE | {"data": [CLASSIFIED, CLASSIFIED]},
        to="reranker",
    ),
    Fact(
        "logits",
        "/classify",
        {"input": "tea", "use_activation": False},
        ENVELOPE | {"data": [CLASSIFIED]},
        to="reranker",
    ),
    refused("an embedder has no labels", "/classify", {"input": "tea"}),
]
SCORED = {"index": int, "object": "score", "score": float}
ONE, TWO = (
    ENVELOPE | {"data": [SCORED | {"index": 0}]},
    ENVELOPE | {"data": [SCORED | {"index": 0}, SCORED | {"index": 1}]},
)
SIDES = [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]


def scoring(name: str, send: object, shape: object = TWO, path: str = "/score") -> Fact:
    return Fact(name, path, send, shape, to="reranker")


SCORE = [
    *(scoring(f"{left} and {right}", {left: "tea", right: TEXTS}) for left, right in SIDES),
    scoring("one to one", {"text_1": "tea", "text_2": "cup"}, ONE),
    scoring("as many as many", {"text_1": TEXTS, "text_2": TEXTS}),
    scoring("under /v1", {"text_1": "tea", "text_2": TEXTS}, path="/v1/score"),
    scoring("logits", {"text_1": "tea", "text_2": TEXTS, "use_activation": False}),
    scoring(
        "cut",
        {"text_1": "tea", "text_2": LONG, "truncate_prompt_tokens": 20},
        ONE | {"usage": USAGE | {"prompt_tokens": 20}},
    ),
    scoring(
        "a cut query",
        {"text_1": LONG, "text_2": "cup", "max_tokens_per_query": 5},
        ONE | {"usage": USAGE | {"prompt_tokens": 9}},
    ),
    scoring(
        "a cut document",
        {"text_1": "tea", "text_2": LONG, "max_tokens_per_doc": 5},
        ONE | {"usage": USAGE | {"prompt_tokens": 9}},
    ),
    scoring(
        "ready-joined ids",
        {"input_ids": [[101, 5572, 102, 2452, 102]], "token_type_ids": [[0, 0, 0, 1, 1]]},
        ONE,
    ),
    scoring("pairs of ids", {"input_ids": [[[5572], [2452]]]}, ONE | {"usage": USAGE | {"prompt_tokens": 5}}),
    refused("two against three", "/score", {"text_1": TEXTS, "text_2": [*TEXTS, "x"]}, to="reranker"),
    refused("one side only", "/score", {"text_1": TEXTS}, to="reranker"),
    Fact("an embedder scores by cosine", "/score", {"text_1": "tea", "text_2": TEXTS}, TWO),
]
RESULT = {"index": int, "relevance_score": float, "document?": {"text": str, "multi_modal?": None}}
RERANKED = {"id": str, "model": str, "usage": USAGE, "results": [RESULT, RESULT]}


def ranking(name: str, shape: object = RERANKED, path: str = "/rerank", **send) -> Fact:
    send = {"query": "tea", "documents": TEXTS} | send
    return Fact(name, path, send, shape, to="reranker", more_keys=True)


SHOWN = RESULT | {"document": {"text": str, "multi_modal?": None}}
SHOWN.pop("document?")
RERANK = [
    *(ranking(f"under {path}", path=path) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    ranking("documents are shown", RERANKED | {"results": [SHOWN, SHOWN]}),
    ranking("one document that is no list", RERANKED | {"results": [RESULT | {"index": 0}]}, documents="cup"),
    ranking("the best one", RERANKED | {"results": [RESULT | {"index": int}]}, top_n=1),
    ranking("none means all", top_n=0),
    ranking("parts of a document", documents=[{"content": [{"type": "text", "text": "a"}]}, "b"]),
    ranking("cut documents", documents=[LONG, "b"], max_tokens_per_doc=7, max_tokens_per_query=3),
    refused("no query", "/rerank", {"documents": TEXTS}, to="reranker"),
    refused("no documents", "/v1/rerank", {"query": "tea", "documents": []}, to="reranker"),
    refused(
        "an unknown model", "/v2/rerank", {"query": "a", "documents": ["b"], "model": "x"}, 404, to="reranker"
    ),
]
BY_TYPE = {
    "id": str,
    "embeddings": {"float": [[float]]},
    "texts?": [str],
    "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": int, "image_tokens?": 0}},
    "response_type": "embeddings_by_type",
}


def by_type(name: str, embeddings: object, **send) -> Fact:
    send = {"model": "E", "texts": TEXTS, "input_type": "search_document"} | send
    return Fact(name, "/v2/embed", send, BY_TYPE | {"embeddings": embeddings})


COHERE = [
    by_type("floats", {"float": [[float], [float]]}),
    by_type(
        "four types",
        {"float": [[float]], "binary": [[int]], "ubinary": [[int]], "base64": [str]},
        embedding_types=["float", "binary", "ubinary", "base64"],
    ),
    by_type(
        "content parts",
        {"float": [[float]]},
        texts=None,
        inputs=[{"content": [{"type": "text", "text": "tea"}]}],
    ),
    by_type("cut at the start", {"float": [[float]]}, texts=[LONG], truncate="START"),
    refused("not cut", "/v2/embed", {"model": "E", "input_type": "x", "texts": [LONG], "truncate": "NONE"}),
    refused(
        "int8 without a quantiser",
        "/v2/embed",
        {"model": "E", "input_type": "x", "texts": ["a"], "embedding_types": ["int8"]},
    ),
]
FLOATS = {
    "id": str,
    "embeddings": [[float]],
    "texts": TEXTS,
    "meta": {"api_version": {"version": "1"}, "billed_units": {"input_tokens": int, "image_tokens?": 0}},
    "response_type": "embeddings_floats",
}
COHERE.append(Fact("the first version", "/v1/embed", {"texts": TEXTS}, FLOATS))
COUNTED = {"count": 3, "max_model_len": 512, "tokens": [101, 5572, 102], "token_strs": None}
TOKENS = [
    Fact("ids", "/tokenize", {"prompt": "tea"}, COUNTED),
    Fact(
        "pieces",
        "/tokenize",
        {"prompt": "tea", "return_token_strs": True},
        COUNTED | {"token_strs": ["[CLS]", "tea", "[SEP]"]},
    ),
    Fact(
        "no special tokens",
        "/tokenize",
        {"prompt": "tea", "add_special_tokens": False},
        COUNTED | {"count": 1, "tokens": [5572]},
    ),
    Fact("back", "/detokenize", {"tokens": [5572]}, {"prompt": "tea"}),
]
CLASSIFIED_LIST = ENVELOPE | {"data": [CLASSIFIED]}
INVOCATIONS = [
    Fact("embeddings", "/invocations", {"input": TEXTS}, EMBEDDINGS),
    Fact("base64", "/invocations", {"input": "tea", "encoding_format": "base64"}, ENCODED),
    Fact("pooling, by its task", "/invocations", {"input": "tea", "task": "token_embed"}, POOLED_TOKENS),
    Fact("an unknown task is a hint", "/invocations", {"input": "tea", "task": "text-matching"}, EMBEDDINGS),
    Fact("classes", "/invocations", {"input": "tea"}, CLASSIFIED_LIST, to="reranker"),
    *(
        Fact(f"scores of {left}", "/invocations", {left: "tea", right: TEXTS}, TWO, to="reranker")
        for left, right in SIDES
    ),
    Fact(
        "a ranking",
        "/invocations",
        {"query": "tea", "documents": TEXTS},
        RERANKED,
        to="reranker",
        more_keys=True,
    ),
    refused("a conversation without a template", "/invocations", {"messages": [CHAT]}, message="messages"),
    refused("one side only", "/invocations", {"text_1": "tea"}, message="text_2"),
]
MODEL = {"id": str, "object": "model", "created": int, "owned_by": str, "max_model_len": 512}
ABOUT = [
    refused("chunks without a contextual model", "/v1/contextualizedembeddings", {"input": [["a", "b"]]}),
    Fact("models", "/v1/models", None, {"object": "list", "data": [MODEL]}, method="GET"),
    Fact("version", "/version", None, {"version": str}, method="GET"),
    Fact("health", "/health", None, method="GET"),
    Fact("ping", "/ping", None, method="GET"),
    Fact("ping, posted", "/ping", None),
    Fact("metrics", "/metrics", None, method="GET"),
    refused("an unknown route", "/v1/nothing", {}, 404),
    refused("a wrong method", "/v1/embeddings", None, 405, method="GET"),
]
FACTS = [*EMBED, *POOLING, *CLASSIFY, *SCORE, *RERANK, *COHERE, *TOKENS, *INVOCATIONS, *ABOUT]


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{fact.path} {fact.name}".replace(" ", "-"))
def test_fact(fact: Fact, request):
    fact.check(request.getfixturevalue(fact.to))


DTYPES = {"float32": "f4", "float16": "f2"}


@pytest.mark.parametrize("endianness", ["little", "big", "native"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_with_their_places_in_a_header(embedder, dtype, endianness):
    send = {"encoding_format": "bytes", "embed_dtype": dtype, "endianness": endianness}
    reply = embedder.post("/v1/embeddings", input=TEXTS, **send)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(reply.headers["metadata"])
    assert {"id", "created", "model", "data", "usage"} <= set(metadata)
    wanted = embedder.embed(TEXTS)
    order = {"little": "<", "big": ">", "native": "="}[endianness]
    for item, row in zip(metadata["data"], wanted, strict=True):
        part = reply.content[item["start"] : item["end"]]
        values = np.frombuffer(part, order + DTYPES[dtype]).reshape(item["shape"])
        np.testing.assert_allclose(values.ravel(), row, atol=1e-6 if dtype == "float32" else 1e-3)
        assert item["embed_dtype"] == dtype
        assert item["endianness"] in (endianness, sys.byteorder if endianness == "native" else endianness)


def test_bytes_only(embedder):
    reply = embedder.post("/v1/embeddings", input="tea", encoding_format="bytes_only")
    assert "metadata" not in reply.headers
    values = struct.unpack("<64f", reply.content)
    np.testing.assert_allclose(values, embedder.embed("tea")[0], atol=1e-6)
