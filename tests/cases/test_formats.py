"""Section F: how vectors are written, shortened and scaled."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from tests.cases import models
from tests.cases.client import assert_near_reference, assert_refused, assert_same, message_of

TEXTS = ["green bicycle", "Zürich", "a longer text about nothing much"]
WIDTH = models.MATRYOSHKA[-1]


def test_bc_058_base64_equals_the_floats(e):
    floats = np.array([i["embedding"] for i in e.openai(TEXTS, encoding_format="float")["data"]], "<f4")
    absent = np.array([i["embedding"] for i in e.openai(TEXTS)["data"]], "<f4")
    packed = [base64.b64decode(i["embedding"]) for i in e.openai(TEXTS, encoding_format="base64")["data"]]
    assert [len(row) for row in packed] == [4 * models.WIDTH] * 3
    assert_same(np.stack([np.frombuffer(row, "<f4") for row in packed]), floats, 1e-7)
    assert_same(absent, floats, 1e-7)


def test_bc_060_dimensions_too_large_or_not_supported(m, e):
    for path, field, status in (("/v1/embeddings", "input", 400), ("/embed", "inputs", 422)):
        reply = m.post(path, {field: "x", "dimensions": WIDTH + 1})
        assert_refused(reply, "dimensions", *map(str, models.MATRYOSHKA), status=[status])
        reply = e.post(path, {field: "x", "dimensions": 32})
        assert_refused(reply, "dimensions", "64", "--any-dimensions", status=[status])
    assert_same(m.embed("x", dimensions=WIDTH), m.embed("x"))


@pytest.mark.parametrize("odd", [0, -5, "64", 64.0, 1e9, True, [64], 2**40], ids=str)
def test_bc_061_odd_dimensions(m, odd):
    for path, field, status in (("/v1/embeddings", "input", 400), ("/embed", "inputs", 422)):
        reply = m.post(path, {field: "x", "dimensions": odd})
        assert_refused(reply, "dimensions", status=[status])


def test_bc_061_one_dimension_where_the_files_allow_it(m):
    assert np.abs(m.embed("x", dimensions=1)).tolist() == [[1.0]]


def test_bc_062_shortened_vectors_are_normalised_again(m, reference_m):
    raw = reference_m.raw(reference_m.ids("plum jam"))
    assert_near_reference(m.embed("plum jam", normalize=False)[0], raw)
    short = raw[:128]
    wanted = short / np.linalg.norm(short)
    assert_near_reference(m.embed("plum jam", dimensions=128)[0], wanted)
    assert_near_reference(m.embed("plum jam", dimensions=128, normalize=False)[0], short)
    assert_near_reference(np.array(m.openai("plum jam", dimensions=128)["data"][0]["embedding"]), wanted)


def test_bc_064_normalise_on_and_off(m):
    texts = [f"text number {i}" for i in range(10)]
    on, off = m.embed(texts, normalize=True), m.embed(texts, normalize=False)
    norms = np.linalg.norm(off, axis=1, keepdims=True)
    np.testing.assert_allclose(np.linalg.norm(on, axis=1), 1, atol=1e-5)
    assert np.abs(norms - 1).min() > 0.01
    assert_same(off / norms, on)
    assert_same(m.embed(texts), on)
    assert m.get("/info").json()["normalize_default"] is True


def test_a_refusal_is_one_message(m):
    reply = m.post("/v1/embeddings", input="x", dimensions="64")
    assert message_of(reply).count("dimensions") == 1
