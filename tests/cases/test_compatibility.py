"""Section K: routes under every name clients use, and client mistakes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases.client import assert_same

BROKEN = {
    "broken": b'{"inputs": "x"',
    "nothing": b"",
    "an array": b'["x"]',
    "a string": b'"x"',
    "null": b"null",
    "an infinite number": b'{"inputs": 1e400}',
    "duplicate keys": b'{"inputs": "x", "inputs": "y"}',
    "deep": b'{"inputs": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "not UTF-8": b'{"inputs": "\xff"}',
    "missing": b"{}",
    "NaN": b'{"inputs": NaN}',
}


def same_but_for_the_moment(reply) -> dict:
    return {k: v for k, v in reply.json().items() if k not in ("id", "created", "meta")}


def test_bc_104_embeddings_with_and_without_v1(e):
    replies = [e.post(path, input="tea") for path in ("/embeddings", "/v1/embeddings")]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert same_but_for_the_moment(replies[0]) == same_but_for_the_moment(replies[1])


def test_bc_104_rerank_under_three_names(b):
    body = {"query": "tea", "documents": ["cup", "green tea"]}
    replies = [b.post(path, body) for path in ("/rerank", "/v1/rerank", "/v2/rerank")]
    assert [reply.status_code for reply in replies] == [200, 200, 200]
    orders = [[(r["index"], r["relevance_score"]) for r in reply.json()["results"]] for reply in replies]
    assert orders[0] == orders[1] == orders[2]


def test_bc_104_score_under_two_names(b):
    body = {"query": "tea", "documents": ["cup", "green tea"]}
    replies = [b.post(path, body) for path in ("/score", "/v1/score")]
    assert same_but_for_the_moment(replies[0]) == same_but_for_the_moment(replies[1])


def test_bc_104_a_near_miss_is_told_the_right_path(e):
    reply = e.post("/v1/embedding", input="x")
    assert reply.status_code == 404
    assert "/v1/embeddings" in reply.json()["error"]["message"]


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize(
    "path", ["/embed", "/v1/embeddings", "/score", "/rerank", "/v1/rerank", "/v2/rerank"]
)
def test_bc_105_client_mistakes_are_never_5xx(e, path, body):
    reply = e.post_raw(path, body)
    assert 400 <= reply.status_code < 500, reply.text
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()
    assert error["message"]
    assert error["code"] == reply.status_code
    assert isinstance(error["error"], str if path == "/embed" else dict) or path == "/rerank"


def test_bc_105_content_types_and_methods(e):
    good = b'{"inputs": "x"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        assert e.post_raw("/embed", good, kind).status_code == 415
        assert e.post_raw("/v1/embeddings", good, kind).status_code == 400
    assert e.post_raw("/embed", good, "application/json; charset=utf-8").status_code == 200
    for path in ("/embed", "/v1/embeddings", "/score", "/rerank"):
        reply = e.get(path)
        assert reply.status_code == 405
        assert reply.headers["allow"] == "POST"


def test_bc_105_unknown_fields_are_ignored(e):
    wanted = e.embed("x")
    assert_same(e.embed("x", options={"wait_for_model": True}, surprise=[1, {"a": 2}]), wanted)
    body = e.openai("x", surprise={"deep": [None]}, user="someone", priority=0)
    assert_same(np.array([body["data"][0]["embedding"]]), wanted)
