"""Bad requests, one fact a row: the status by family, the words, the field; the rendering table itself."""

from __future__ import annotations

import orjson
import pytest
import pytest_asyncio

from ivy_gateway import errors
from ivy_gateway.routes.render import Family, render
from protos.tulip.v1 import inference_pb2 as pb
from tests.ivy_gateway.fake_tulip import FakeTulip

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_BODY = 64 * 1024
MAX_BATCH = 50
LONG = "tea " * 300
VOCABULARY = 30522


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder(start_gateway):
    async with start_gateway(
        max_body_bytes=MAX_BODY, max_client_batch_size=MAX_BATCH, token_ids="model"
    ) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reranker(start_gateway):
    async with start_gateway(FakeTulip(task=pb.TASK_SCORE, dimensions=1)) as gateway:
        yield gateway


EMBED = [
    ({}, 422, "`inputs` is required"),
    ({"inputs": None}, 422, "`inputs` is required"),
    ({"inputs": ""}, 400, "`inputs` cannot be empty"),
    ({"inputs": []}, 400, "`inputs` cannot be empty"),
    ({"inputs": ["a", "", "b", ""]}, 400, "inputs[1], inputs[3]"),
    ({"inputs": [[1], []]}, 400, "inputs[1]"),
    ({"inputs": 7}, 422, "got an integer"),
    ({"inputs": {"text": "a"}}, 422, "got an object"),
    ({"inputs": True}, 422, "got a boolean"),
    ({"inputs": ["ok", 7, None]}, 422, "`inputs[1]`"),
    ({"inputs": ["ok", None]}, 422, "`inputs[1]`"),
    ({"inputs": ["ok", {"text": "a"}]}, 422, "`inputs[1]`"),
    ({"inputs": [["a sentence"], ["another"]]}, 422, "`inputs[0][0]`"),
    ({"inputs": [7, "ok"]}, 422, "`inputs[1]`"),
    ({"inputs": [7, True]}, 422, "`inputs[1]`"),
    ({"inputs": [7, 8.0]}, 422, "`inputs[1]`"),
    ({"inputs": [[[7]]]}, 422, "`inputs[0][0]`"),
    ({"inputs": [12, -1]}, 422, "`inputs[1]`"),
    ({"inputs": [12, 2**40]}, 422, "`inputs[1]`"),
    ({"inputs": [12, 2**70]}, 422, "`inputs[1]`"),
    ({"inputs": [[12, VOCABULARY]]}, 422, f"{VOCABULARY - 1}"),
    ({"inputs": ["a"] * (MAX_BATCH + 1)}, 422, "batch size 51 > maximum allowed batch size 50"),
    ({"inputs": "a", "truncate": "yes"}, 422, "`truncate` must be a boolean, got a string"),
    ({"inputs": "a", "truncate": 1}, 422, "`truncate` must be a boolean"),
    ({"inputs": "a", "truncation_direction": "up"}, 422, "right, left"),
    ({"inputs": "a", "normalize": "no"}, 422, "`normalize`"),
    ({"inputs": "a", "prompt_name": "nope"}, 422, "nope"),
    ({"inputs": "a", "prompt_name": 3}, 422, "`prompt_name`"),
    ({"inputs": [5, 6], "prompt_name": "query"}, 422, "token ids"),
    ({"inputs": "a", "dimensions": 0}, 422, "`dimensions`"),
    ({"inputs": "a", "dimensions": -5}, 422, "`dimensions`"),
    ({"inputs": "a", "dimensions": "64"}, 422, "`dimensions` must be an integer, got a string"),
    ({"inputs": "a", "dimensions": 64.0}, 422, "`dimensions` must be an integer, got a number"),
    ({"inputs": "a", "dimensions": True}, 422, "`dimensions` must be an integer, got a boolean"),
    ({"inputs": "a", "dimensions": 10**9}, 422, "--any-dimensions"),
    ({"inputs": "a", "dimensions": 4}, 422, "--any-dimensions"),
    ({"inputs": ["a", LONG], "truncate": False}, 422, "inputs[1]"),
]


@pytest.mark.parametrize(("body", "status", "words"), EMBED)
async def test_embed_refuses(embedder, body, status, words):
    reply = await embedder.post("/embed", **body)
    assert reply.status_code == status
    content = reply.json()
    assert words in content["error"]
    assert content["error"] == content["message"]
    assert content["error_type"] == content["type"]
    assert content["code"] == status
    assert "retry-after" not in reply.headers


OPENAI = [
    ({}, 400, "input", "`input` is required"),
    ({"input": ""}, 400, "input", "cannot be empty"),
    ({"input": []}, 400, "input", "cannot be empty"),
    ({"input": ["plum jam", "", "oak shelf"]}, 400, "input[1]", "input[1]"),
    ({"input": [{"text": ""}]}, 400, "input[0]", "input[0]"),
    ({"input": [{"image": "x"}]}, 400, "input[0]", "must be a string"),
    ({"input": [[12, 34, 999999]]}, 400, "input[0]", "999999"),
    ({"input": "a", "model": "nope"}, 404, "model", "served: minilm"),
    ({"input": "a", "model": ""}, 404, "model", "served: minilm"),
    ({"input": "a", "model": 3}, 400, "model", "must be a string"),
    (
        {"input": "a", "encoding_format": "hex"},
        400,
        "encoding_format",
        "one of float, base64, base64_int8, base64_binary, ubinary, binary, bytes, bytes_only; got 'hex'",
    ),
    ({"input": "a", "encoding_format": ["float", "base64"]}, 400, "encoding_format", "one of float, base64"),
    ({"input": "a", "encoding_type": "int8"}, 400, "encoding_type", "one or a list of float, base64"),
    ({"input": "a", "embed_dtype": "fp8_e4m3"}, 400, "embed_dtype", "bfloat16"),
    ({"input": "a", "endianness": "middle"}, 400, "endianness", "little"),
    ({"input": "a", "add_special_tokens": "no"}, 400, "add_special_tokens", "must be a boolean"),
    ({"input": "a", "late_chunking": True}, 400, "late_chunking", "must be false"),
    ({"input": "a", "dimensions": 4}, 400, "dimensions", "--any-dimensions"),
    ({"input": "a", "truncate": "END"}, 400, "truncate", "boolean"),
    ({"input": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", "-1 or above zero"),
    ({"input": "a", "truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens", "got -2"),
    ({"input": "a", "truncation_side": "middle"}, 400, "truncation_side", "right, left"),
    ({"input": ["a"] * (MAX_BATCH + 1)}, 400, None, "batch size 51 > maximum allowed batch size 50"),
]


@pytest.mark.parametrize(("body", "status", "param", "words"), OPENAI)
async def test_openai_refuses(embedder, body, status, param, words):
    reply = await embedder.post("/v1/embeddings", **body)
    assert reply.status_code == status
    content = reply.json()
    assert words in content["error"]["message"]
    assert content["error"]["param"] == param
    assert content["error"]["type"] == "invalid_request_error"
    assert content["detail"] == content["message"] == content["error"]["message"]


SCORE = [
    ({}, "missing"),
    ({"query": "tea"}, "missing"),
    ({"query": "", "documents": ["a"]}, "`query` cannot be blank"),
    ({"queries": ["tea", "  "], "documents": ["a", "b"]}, "queries[1]"),
    ({"query": "tea", "documents": []}, "`documents` cannot be empty"),
    ({"query": [], "documents": ["a"]}, "`query` cannot be empty"),
    ({"query": "tea", "documents": ["a", 3]}, "`documents[1]` must be a string"),
    ({"query": 3, "documents": ["a"]}, "`query` must be a string"),
    ({"text_1": ["a", "b", "c"], "text_2": ["d", "e"]}, "`text_1` has 3 items and `text_2` 2"),
    ({"text_1": ["a", "b", "c"], "text_2": "d"}, "`text_1` has 3 items and `text_2` 1"),
    ({"query": "tea", "documents": ["a", LONG], "truncate": False}, "documents[1]"),
    ({"query": LONG, "documents": ["a"]}, "query"),
    ({"query": "tea", "documents": ["a"], "raw_scores": "no"}, "`raw_scores`"),
    ({"query": "tea", "documents": ["a"], "max_tokens_per_query": -1}, "`max_tokens_per_query`"),
    ({"query": "tea", "documents": ["a"], "max_tokens_per_doc": -5}, "`max_tokens_per_doc`"),
    ({"query": "tea", "documents": ["a"], "instruction": "x"}, "`instruction`"),
    ({"input_ids": []}, "`input_ids` cannot be empty"),
    ({"input_ids": "tea"}, "`input_ids` must be a list"),
    ({"input_ids": [5, 6]}, "`input_ids[0]`"),
    ({"input_ids": [[5], []]}, "`input_ids[1]`"),
    ({"input_ids": [[5, 6.5]]}, "`input_ids[0][1]`"),
    ({"input_ids": [[VOCABULARY]]}, "input_ids[0]"),
    ({"input_ids": [[[5], [6], [7]]]}, "`input_ids[0]` must be a pair"),
    ({"input_ids": [[[5], [6]], [7]]}, "`input_ids[1]` must be a pair"),
    ({"input_ids": [[5, 6]], "token_type_ids": [[0]]}, "`token_type_ids`"),
    ({"input_ids": [[5, 6]], "token_type_ids": [[0, 0], [0, 0]]}, "`token_type_ids`"),
    ({"input_ids": [[[5], [6]]], "token_type_ids": [[0, 0]]}, "`token_type_ids`"),
]


@pytest.mark.parametrize(("body", "words"), SCORE)
async def test_score_refuses(reranker, body, words):
    reply = await reranker.post("/score", **body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


RAW = [
    (b"", 400, "body is empty"),
    (b"{", 400, "not JSON"),
    (b'{"inputs": "a",}', 400, "not JSON"),
    (b'{"inputs": NaN}', 400, "not JSON"),
    (b'{"inputs": [1e400]}', 400, "not JSON"),
    (b"\xff\xfe", 400, "not JSON"),
    (b'{"inputs": "\xff"}', 400, "not JSON"),
    (b"[1, 2]", 422, "must be a JSON object, got a list"),
    (b'"text"', 422, "must be a JSON object, got a string"),
    (b"null", 422, "must be a JSON object, got null"),
    (b'{"inputs": "a", "inputs": "b"}', 400, "`inputs` is given more than once"),
    (b'{"inputs": ' + b"[" * 10000 + b"]" * 10000 + b"}", 400, "not JSON"),
    (b"[" * 30000, 400, "not JSON"),
    (b'{"inputs": "inputs", "x": ' + b"1" * 5000 + b"}", 400, "JSON"),
    (b'{"inputs": "broken \\ud83d half"}', 400, "`inputs` holds half a surrogate pair"),
    (b'{"inputs": ["ok", "\\ude00"]}', 400, "`inputs[1]` holds half a surrogate pair"),
    (b'{"inputs": "\\ud83d", "x": ' + b"[" * 10000 + b"]" * 10000 + b"}", 400, "half a surrogate pair"),
]


async def test_a_field_nobody_reads_may_be_nested_as_deep_as_the_parser_goes(embedder):
    # How deep that is differs from one Python version to the next: refused, or ignored like any other field.
    raw = b'{"inputs": "inputs", "x": ' + b"[" * 1000 + b"]" * 1000 + b"}"
    reply = await embedder.client.post("/embed", content=raw, headers={"content-type": "application/json"})
    assert reply.status_code in (200, 400)
    if reply.status_code == 400:
        assert "nested too deeply" in reply.json()["error"]


@pytest.mark.parametrize(("raw", "status", "words"), RAW)
async def test_hostile_bodies(embedder, raw, status, words):
    headers = {"content-type": "application/json"}
    reply = await embedder.client.post("/embed", content=raw, headers=headers)
    assert reply.status_code == status
    assert words in reply.json()["error"]
    openai = await embedder.client.post("/v1/embeddings", content=raw, headers=headers)
    assert openai.status_code == 400
    assert words in openai.json()["error"]["message"]


async def test_a_text_that_spells_a_key_is_no_duplicate(embedder):
    raw = b'{"inputs": ["inputs", "x"], "other": {"inputs": 1, "inputs": 2}}'
    reply = await embedder.client.post("/embed", content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 200


@pytest.mark.parametrize(
    "text", ["left\x00right", "\x01\x1b[31m", "\u200b", "\ufe0f", "🙂", ".", "\U0001f469\u200d"]
)
async def test_odd_characters_are_texts(embedder, text):
    reply = await embedder.post("/embed", inputs=text)
    assert reply.status_code == 200


@pytest.mark.parametrize("content_type", [None, "text/plain", "multipart/form-data", "application/jsonx"])
async def test_other_content_types(embedder, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    reply = await embedder.client.post("/embed", content=b'{"inputs": "a"}', headers=headers)
    assert (reply.status_code, reply.json()["error_type"]) == (415, "Validation")
    openai = await embedder.client.post("/v1/embeddings", content=b'{"input": "a"}', headers=headers)
    assert openai.status_code == 400


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json"]
)
async def test_json_content_types(embedder, content_type):
    headers = {"content-type": content_type}
    reply = await embedder.client.post("/embed", content=b'{"inputs": "a"}', headers=headers)
    assert reply.status_code == 200


@pytest.mark.parametrize("declared", [True, False])
async def test_body_size_around_the_limit(embedder, declared):
    async def send(size: int):
        raw = b'{"inputs": "' + b"a" * (size - 14) + b'"}'
        assert len(raw) == size

        async def parts():
            for start in range(0, len(raw), 1000):
                yield raw[start : start + 1000]

        headers = {"content-type": "application/json"}
        return await embedder.client.post("/embed", content=raw if declared else parts(), headers=headers)

    assert (await send(MAX_BODY)).status_code == 200
    over = await send(MAX_BODY + 1)
    assert over.status_code == 413
    assert str(MAX_BODY) in over.json()["error"]
    assert str(MAX_BODY + 1) in over.json()["error"]
    assert (await send(3 * MAX_BODY)).status_code == 413


async def test_wrong_task_names_what_the_model_does(embedder, reranker):
    refused = await reranker.post("/v1/embeddings", input="tea")
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "model_not_supported"
    assert "scores pairs" in refused.json()["error"]["message"]
    native = await reranker.post("/embed", inputs="tea")
    assert (native.status_code, native.json()["error_type"]) == (424, "Backend")
    joined = await embedder.post("/score", input_ids=[[5, 6]])
    assert joined.json()["error"]["code"] == "model_not_supported"


async def test_token_ids_are_refused_by_default_with_the_way_out(reranker):
    reply = await reranker.post("/v1/embeddings", input=[[5, 6]])
    assert reply.status_code == 400
    assert "check_embedding_ctx_length=False" in reply.json()["error"]["message"]
    assert "--token-ids model" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/v1/nope", 404),
        ("POST", "/embed/", 404),
        ("POST", "//embed", 404),
        ("GET", "/embed", 405),
        ("DELETE", "/v1/embeddings", 405),
        ("POST", "/info", 405),
    ],
)
async def test_unknown_routes_answer_in_json(embedder, method, path, status):
    reply = await embedder.client.request(method, "http://ivy" + path)
    assert reply.status_code == status
    assert reply.json()["error_type"] == "NotFound"
    assert isinstance(reply.json()["error"], dict) is path.startswith("/v1/")


async def test_a_near_miss_names_the_right_path(embedder):
    reply = await embedder.client.post("/v1/embedding")
    assert "did you mean /v1/embeddings?" in reply.json()["message"]


async def test_everyone_is_still_served_after_all_that(embedder, reranker):
    assert (await embedder.post("/embed", inputs="tea")).status_code == 200
    assert (await reranker.post("/score", query="tea", documents=["cup"])).status_code == 200
    assert embedder.pipeline.pool.outstanding_tokens == reranker.pipeline.pool.outstanding_tokens == 0


# the table


TABLE = [
    (errors.EmptyInput, 400, "Empty", 400, "invalid_request_error", None),
    (errors.MalformedJson, 400, "Validation", 400, "invalid_request_error", None),
    (errors.InvalidHeader, 400, "Validation", 400, "invalid_request_error", None),
    (errors.InvalidField, 422, "Validation", 400, "invalid_request_error", None),
    (errors.InvalidValue, 422, "Validation", 400, "invalid_request_error", None),
    (errors.TooLong, 422, "Validation", 400, "invalid_request_error", "context_length_exceeded"),
    (errors.TooManyInputs, 422, "Validation", 400, "invalid_request_error", None),
    (errors.BodyTooLarge, 413, "Validation", 413, "invalid_request_error", None),
    (errors.UnsupportedMediaType, 415, "Validation", 400, "invalid_request_error", None),
    (errors.UnsupportedTask, 424, "Backend", 400, "invalid_request_error", "model_not_supported"),
    (errors.UnknownModel, 404, "Validation", 404, "invalid_request_error", "model_not_found"),
    (errors.Unauthorized, 401, "Unauthorized", 401, "authentication_error", "invalid_api_key"),
    (errors.UnknownRoute, 404, "NotFound", 404, "not_found_error", None),
    (errors.Overloaded, 429, "Overloaded", 429, "rate_limit_error", "rate_limit_exceeded"),
    (errors.DeadlineExceeded, 503, "Overloaded", 503, "server_error", "timeout"),
    (errors.Unavailable, 503, "Unhealthy", 503, "server_error", "unavailable"),
    (errors.InferenceFailed, 424, "Backend", 500, "server_error", "internal_error"),
    (errors.IvyError, 500, "Backend", 500, "server_error", "internal_error"),
]


@pytest.mark.parametrize(("kind", "t_status", "t_type", "o_status", "o_type", "o_code"), TABLE)
async def test_rendering_by_family(kind, t_status, t_type, o_status, o_type, o_code):
    native = render(kind("why"), Family.T)
    assert native.status_code == t_status
    assert orjson.loads(native.body) == {
        "error": "why", "error_type": t_type, "message": "why", "type": t_type, "code": t_status
    }  # fmt: skip
    nested = render(kind("why"), Family.O)
    assert nested.status_code == o_status
    content = orjson.loads(nested.body)
    assert content["error"] == {"message": "why", "type": o_type, "param": None, "code": o_code}
    assert content["code"] == o_status
    assert native.media_type == nested.media_type == "application/json"


async def test_every_error_has_a_row():
    def leaves(kind):
        below = kind.__subclasses__()
        return [leaf for sub in below for leaf in leaves(sub)] if below else [kind]

    assert set(leaves(errors.IvyError)) - {errors.UsageError} == {row[0] for row in TABLE[:-1]}


@pytest.mark.parametrize("kind", [errors.Overloaded, errors.DeadlineExceeded, errors.Unavailable])
async def test_who_should_try_again_is_told_when(kind):
    headers = render(kind("busy", retry_after=0.25), Family.O).headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("1", "250")
