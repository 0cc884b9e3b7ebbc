"""Section C: length and truncation."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil

import numpy as np
import pytest

from tests.cases.client import (
    CONTROL,
    assert_near_reference,
    assert_refused,
    assert_same,
    message_of,
    together,
)
from tests.cases.fleet import started

LIMIT = 512


def cats(num_tokens: int) -> str:
    """A text of `num_tokens` tokens in every tokenizer used here, special tokens not counted."""
    return " ".join(["cat"] * num_tokens)


@pytest.mark.parametrize(("kind", "specials"), [("e", 2), ("d", 1), ("w", 2)])
def test_bc_024_one_token_over_the_limit(kind, specials, request):
    stack = request.getfixturevalue(kind)
    over, fits = cats(LIMIT + 1 - specials), cats(LIMIT - specials)
    assert stack.embed(fits, truncate=False).shape[0] == 1
    reply = stack.post("/embed", inputs=["tea", over], truncate=False)
    assert_refused(reply, "inputs[1]", str(LIMIT + 1), str(LIMIT), status=[422])
    reply = stack.post("/v1/embeddings", input=["tea", over], truncate=False)
    assert_refused(reply, "input[1]", str(LIMIT + 1), str(LIMIT), status=[400])
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_bc_026_truncate_applies_to_lists(e):
    text = "tea " * 3000
    alone = e.embed(text, truncate=True)
    assert_same(e.embed([text], truncate=True), alone)
    assert_same(e.embed([text, "tea"], truncate=True)[:1], alone)


LONG = "tea " * 3000
TRUNCATING = {
    "/embed": {"inputs": LONG},
    "/v1/embeddings": {"input": LONG},
    "/score": {"query": "tea", "documents": [LONG]},
    "/rerank": {"query": "tea", "documents": [LONG]},
}


@pytest.mark.parametrize("path", TRUNCATING)
def test_bc_027_one_rule_on_four_routes(e, strict, path):
    body = TRUNCATING[path]
    for stack, default in ((e, True), (strict, False)):
        for asked in (None, True, False):
            reply = stack.post(path, body | {"truncate": asked})
            wanted = 200 if (default if asked is None else asked) else 422 if path == "/embed" else 400
            assert reply.status_code == wanted, (default, asked, reply.text)
            assert wanted != 200 or reply.headers["x-truncated-inputs"] == "1"
        assert stack.post(path, body | {"truncate": "yes"}).status_code in (400, 422)
        assert stack.get("/info").json()["auto_truncate"] is default


def test_bc_029_the_end_token_survives_the_cut(d, reference_d):
    common = cats(2 * LIMIT)
    vectors = d.embed([f"{common} one end", f"{common} another"], truncate=True)
    assert_same(vectors[0], vectors[1])
    ids = reference_d.ids(common)
    assert ids[-1] == 151_643
    assert_near_reference(vectors, reference_d.embed(common, common))
    without_end = reference_d.raw([ids[0]] * LIMIT)
    without_end /= np.linalg.norm(without_end)
    assert vectors[0] @ without_end < 0.999


def test_bc_031_one_over_long_document_among_good_ones(x):
    query = "how to prune roses"
    documents = ["Prune roses in late winter.", "Use sharp shears.", "Boats need paint.", "compost " * 5000]
    alone = x.score(query, documents[:3], raw_scores=True)
    mixed = x.score(query, documents, raw_scores=True, truncate=True)
    assert_same(mixed[:3], alone, 1e-3)
    results = {r["index"]: r["relevance_score"] for r in x.rerank(query, documents, raw_scores=True)}
    assert_same(np.array([results[i] for i in range(4)]), mixed, 1e-3)
    for path in ("/score", "/rerank"):
        reply = x.post(path, query=query, documents=documents, truncate=False)
        assert_refused(reply, "documents[3]", status=[400])


def test_bc_033_pairs_around_the_position_limit(x, reference_x):
    specials = 4  # <s> a </s> </s> b </s>
    lengths = range(509, 517)
    documents = [cats(length - specials - 1) for length in lengths]
    together_ = x.score("cat", documents, raw_scores=True)
    alone = [x.score("cat", [document], raw_scores=True)[0] for document in documents]
    assert_same(together_, np.array(alone), 1e-3)
    wanted = reference_x.logits("cat", documents[:4])
    np.testing.assert_allclose(together_[:4], wanted, atol=1e-3)
    # What is over the limit scores as what is left of it.
    np.testing.assert_allclose(together_[4:], np.repeat(wanted[-1:], 4), atol=1e-3)
    assert x.post("/score", query="cat", documents=["cat"]).status_code == 200


@pytest.fixture
def long_decoder(reference_d, kinds):
    """D again, with its whole 32,768 positions."""
    folder = shutil.copytree(reference_d.folder, kinds / "D-long", dirs_exist_ok=True)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32_768}))
    with started(folder) as stack:
        yield stack, dataclasses.replace(reference_d, folder=folder, limit=32_768)


def test_bc_035_long_inputs_do_not_stall_the_service(long_decoder, whole):
    stack, reference = long_decoder
    number, size = (10, 25_000) if whole else (3, 4_000)
    kinds = [
        "for i in range(10): print(i)\n",
        "2026-11-30 10:00:01 INFO served in 3 ms\n",
        "a",
        "{}[]();",
        "的",
    ]
    unit_tokens = [len(reference.ids(kind * 8)) / 8 for kind in kinds]
    texts = [f"{i} {kinds[i % len(kinds)] * int(size / unit_tokens[i % len(kinds)])}" for i in range(number)]

    async def work(client):
        finished = asyncio.Event()
        controls = []

        async def control():
            while not finished.is_set():
                controls.append((await client.post("/embed", json={"inputs": CONTROL})).status_code)
                await asyncio.sleep(0.2)

        watch = asyncio.create_task(control())
        replies = [await client.post("/embed", json={"inputs": text, "truncate": False}) for text in texts]
        finished.set()
        await watch
        return replies, controls

    replies, controls = together(stack, work)
    assert [reply.status_code for reply in replies] == [200] * number, message_of(replies[-1])
    assert set(controls) == {200}
    assert int(replies[0].headers["x-compute-tokens"]) > size / 2
