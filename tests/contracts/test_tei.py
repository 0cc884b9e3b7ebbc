"""text-embeddings-inference's published shapes, a row a fact: routes, bodies, refusals, headers, metrics."""

from __future__ import annotations

import pytest

from tests.contracts.facts import ANY, NULLABLE_INT, NULLABLE_STR, Fact

TEXTS = ["green tea", "a truck"]
PROBLEM = {"error": str, "error_type": str, "message": str, "type": str, "code": int}
O_PROBLEM = PROBLEM | {
    "error": {"message": str, "type": str, "param": NULLABLE_STR, "code": NULLABLE_STR},
    "detail": str,
}
TIMINGS = dict.fromkeys(
    (
        "x-compute-time",
        "x-compute-characters",
        "x-compute-tokens",
        "x-total-time",
        "x-tokenization-time",
        "x-queue-time",
        "x-inference-time",
    ),
    int,
)
VECTORS = [[float]]
USAGE = {"prompt_tokens": int, "total_tokens": int}
OPENAI = {
    "object": "list",
    "data": [{"object": "embedding", "embedding": [float], "index": int}],
    "model": "E",
    "usage": USAGE,
}
TOKEN = {
    "id": int,
    "text": str,
    "special": bool,
    "start": NULLABLE_INT,
    "stop": NULLABLE_INT,
}
LABELS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
INFO = {
    "model_id": str,
    "model_sha": NULLABLE_STR,
    "model_dtype": str,
    "served_model_name": str,
    "model_type": ANY,
    "max_concurrent_requests": int,
    "max_input_length": int,
    "max_batch_tokens": int,
    "max_batch_requests": NULLABLE_INT,
    "max_client_batch_size": int,
    "auto_truncate": bool,
    "tokenization_workers": int,
    "version": str,
    "sha": NULLABLE_STR,
    "docker_label": NULLABLE_STR,
}
LONG = "word " * 600
PAIR = {"source_sentence": "tea", "sentences": TEXTS}


def problem(kind: str, status: int) -> dict:
    return PROBLEM | {"error_type": kind, "type": kind, "code": status}


def refused(name: str, path: str, send: object, status: int = 422, kind: str = "Validation", **more) -> Fact:
    return Fact(name, path, send, problem(kind, status), status, **more)


EMBED = [
    Fact("one text is a list of one vector", "/embed", {"inputs": "tea"}, VECTORS, headers=TIMINGS),
    Fact("a list", "/embed", {"inputs": TEXTS}, [[float], [float]], headers=TIMINGS),
    Fact(
        "characters are Unicode scalars", "/embed", {"inputs": "é😀"}, headers={"x-compute-characters": "2"}
    ),
    Fact("ids", "/embed", {"inputs": [101, 5572, 102]}, VECTORS, headers={"x-compute-characters": "3"}),
    Fact("ids and texts mixed", "/embed", {"inputs": ["tea", [101, 5572, 102]]}, [[float], [float]]),
    Fact("sides in both spellings", "/embed", {"inputs": LONG, "truncation_direction": "Left"}, VECTORS),
    Fact("a named prompt", "/embed", {"inputs": "tea", "prompt_name": "title"}, VECTORS),
    Fact("null is absent", "/embed", {"inputs": "tea", "truncate": None, "dimensions": None}, VECTORS),
    Fact("unknown fields are ignored", "/embed", {"inputs": "tea", "surprise": 1}, VECTORS),
    Fact("over the limit, cut by default", "/embed", {"inputs": LONG}, headers={"x-truncated-inputs": "1"}),
    refused("an empty list", "/embed", {"inputs": []}, 400, "Empty", message="`inputs` cannot be empty"),
    refused("an empty text", "/embed", {"inputs": ""}, 400, "Empty"),
    refused("too long", "/embed", {"inputs": LONG, "truncate": False}, message="inputs"),
    refused("dimensions of 0", "/embed", {"inputs": "x", "dimensions": 0}),
    refused("too many dimensions", "/embed", {"inputs": "x", "dimensions": 65}),
    refused("an unknown prompt", "/embed", {"inputs": "x", "prompt_name": "nope"}, message="nope"),
    refused(
        "too many inputs",
        "/embed",
        {"inputs": ["x"] * 2049},
        message="batch size 2049 > maximum allowed batch size 2048",
    ),
    refused("a wrong type", "/embed", {"inputs": 7}),
    refused("no inputs", "/embed", {}),
    refused("broken JSON", "/embed", b'{"inputs"', 400),
    refused("a body over the cap", "/embed", b'{"inputs":"' + b"x" * (16 << 20) + b'"}', 413),
]
EMBED_ALL = [
    Fact("token by token", "/embed_all", {"inputs": TEXTS}, [[[float]]]),
    refused("an empty text", "/embed_all", {"inputs": ""}, 400, "Empty"),
    refused("a reranker has none", "/embed_all", {"inputs": "tea"}, 424, "Backend", to="reranker"),
    refused("no SPLADE head", "/embed_sparse", {"inputs": "tea"}, 424, "Backend"),
]
OPENAI_ROUTE = [
    Fact("OpenAI's list", "/v1/embeddings", {"input": TEXTS}, OPENAI, more_keys=True),
    Fact("without /v1", "/embeddings", {"input": "tea"}, OPENAI, more_keys=True),
    Fact(
        "base64",
        "/v1/embeddings",
        {"input": "tea", "encoding_format": "base64"},
        OPENAI | {"data": [{"object": "embedding", "embedding": str, "index": 0}]},
        more_keys=True,
    ),
    Fact("an empty text", "/v1/embeddings", {"input": ""}, O_PROBLEM, 400),
]
RANKED = {"index": int, "score": float}
RERANK = [
    Fact("a bare list", "/rerank", {"query": "tea", "texts": TEXTS}, [RANKED, RANKED], headers=TIMINGS),
    Fact(
        "texts on request",
        "/rerank",
        {"query": "tea", "texts": TEXTS, "return_text": True},
        [RANKED | {"text": str}],
    ),
    Fact("logits", "/rerank", {"query": "tea", "texts": TEXTS, "raw_scores": True}, [RANKED]),
    refused(
        "no texts", "/rerank", {"query": "tea", "texts": []}, 400, "Empty", message="`texts` cannot be empty"
    ),
    refused("too long", "/rerank", {"query": "tea", "texts": [LONG], "truncate": False}),
    refused("no query", "/rerank", {"texts": TEXTS}),
]
CLASS = {"score": float, "label": "LABEL_0"}
PREDICT = [
    Fact("one text is a flat list", "/predict", {"inputs": "tea"}, [CLASS], headers=TIMINGS),
    Fact("two texts are a pair", "/predict", {"inputs": TEXTS}, [CLASS]),
    Fact("a batch is nested", "/predict", {"inputs": [["tea"], ["tea", "cup"]]}, [[CLASS], [CLASS]]),
    Fact("logits", "/predict", {"inputs": "tea", "raw_scores": True}, [CLASS]),
    refused("an empty batch", "/predict", {"inputs": []}, 400, "Empty"),
]
SIMILARITY = [
    Fact("cosines in order", "/similarity", {"inputs": PAIR}, [float, float], headers=TIMINGS),
    Fact("parameters", "/similarity", {"inputs": PAIR, "parameters": {"prompt_name": "title"}}, [float]),
    refused("no sentences", "/similarity", {"inputs": PAIR | {"sentences": []}}, 400, "Empty"),
    refused("a reranker has none", "/similarity", {"inputs": PAIR}, 424, "Backend", to="reranker"),
]
SPECIAL = TOKEN | {"special": True, "start": None, "stop": None}
TOKENS = [
    Fact(
        "special tokens have no place",
        "/tokenize",
        {"inputs": "tea"},
        [[SPECIAL, TOKEN | {"id": 5572, "text": "tea", "special": False, "start": 0, "stop": 3}, SPECIAL]],
    ),
    Fact(
        "places are UTF-8 bytes",
        "/tokenize",
        {"inputs": "é tea", "add_special_tokens": False},
        [[TOKEN, TOKEN | {"text": "tea", "special": False, "start": 3, "stop": 6}]],
    ),
    Fact("a list of lists", "/tokenize", {"inputs": TEXTS}, [[TOKEN]]),
    Fact("back to text", "/decode", {"ids": [101, 5572, 102]}, ["tea"]),
    Fact("several", "/decode", {"ids": [[5572], [101, 5572]]}, ["tea", "tea"]),
    Fact(
        "with special tokens", "/decode", {"ids": [[101, 5572]], "skip_special_tokens": False}, ["[CLS] tea"]
    ),
]
ROOT = [
    Fact("an embedder embeds", "/", {"inputs": "tea"}, VECTORS),
    Fact("SageMaker's name", "/invocations", {"inputs": "tea"}, VECTORS),
    Fact("an object is compared", "/", {"inputs": PAIR}, [float, float]),
    Fact("a reranker reranks", "/", {"query": "tea", "texts": TEXTS}, [RANKED], to="reranker"),
    Fact("a reranker predicts", "/", {"inputs": "tea"}, [CLASS], to="reranker"),
]
ABOUT = [
    Fact(
        "info",
        "/info",
        None,
        INFO | {"model_type": {"embedding": {"pooling": "mean"}}},
        method="GET",
        more_keys=True,
    ),
    Fact(
        "info of a reranker",
        "/info",
        None,
        INFO | {"model_type": {"reranker": LABELS}},
        method="GET",
        more_keys=True,
        to="reranker",
    ),
    Fact("health", "/health", None, method="GET"),
    Fact("ping", "/ping", None, method="GET"),
    Fact("health at the root", "/", None, method="GET"),
    Fact("documentation", "/docs", None, method="GET"),
    Fact("OpenAPI", "/openapi.json", None, method="GET"),
    Fact("OpenAPI under TEI's name", "/api-doc/openapi.json", None, method="GET"),
    refused("an unknown route", "/embeds", {"inputs": "x"}, 404, "NotFound", message="/embed"),
    refused("a wrong method", "/embed", None, 405, "NotFound", method="GET"),
]
RERANKER_ROUTES = {"/rerank", "/predict"}
FACTS = [*EMBED, *EMBED_ALL, *OPENAI_ROUTE, *RERANK, *PREDICT, *SIMILARITY, *TOKENS, *ROOT, *ABOUT]


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{fact.path} {fact.name}".replace(" ", "-"))
def test_fact(fact: Fact, request):
    fact.check(request.getfixturevalue("reranker" if fact.path in RERANKER_ROUTES else fact.to))


def test_a_content_type_that_is_not_json(embedder):
    reply = embedder.post_raw("/embed", b'{"inputs":"x"}', "text/plain")
    assert reply.status_code == 415
    assert reply.json()["error_type"] == "Validation"


@pytest.mark.parametrize("path", ["/embed", "/similarity"])
def test_every_reply_has_a_request_id(embedder, path):
    for body in ({"inputs": PAIR if path == "/similarity" else "x"}, {"inputs": 7}):
        reply = embedder.http.post(path, json=body, headers={"x-request-id": "mine-1"})
        assert reply.headers["x-request-id"] == "mine-1"
        assert embedder.http.post(path, json=body).headers["x-request-id"]


METRICS = [
    *(f"te_request_{name}" for name in ("count", "success", "failure")),
    *(f"te_request_{name}_bucket" for name in ("duration", "input_length")),
    *(f"te_request_{name}_duration_bucket" for name in ("tokenization", "queue", "inference")),
    "te_queue_size",
]


def test_metric_names(embedder):
    embedder.post("/embed", inputs="x")
    embedder.post("/embed", inputs=[])
    names = {line.partition("{")[0].partition(" ")[0] for line in embedder.get("/metrics").text.splitlines()}
    assert set(METRICS) <= names


def test_counts_by_method(embedder):
    before = [embedder.metric("te_request_count", method=method) for method in ("single", "batch")]
    embedder.post("/embed", inputs="x")
    embedder.post("/embed", inputs=["x", "y"])
    after = [embedder.metric("te_request_count", method=method) for method in ("single", "batch")]
    assert after == [before[0] + 1, before[1] + 1]
