"""Section A: what requests may look like."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers

from tests.cases import models
from tests.cases.client import assert_refused, assert_same, message_of
from tests.cases.conftest import STRICT_BODY_BYTES
from tests.cases.fleet import started
from tests.ivy_gateway.conftest import start_gateway  # noqa: F401 - a fixture
from tests.models.parity import randomize

ROUTES = [("/v1/embeddings", "input"), ("/embeddings", "input"), ("/embed", "inputs")]


@pytest.mark.parametrize(("path", "field"), ROUTES)
def test_bc_001_an_empty_string_alone(e, path, field):
    assert_refused(e.post(path, {field: ""}), field, "empty", status=[400])


@pytest.mark.parametrize(("path", "field"), ROUTES)
def test_bc_002_one_empty_string_in_a_list(e, path, field):
    reply = e.post(path, {field: ["plum jam", "", "oak shelf"]})
    assert_refused(reply, f"{field}[1]", status=[400])
    assert f"{field}[0]" not in message_of(reply)


@pytest.mark.parametrize(("path", "field"), ROUTES)
def test_bc_004_an_empty_list(e, path, field):
    assert_refused(e.post(path, {field: []}), "empty", status=[400])


def test_bc_005_a_string_is_a_list_of_one(e):
    assert_same(e.embed("green bicycle"), e.embed(["green bicycle"]))
    alone, listed = e.openai("green bicycle"), e.openai(["green bicycle"])
    assert alone["usage"] == listed["usage"]
    assert_same(alone["data"][0]["embedding"], listed["data"][0]["embedding"])


def test_bc_006_token_ids_of_our_own_model(e, strict, reference_e):
    ids = reference_e.ids("blue lamp")
    wanted = e.embed("blue lamp")
    assert_same(e.embed(ids), wanted)
    assert_same(e.embed([ids, ids]), np.repeat(wanted, 2, axis=0))
    flat, nested = strict.openai(ids), strict.openai([ids, ids])
    assert [len(flat["data"]), len(nested["data"])] == [1, 2]
    assert flat["usage"]["prompt_tokens"] == len(ids)
    assert nested["usage"]["prompt_tokens"] == 2 * len(ids)
    assert_same(np.array([flat["data"][0]["embedding"]]), wanted)
    for form in (ids, [ids, ids]):
        refusal = e.post("/v1/embeddings", input=form)
        assert_refused(refusal, "check_embedding_ctx_length=False", "token-ids", status=[400])


@pytest.mark.parametrize("bad", [999_999, 30_522, -1], ids=["far", "off-by-one", "negative"])
def test_bc_007_an_id_outside_the_vocabulary(e, strict, bad):
    replies = [
        (e.post("/embed", inputs=[[12, 34, bad]]), 422),
        (strict.post("/v1/embeddings", input=[[12, 34, bad]]), 400),
    ]
    for reply, status in replies:
        assert_refused(reply, str(bad), status=[status])
        assert bad < 0 or "30521" in message_of(reply)


def test_bc_007_of_a_cross_encoder(b):
    reply = b.post("/score", input_ids=[[101, 30_522, 102]])
    assert_refused(reply, "30522", "30521", "input_ids[0]", status=[400])


def test_bc_009_nested_lists_of_strings_and_mixed_types(e):
    assert_refused(e.post("/embed", inputs=[["a sentence"], ["another"]]), "inputs[0]", status=[422])
    assert_refused(e.post("/embed", inputs=["ok", 7, None]), "inputs[1]", status=[422])
    assert_refused(e.post("/v1/embeddings", input=["ok", None]), "input[1]", status=[400])
    assert_refused(e.post("/v1/embeddings", input={"text": "x"}), "input", status=[400])


def test_bc_011_null_is_absent(e, x):
    nulls = dict.fromkeys(("encoding_format", "dimensions", "user", "truncate", "prompt_name", "model"))
    assert_same(e.openai("x", **nulls)["data"][0]["embedding"], e.openai("x")["data"][0]["embedding"])
    documents = ["green tea", "a truck"]
    nulls = dict.fromkeys(("top_n", "return_documents", "raw_scores", "instruction", "max_tokens_per_doc"))
    assert x.rerank("tea", documents, **nulls) == x.rerank("tea", documents)


@pytest.mark.parametrize("bad", ["hex", ["float", "base64"], 7], ids=str)
def test_bc_012_an_unknown_encoding_format(e, bad):
    reply = e.post("/v1/embeddings", input="x", encoding_format=bad)
    assert_refused(reply, "encoding_format", "float", "base64", status=[400])
    assert reply.json()["error"]["param"] == "encoding_format"


def test_bc_013_thousands_of_short_inputs(e):
    texts = [f"item {i:04} colour red" for i in range(6001)]
    for count in (6000, 6001):
        assert_refused(e.post("/v1/embeddings", input=texts[:count]), str(count), "2048", status=[400])
        assert_refused(e.post("/embed", inputs=texts[:count]), str(count), "2048", status=[422])
    assert e.get("/info").json()["max_client_batch_size"] == 2048
    vectors = e.embed(texts[:2047])
    assert len(vectors) == 2047
    for i in (0, 1000, 2046):
        assert_same(e.embed(texts[i])[0], vectors[i])


WIDE = 1024


@pytest.fixture(scope="module")
def wide(kinds, minilm):
    """One layer of width 1,024; its largest chunk answers in 8 MiB."""
    sizes = models.ENCODER | {"hidden_size": WIDE, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, max_position_embeddings=64)
    model = randomize(transformers.BertModel(config, add_pooling_layer=False))
    folder = kinds / "wide"
    model.save_pretrained(folder)
    models.word_pieces(minilm, folder)
    reference = models.Embedder(folder, model, 64, "mean")
    with started(folder, "--max-chunk-inputs", "2048") as stack:
        yield stack, reference


def test_bc_014_a_reply_of_more_than_4_mib(wide):
    stack, reference = wide
    texts = [f"{i}" for i in range(2048)]
    vectors = stack.embed(texts)
    assert vectors.shape == (2048, WIDE)
    assert vectors.nbytes > 8_000_000
    spots = [0, 1023, 2047]
    assert_same(vectors[spots], reference.embed(*(texts[i] for i in spots)), 1e-4)


def body(size: int, many: bool) -> bytes:
    """A body of exactly `size` bytes: one long string, or many; an unknown field takes up the rest."""
    items = ["tea pot " * 20] * ((size - 200) // 170)
    content = {"truncate": True, "inputs": items if many else " ".join(items), "rest": ""}
    content["rest"] = "x" * (size - len(json.dumps(content)))
    return json.dumps(content).encode()


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_bc_015_bodies_around_the_limit(strict, many):
    for size in (STRICT_BODY_BYTES - 1024, STRICT_BODY_BYTES):
        content = body(size, many)
        assert len(content) == size
        reply = strict.post_raw("/embed", content)
        assert reply.status_code == 200, reply.text
    size = STRICT_BODY_BYTES + 1024
    reply = strict.post_raw("/embed", body(size, many))
    assert_refused(reply, str(STRICT_BODY_BYTES), str(size), status=[413])


async def test_bc_015_a_refused_body_is_logged_once(start_gateway, caplog):  # noqa: F811
    """In this process, where the log is at hand; and the setting takes effect."""
    async with start_gateway(max_body_bytes=1000) as gateway:
        for path, field in (("/embed", "inputs"), ("/v1/embeddings", "input")):
            caplog.clear()
            assert (await gateway.post(path, **{field: "x" * 900})).status_code == 200
            assert (await gateway.post(path, **{field: "x" * 1100})).status_code == 413
            told = [r for r in caplog.records if "max-body-bytes" in r.getMessage()]
            assert [(r.levelname, "1000" in r.getMessage()) for r in told] == [("WARNING", True)]
            assert path in told[0].getMessage()


def test_the_reference_and_the_kinds_are_what_they_say(reference_e, reference_d):
    """The cases compare against these: their limits, ends and lengths must be right."""
    over = "cat " * 600
    for reference in (reference_e, reference_d):
        ids = reference.ids(over)
        assert len(ids) == reference.limit
        assert ids[-1] == reference.ids("cat")[-1]
        shorter = dataclasses.replace(reference, limit=9)
        assert shorter.ids(over)[:-1] == ids[:8]
    assert torch.isfinite(torch.tensor(reference_d.embed("cat"))).all()
