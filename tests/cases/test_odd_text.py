"""Section B: hostile and odd text."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases import models
from tests.cases.client import assert_near_reference, assert_refused, assert_same

SURROGATES = [rb"broken \ud83d half", rb"\ude00"]


@pytest.mark.parametrize("text", SURROGATES, ids=["high", "low"])
def test_bc_016_half_a_surrogate_pair(e, x, text):
    bodies = [
        (e, "/v1/embeddings", b'{"input":"%b"}', "input"),
        (e, "/v1/embeddings", b'{"input":["ok","%b"]}', "input[1]"),
        (e, "/embed", b'{"inputs":"%b"}', "inputs"),
        (x, "/score", b'{"query":"%b","documents":["a"]}', "query"),
        (x, "/score", b'{"query":"a","documents":["b","%b"]}', "documents[1]"),
        (x, "/rerank", b'{"query":"%b","documents":["a"]}', "query"),
        (x, "/rerank", b'{"query":"a","documents":["b","%b"]}', "documents[1]"),
        (x, "/rerank", b'{"query":"a","texts":["%b"]}', "texts[0]"),
    ]
    for stack, path, template, field in bodies:
        assert_refused(stack.post_raw(path, template % text), f"`{field}`", "surrogate", status=[400])


def test_bc_016_a_pair_is_one_character(e):
    reply = e.post_raw("/embed", rb'{"inputs":"smile \ud83d\ude00"}')
    assert reply.status_code == 200
    assert_same(np.array(reply.json()), e.embed("smile 😀"))


CONTROLS = ["left\u0000right", "\u0001\u001b[31m", "a\u0008b", "tab\tand\r\nlines", "\u0085\u2028"]


@pytest.mark.parametrize("text", CONTROLS, ids=ascii)
def test_bc_018_control_characters(e, d, b, reference_e, reference_d, reference_b, text):
    for stack, reference in ((e, reference_e), (d, reference_d)):
        reply = stack.post("/embed", inputs=[text])
        assert reply.status_code == 200, reply.text
        assert int(reply.headers["x-compute-tokens"]) == len(reference.ids(text))
        assert_near_reference(np.array(reply.json()), reference.embed(text))
    scores = b.score("query", [text, "plain"], raw_scores=True)
    assert_near_reference(scores, reference_b.logits("query", [text, "plain"]))


@pytest.mark.parametrize("kind", ["e", "d"])
def test_bc_019_emoji_sequences_across_the_cut(kind, request):
    stack = request.getfixturevalue(kind)
    reference = request.getfixturevalue(f"reference_{kind}")
    for shift in range(10):
        text = "x" * shift + "👩🏽‍🚀👨‍👩‍👧‍👦🇳🇵 " * 600
        body = stack.openai(text, truncate=True)
        assert body["usage"]["prompt_tokens"] == reference.limit
        assert_near_reference(np.array([body["data"][0]["embedding"]]), reference.embed(text))


TINY = [".", "-", "7", "5.2", "a", "的", "\u200b", "\ufe0f", "🙂", " ", "\n"]


@pytest.mark.parametrize("kind", ["e", "d", "w"])
def test_bc_021_tiny_inputs(kind, request):
    stack = request.getfixturevalue(kind)
    for text in TINY:
        vector = stack.embed(text)[0]
        np.testing.assert_allclose(np.linalg.norm(vector), 1, atol=1e-5)
        assert_same(stack.embed([text] * 50), np.tile(vector, (50, 1)))


@pytest.mark.parametrize("kind", ["e", "d"])
def test_bc_022_a_hundred_thousand_characters(kind, request):
    stack = request.getfixturevalue(kind)
    reference: models.Embedder = request.getfixturevalue(f"reference_{kind}")
    text = "silver river " * 7700
    reply = stack.post("/embed", inputs=text, truncate=True)
    assert reply.status_code == 200, reply.text
    assert int(reply.headers["x-compute-tokens"]) == reference.limit
    assert reply.headers["x-truncated-inputs"] == "1"
    assert_near_reference(np.array(reply.json()), reference.embed(text))
