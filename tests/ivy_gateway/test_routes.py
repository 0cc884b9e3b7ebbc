"""Every route's happy path: shapes, order, headers, usage."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest
from tokenizers import Tokenizer

from protos.tulip.v1 import inference_pb2 as pb
from tests.ivy_gateway.fake_tulip import DIMENSIONS, FakeTulip, embedding_row, quantized_row, score_row

TEXTS = ["plum jam", "oak shelf", "a ferry to the island"]


@pytest.fixture
def ids(minilm):
    """From a text (or two) to the served model's own ids."""
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda *texts: np.array(tokenizer.encode(*texts).ids, np.int32)


def unit(vector):
    return vector / np.linalg.norm(vector)


def reranker() -> FakeTulip:
    return FakeTulip(task=pb.TASK_SCORE, dimensions=1)


# /embed


async def test_embed_gives_one_unit_vector_per_input_in_order(start_gateway, ids):
    async with start_gateway() as gateway:
        reply = await gateway.post("/embed", inputs=TEXTS)
        assert reply.status_code == 200
        expected = [unit(embedding_row(ids(text))) for text in TEXTS]
        np.testing.assert_allclose(reply.json(), expected, rtol=1e-6)


async def test_embed_takes_a_lone_string_ids_and_mixtures(start_gateway, ids):
    async with start_gateway() as gateway:
        listed = (await gateway.post("/embed", inputs=["green bicycle"])).json()
        flat = ids("green bicycle").tolist()
        for inputs in ("green bicycle", flat, [flat]):
            assert (await gateway.post("/embed", inputs=inputs)).json() == listed
        mixed = (await gateway.post("/embed", inputs=["plum jam", flat])).json()
        assert mixed[1] == listed[0]


async def test_embed_normalises_unless_told_not_to(start_gateway, ids):
    async with start_gateway() as gateway:
        raw = (await gateway.post("/embed", inputs="oak", normalize=False)).json()[0]
        np.testing.assert_allclose(raw, embedding_row(ids("oak")), rtol=1e-6)
        for normalize in (True, None):
            shown = (await gateway.post("/embed", inputs="oak", normalize=normalize)).json()[0]
            np.testing.assert_allclose(shown, unit(np.array(raw)), rtol=1e-5)


async def test_shortened_vectors_are_normalised_again(start_gateway, ids):
    async with start_gateway(any_dimensions=True) as gateway:
        full = embedding_row(ids("oak"))
        short = (await gateway.post("/embed", inputs="oak", dimensions=3)).json()[0]
        np.testing.assert_allclose(short, unit(full[:3]), rtol=1e-5)
        raw = (await gateway.post("/embed", inputs="oak", dimensions=3, normalize=False)).json()[0]
        np.testing.assert_allclose(raw, full[:3], rtol=1e-6)


async def test_embed_headers_state_cost_and_space(start_gateway, ids):
    async with start_gateway() as gateway:
        reply = await gateway.post("/embed", inputs=TEXTS)
        info = (await gateway.client.get("/info")).json()
        tokens = sum(len(ids(text)) for text in TEXTS)
        expected = {
            "x-truncated-inputs": "0",
            "x-compute-tokens": str(tokens),
            "x-compute-characters": str(sum(map(len, TEXTS))),
            "x-queue-time": "1",
            "x-inference-time": "2",
            "x-embedding-space": info["embedding_space"],
        }
        assert {name: reply.headers[name] for name in expected} == expected


async def test_cut_inputs_are_counted_and_cost_the_limit(start_gateway):
    async with start_gateway() as gateway:
        reply = await gateway.post("/embed", inputs=["tea " * 3000, "tea", "jam " * 300])
        assert reply.headers["x-truncated-inputs"] == "2"
        assert reply.headers["x-compute-tokens"] == str(256 + 3 + 256)
        lone = await gateway.post("/embed", inputs="tea " * 3000)
        assert lone.json()[0] == reply.json()[0]


async def test_a_servers_lower_limit_counts(start_gateway):
    async with start_gateway(FakeTulip(max_length=16)) as gateway:
        reply = await gateway.post("/embed", inputs="tea " * 100)
        assert reply.headers["x-compute-tokens"] == "16"
        assert (await gateway.client.get("/info")).json()["max_input_length"] == 16


async def test_prompts_by_name(start_gateway, ids):
    async with start_gateway(prompts={"query": "ask: "}) as gateway:
        reply = await gateway.post("/embed", inputs="oak", prompt_name="query", normalize=False)
        np.testing.assert_allclose(reply.json()[0], embedding_row(ids("ask: oak")), rtol=1e-6)
        hinted = await gateway.post("/v1/embeddings", input="oak", input_type="query", normalize=False)
        assert hinted.json()["data"][0]["embedding"] == reply.json()[0]


# /v1/embeddings


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
async def test_openai_embeddings(start_gateway, ids, path):
    async with start_gateway() as gateway:
        reply = (await gateway.post(path, input=TEXTS, model="minilm")).json()
        assert reply["object"] == "list"
        assert reply["model"] == "minilm"
        assert [item["index"] for item in reply["data"]] == [0, 1, 2]
        tokens = sum(len(ids(text)) for text in TEXTS)
        assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        vectors = [item["embedding"] for item in reply["data"]]
        assert vectors == (await gateway.post("/embed", inputs=TEXTS)).json()


async def test_base64_equals_the_floats(start_gateway):
    async with start_gateway() as gateway:
        floats = (await gateway.post("/v1/embeddings", input=TEXTS)).json()["data"]
        packed = (await gateway.post("/v1/embeddings", input=TEXTS, encoding_format="base64")).json()["data"]
        for plain, coded in zip(floats, packed, strict=True):
            raw = base64.b64decode(coded["embedding"])
            assert len(raw) == 4 * DIMENSIONS
            np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), np.float32(plain["embedding"]))


async def test_null_is_absent_and_unknown_fields_are_ignored(start_gateway):
    async with start_gateway() as gateway:
        plain = (await gateway.post("/v1/embeddings", input="x")).json()["data"]
        nulls = dict.fromkeys(
            ["model", "encoding_format", "dimensions", "user", "truncate", "normalize", "prompt_name"]
        )
        reply = await gateway.post("/v1/embeddings", input="x", property="", priority=3, **nulls)
        assert reply.json()["data"] == plain


async def test_objects_with_text_count_as_texts(start_gateway):
    async with start_gateway() as gateway:
        plain = (await gateway.post("/v1/embeddings", input=["a", "b"])).json()["data"]
        assert (await gateway.post("/v1/embeddings", input=[{"text": "a"}, "b"])).json()["data"] == plain


async def test_token_ids_where_allowed_equal_the_text(start_gateway, ids):
    async with start_gateway(token_ids="model") as gateway:
        text = (await gateway.post("/v1/embeddings", input="blue lamp")).json()
        flat = ids("blue lamp").tolist()
        for given in (flat, [flat]):
            reply = (await gateway.post("/v1/embeddings", input=given)).json()
            assert (reply["data"], reply["usage"]) == (text["data"], text["usage"])


async def test_aliases_are_served_under_the_served_name(start_gateway):
    async with start_gateway(aliases=("short",)) as gateway:
        for model in ("minilm", "short", None):
            reply = await gateway.post("/v1/embeddings", input="x", model=model)
            assert reply.json()["model"] == "minilm"


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 256),
        ({"truncate": True}, 256),
        ({"truncate_prompt_tokens": -1}, 256),
        ({"truncate_prompt_tokens": 10}, 10),
        ({"truncate_prompt_tokens": 10, "truncation_side": "left"}, 10),
    ],
)
async def test_truncation_fields(start_gateway, fields, tokens):
    async with start_gateway() as gateway:
        reply = await gateway.post("/v1/embeddings", input="tea " * 300, **fields)
        assert reply.json()["usage"]["prompt_tokens"] == tokens
        assert reply.headers["x-truncated-inputs"] == "1"


async def test_quantised_rows_are_never_rescaled(start_gateway):
    tulip = FakeTulip(row_dtype=pb.DTYPE_INT8)
    tulip.row = lambda ids: np.arange(DIMENSIONS, dtype=np.int8) - 3
    async with start_gateway(tulip) as gateway:
        codes = list(range(-3, DIMENSIONS - 3))
        assert (await gateway.post("/embed", inputs="x")).json() == [codes]
        packed = (await gateway.post("/v1/embeddings", input="x", encoding_format="base64")).json()
        raw = base64.b64decode(packed["data"][0]["embedding"])
        assert np.frombuffer(raw, "<f4").tolist() == codes


# /score


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("query", "documents"),
        ("data_1", "data_2"),
        ("text_1", "text_2"),
        ("queries", "documents"),
        ("queries", "items"),
    ],
)
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_score_of_a_cross_encoder(start_gateway, ids, path, left, right):
    async with start_gateway(reranker()) as gateway:
        reply = (await gateway.post(path, **{left: "best tea", right: TEXTS})).json()
        logits = np.array([score_row(ids("best tea", text))[0] for text in TEXTS])
        scores = [item["score"] for item in reply["data"]]
        np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits)), rtol=1e-5)
        assert [(item["index"], item["object"]) for item in reply["data"]] == [(i, "score") for i in range(3)]
        tokens = sum(len(ids("best tea", text)) for text in TEXTS)
        assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


@pytest.mark.parametrize("fields", [{"raw_scores": True}, {"use_activation": False}])
async def test_raw_scores_are_logits(start_gateway, ids, fields):
    async with start_gateway(reranker()) as gateway:
        reply = (await gateway.post("/score", query="tea", documents=TEXTS, **fields)).json()
        expected = [score_row(ids("tea", text))[0] for text in TEXTS]
        np.testing.assert_allclose([item["score"] for item in reply["data"]], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("left", "right", "count"), [("a", "b", 1), ("a", ["b"], 1), (["a", "b"], ["c", "d"], 2)]
)
async def test_score_shapes(start_gateway, left, right, count):
    async with start_gateway(reranker()) as gateway:
        reply = (await gateway.post("/score", text_1=left, text_2=right)).json()
        assert len(reply["data"]) == count


async def test_score_of_ready_ids(start_gateway, ids):
    async with start_gateway(reranker()) as gateway:
        texts = (await gateway.post("/score", query="tea", documents=TEXTS)).json()["data"]
        joined = [ids("tea", text).tolist() for text in TEXTS]
        assert (await gateway.post("/score", input_ids=joined)).json()["data"] == texts
        segments = [[0] * len(row) for row in joined]
        with_segments = await gateway.post("/score", input_ids=joined, token_type_ids=segments)
        assert with_segments.json()["data"] == texts
        pairs = [[ids("tea").tolist()[1:-1], ids(text).tolist()[1:-1]] for text in TEXTS]
        assert (await gateway.post("/score", input_ids=pairs)).json()["data"] == texts


async def test_blank_documents_are_scored(start_gateway):
    async with start_gateway(reranker()) as gateway:
        reply = await gateway.post("/score", query="tea", documents=["cup", "", "  "])
        assert len(reply.json()["data"]) == 3


async def test_score_of_an_embedder_is_cosine_and_embeds_each_text_once(start_gateway, ids):
    async with start_gateway() as gateway:
        reply = (await gateway.post("/score", query="tea", documents=[*TEXTS, TEXTS[0]])).json()
        query = unit(embedding_row(ids("tea")))
        expected = [query @ unit(embedding_row(ids(text))) for text in [*TEXTS, TEXTS[0]]]
        np.testing.assert_allclose([i["score"] for i in reply["data"]], expected, atol=1e-6)
        assert reply["usage"]["prompt_tokens"] == sum(len(ids(text)) for text in ["tea", *TEXTS])


async def test_max_tokens_per_query_cuts_the_query_only(start_gateway, ids):
    fields = {"query": "which tea is best " * 20, "documents": ["oak"], "max_tokens_per_query": 4}
    oak = len(ids("oak")) - 2
    for tulip, tokens in ((FakeTulip(), (4 + 2) + (oak + 2)), (reranker(), 4 + oak + 3)):
        async with start_gateway(tulip) as gateway:
            reply = await gateway.post("/score", **fields)
            assert reply.json()["usage"]["prompt_tokens"] == tokens
            assert reply.headers["x-truncated-inputs"] == "1"


# the server itself


async def test_info_has_teis_keys_and_ours(start_gateway):
    async with start_gateway() as gateway:
        info = (await gateway.client.get("/info")).json()
        assert info["model_type"] == {"embedding": {"pooling": "mean"}}
        assert info["model_id"] == info["served_model_name"] == "minilm"
        assert info["max_input_length"] == 256
        assert info["max_client_batch_size"] == 2048
        assert info["auto_truncate"] is True
        assert info["replicas"][0]["state"] == "ready"
        assert {
            "model_sha", "model_dtype", "max_concurrent_requests", "max_batch_tokens", "max_batch_requests",
            "tokenization_workers", "version", "sha", "docker_label",
        } <= info.keys()  # fmt: skip


async def test_info_of_a_reranker_starts_with_its_type(start_gateway):
    async with start_gateway(reranker()) as gateway:
        info = (await gateway.client.get("/info")).json()
        assert list(info["model_type"]) == ["reranker"]


@pytest.mark.parametrize("path", ["/health", "/ping", "/live"])
async def test_health_when_ready(start_gateway, path):
    async with start_gateway() as gateway:
        reply = await gateway.client.get(path)
        assert (reply.status_code, reply.content) == (200, b"")


async def test_without_a_ready_replica_the_process_lives_but_is_not_healthy(start_gateway):
    async with start_gateway(FakeTulip(tokenizer_hash="other"), wait=False) as gateway:
        for path in ("/health", "/ping", "/info"):
            reply = await gateway.client.get(path)
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) > 0
        assert (await gateway.client.get("/live")).status_code == 200
        assert (await gateway.client.get("/v1/models")).status_code == 200
        refused = await gateway.post("/v1/embeddings", input="x")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "unavailable"


async def test_models_lists_the_name_and_its_aliases(start_gateway):
    async with start_gateway(aliases=("short",)) as gateway:
        for path in ("/v1/models", "/models"):
            reply = (await gateway.client.get(path)).json()
            assert [model["id"] for model in reply["data"]] == ["minilm", "short"]
            assert reply["data"][0]["max_model_len"] == 256


async def test_documentation_needs_no_other_host_and_shows_every_route(start_gateway):
    async with start_gateway() as gateway:
        page = (await gateway.client.get("/docs")).text
        paths = (await gateway.client.get("/openapi.json")).json()["paths"]
        assert {"/embed", "/score", "/v1/score", "/v1/embeddings", "/embeddings", "/info"} <= paths.keys()
        assert all(f" {path}<" in page for path in paths)
        assert "<script" not in page
        assert "http" not in page.replace("https://", "http://").split("</style>")[0]


async def test_documented_examples_work(start_gateway):
    outputs = [pb.OUTPUT_OWN, pb.OUTPUT_INT8, pb.OUTPUT_BITS, pb.OUTPUT_TOKENS]
    able = FakeTulip(row_dtype=pb.DTYPE_INT8, outputs=outputs, hidden_size=DIMENSIONS)
    able.row = quantized_row
    async with start_gateway(able) as embedder, start_gateway(reranker()) as scorer:
        paths = (await embedder.client.get("/openapi.json")).json()["paths"]
        bodies = {
            path: operation["post"]["requestBody"]["content"]["application/json"]["example"]
            for path, operation in paths.items()
            if "requestBody" in operation.get("post", {})
        }
        assert len(bodies) >= 20
        for path, example in bodies.items():
            replies = [await gateway.post(path, **example) for gateway in (embedder, scorer)]
            unable = all(reply.json()["error_type"] == "Backend" for reply in replies if reply.is_error)
            needs_another_model = "contextualized" in path or path == "/embed_sparse"
            assert unable, path
            assert needs_another_model or any(reply.is_success for reply in replies), path


async def test_metrics_count_requests_tokens_and_teis_names(start_gateway):
    async with start_gateway() as gateway:
        before = _samples((await gateway.client.get("/metrics")).text)
        await gateway.post("/embed", inputs=["tea " * 300, "tea"])
        await gateway.post("/embed", inputs="")
        after = _samples((await gateway.client.get("/metrics")).text)
        grown = {name: after[name] - before.get(name, 0) for name in after}
        assert grown['ivy_requests_total{route="/embed",status="200"}'] == 1
        assert grown['ivy_requests_total{route="/embed",status="400"}'] == 1
        assert grown["ivy_tokens_total"] == 259
        assert grown["ivy_truncated_inputs_total"] == 1
        assert grown['te_request_success{method="batch"}'] == 1
        assert grown['te_request_failure{err="validation"}'] == 1
        assert after["te_queue_size"] == before["te_queue_size"] == 0


async def test_random_paths_add_no_series(start_gateway):
    async with start_gateway() as gateway:
        await gateway.client.get("/nothing")
        before = _samples((await gateway.client.get("/metrics")).text)
        for i in range(50):
            await gateway.client.get(f"/random/{i}")
        after = _samples((await gateway.client.get("/metrics")).text)
        assert len(after) == len(before)


def _samples(text: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def test_request_ids_are_echoed_or_made(start_gateway):
    async with start_gateway() as gateway:
        given = await gateway.client.get("/live", headers={"x-request-id": "job-17/a"})
        assert given.headers["x-request-id"] == "job-17/a"
        made = await asyncio.gather(
            *(
                gateway.client.get("/live", headers={"x-request-id": bad})
                for bad in ("", "x" * 129, "a b", "<i>")
            )
        )
        ids = {reply.headers["x-request-id"] for reply in made}
        assert len(ids) == 4
        assert all(len(made_id) == 32 for made_id in ids)
