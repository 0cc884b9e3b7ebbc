"""Section E: batching, pooling, repetition, precision."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.cases import models
from tests.cases.client import assert_near_reference, assert_refused, assert_same, message_of

WORDS = ("river", "maple", "copper", "seven", "Zürich", "42", "quietly", "naïve", "東京", "stone,", "blue?")


def sentences(count: int, longest: int, seed: int = 3) -> list[str]:
    """Different texts of 1 .. `longest` words, in no order of length."""
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(1, longest))) + f" {i}" for i in range(count)]


@pytest.mark.parametrize("kind", ["e", "d", "w"])
def test_bc_045_a_batch_equals_its_items_alone(kind, request, whole):
    stack = request.getfixturevalue(kind)
    reference: models.Embedder = request.getfixturevalue(f"reference_{kind}")
    texts = sentences(64, 300 if whole else 80)
    alone = np.concatenate([stack.embed(text) for text in texts])
    assert_near_reference(alone[::8], reference.embed(*texts[::8]))
    order = random.Random(1).sample(range(64), 64)
    for size in (2, 8, 16, 17, 64):
        rows = np.concatenate(
            [stack.embed([texts[i] for i in order[at : at + size]]) for at in range(0, 64, size)]
        )
        assert_same(rows, alone[order])


@pytest.mark.parametrize("kind", ["e", "d"])
def test_bc_047_short_inputs_alone(kind, request):
    stack = request.getfixturevalue(kind)
    texts = [text[:12] for text in sentences(300, 3, seed=7)]
    alone = np.concatenate([stack.embed(text) for text in texts])
    np.testing.assert_allclose(np.linalg.norm(alone, axis=1), 1, atol=1e-5)
    assert_same(stack.embed(texts), alone)


@pytest.mark.parametrize("kind", ["d", "w"])
def test_bc_049_first_use_of_a_shape_and_its_repetitions(kind, request):
    stack = request.getfixturevalue(kind)
    first, others = sentences(11, 23, seed=101), sentences(11, 23, seed=102)
    wanted = stack.embed(first)
    for _ in range(5):
        assert_same(stack.embed(first), wanted)
    stack.embed(sentences(40, 60, seed=103))
    assert_same(stack.embed(others), np.concatenate([stack.embed(text) for text in others]))
    assert_same(stack.embed(first), wanted)


def test_bc_050_the_same_request_ten_times(d):
    words = ["cat"] * 299
    first = d.embed(" ".join(words))
    for _ in range(10):
        assert_same(d.embed(" ".join(words)), first)
    d.embed(" ".join(words[:200] + ["dog"] * 99))
    assert_same(d.embed(" ".join(words)), first)


def test_bc_052_no_value_is_missing(e):
    alphabet = [
        "Ωμέγα",
        "x = y[0]; // 1e-7",
        "1.000.000,00",
        "नमस्ते",
        "ﷺ",
        "Nguyễn",
        "𝔘𝔫𝔦",
        "\t{}",
        "NaN",
        "inf",
    ]
    texts = [
        f"{alphabet[i % len(alphabet)]} {i * 7919} {alphabet[i // 7 % len(alphabet)]}" for i in range(2000)
    ]
    reply = e.post("/v1/embeddings", input=texts)
    assert reply.status_code == 200
    assert b"null" not in reply.content
    rows = np.array([item["embedding"] for item in reply.json()["data"]], np.float32)
    assert np.isfinite(rows).all()
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "field", "status"), [("/v1/embeddings", "input", 500), ("/embed", "inputs", 424)]
)
def test_bc_052_one_row_that_is_not_finite(two, faults, path, field, status):
    before = two.metric("ivy_errors_total", kind="InferenceFailed")
    retries = two.metric("ivy_chunk_retries_total")
    for attempt in range(2):  # the retry meets one as well
        (faults / f"nan.{attempt}").touch()
    reply = two.post(path, {field: ["one", "two two", "three three three"]})
    assert_refused(reply, "0", status=[status])
    assert "not finite" in message_of(reply) or "finite" in message_of(reply)
    assert not list(faults.iterdir())
    assert two.metric("ivy_errors_total", kind="InferenceFailed") == before + 1
    assert two.metric("ivy_chunk_retries_total") == retries + 1


def test_bc_052_a_row_that_is_not_finite_once_is_computed_again(two, faults, e):
    (faults / "nan.1").touch()
    assert_same(two.embed("again"), e.embed("again"))
    assert not list(faults.iterdir())


WATER = "boiling point of water at sea level"


def test_bc_054_saturated_scores_keep_their_order(x, reference_x):
    detail = ("at", "sea", "level", "its", "vapour", "pressure", "is", "one", "atmosphere", "and", "rises")
    documents = [
        "Water boils at 100 degrees. " + " ".join(detail[: i % 11] * (1 + i // 11)) for i in range(30)
    ]
    random.Random(9).shuffle(documents)
    logits = reference_x.logits(WATER, documents)
    results = x.rerank(WATER, documents)
    assert {r["relevance_score"] for r in results} == {1.0}, "meant to be saturated"
    order = [r["index"] for r in results]
    assert np.diff(logits[order]).max() <= 2e-3
    raw = {r["index"]: r["relevance_score"] for r in x.rerank(WATER, documents, raw_scores=True)}
    np.testing.assert_allclose([raw[i] for i in range(30)], logits, atol=2e-3)
    assert len(set(raw.values())) == len(set(documents))


@pytest.mark.parametrize("total", [16_383, 16_384, 16_385, 20_000])
def test_bc_056_large_totals_in_one_request(e, total):
    count = 40
    lengths = [total // count + (i < total % count) for i in range(count)]
    texts = [" ".join([WORDS[i % 4]] * (length - 2)) for i, length in enumerate(lengths)]
    body = e.openai(texts)
    assert body["usage"]["prompt_tokens"] == total
    rows = np.array([item["embedding"] for item in body["data"]], np.float32)
    for i in (0, 13, 39):
        assert_same(rows[i], e.embed(texts[i])[0])
