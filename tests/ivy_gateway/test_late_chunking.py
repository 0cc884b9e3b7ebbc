"""`late_chunking` of /v1/embeddings: one document's chunks, as the contextual routes embed them."""

from __future__ import annotations

import base64
import json
import shutil

import numpy as np
import pytest

from protos.codec import decode_tensor, encode_tensor
from protos.tulip.v1 import inference_pb2 as pb
from tests.ivy_gateway.fake_tulip import FakeTulip, embedding_row

TEXTS = ["plum jam", "oak shelf", "a ferry to the island"]
ROUTE = "/v1/embeddings"


class ContextualTulip(FakeTulip):
    """A row per span, which all tokens before the span's end move."""

    def reply_to(self, request: pb.InferRequest) -> pb.InferReply:
        if not request.HasField("spans"):
            return super().reply_to(request)
        ids, lengths, spans, counts = (
            decode_tensor(getattr(request, name), name)
            for name in ("token_ids", "lengths", "spans", "span_counts")
        )
        sequences = np.split(ids, np.cumsum(lengths)[:-1])
        owners = np.repeat(np.arange(len(lengths)), counts)
        rows = [embedding_row(sequences[o][:stop]) for o, (_, stop) in zip(owners, spans, strict=True)]
        return pb.InferReply(rows=encode_tensor(np.stack(rows)), timings=pb.Timings())


@pytest.fixture
def contextual(minilm, tmp_path):
    """A folder that says of the small model that it is contextual."""
    folder = shutil.copytree(minilm, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling.PPLXQwen3ContextualModel"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def test_inputs_are_the_chunks_of_one_document(start_gateway, contextual):
    async with start_gateway(ContextualTulip(), model=contextual) as gateway:
        late = (await gateway.post(ROUTE, input=TEXTS, late_chunking=True, normalize=False)).json()
        document = {"input": [TEXTS], "encoding_format": "float"}
        nested = (await gateway.post("/v1/contextualizedembeddings", **document)).json()
        assert late["data"] == nested["data"][0]["data"]
        assert late["usage"] == nested["usage"]
        alone = (await gateway.post(ROUTE, input=TEXTS, normalize=False)).json()["data"]
        assert all(a["embedding"] != b["embedding"] for a, b in zip(late["data"], alone, strict=True))


async def test_every_encoding_and_length_is_as_ever(start_gateway, contextual):
    settings = {"model": contextual, "any_dimensions": True}
    async with start_gateway(ContextualTulip(), **settings) as gateway:
        body = {"input": TEXTS, "late_chunking": True}
        raw = (await gateway.post(ROUTE, normalize=False, **body)).json()["data"]
        rows = np.array([item["embedding"] for item in raw])
        types = ["float", "base64", "ubinary"]
        keyed = (await gateway.post(ROUTE, embedding_type=types, dimensions=8, **body)).json()["data"]
        units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        np.testing.assert_allclose([item["embedding"]["float"] for item in keyed], units, rtol=1e-5)
        packed = [base64.b64decode(item["embedding"]["base64"]) for item in keyed]
        np.testing.assert_allclose(np.stack([np.frombuffer(p, "<f4") for p in packed]), units, rtol=1e-5)
        bits = np.array([item["embedding"]["ubinary"] for item in keyed], np.uint8)
        np.testing.assert_array_equal(np.unpackbits(bits, axis=1), rows >= 0)
        short = (await gateway.post(ROUTE, dimensions=3, **body)).json()["data"]
        expected = rows[:, :3] / np.linalg.norm(rows[:, :3], axis=1, keepdims=True)
        np.testing.assert_allclose([item["embedding"] for item in short], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt_name": "query"}, "late_chunking", "no prompt"),
        ({"task": "retrieval.query"}, "late_chunking", "no prompt"),
        ({"truncate_prompt_tokens": 5}, "late_chunking", "`truncate_prompt_tokens`"),
        ({"add_special_tokens": False}, "late_chunking", "`add_special_tokens`"),
        ({"input": [[5, 6]]}, "input", "token ids"),
        ({"input": ["a", "tea " * 300]}, "input", "joins all inputs"),
    ],
)
async def test_what_chunks_cannot_have_is_refused(start_gateway, contextual, fields, param, words):
    settings = {"model": contextual, "prompts": {"query": "q: "}, "token_ids": "model"}
    async with start_gateway(ContextualTulip(), **settings) as gateway:
        reply = await gateway.post(ROUTE, **{"input": TEXTS, "late_chunking": True} | fields)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
        assert words in reply.json()["message"]


async def test_hints_without_a_prompt_do_not_matter(start_gateway, contextual):
    async with start_gateway(ContextualTulip(), model=contextual) as gateway:
        for fields in ({"task": "retrieval.passage"}, {"input_type": "query"}, {"truncate": False}):
            reply = await gateway.post(ROUTE, input=TEXTS, late_chunking=True, **fields)
            assert reply.status_code == 200


async def test_other_models_refuse(start_gateway):
    async with start_gateway() as gateway:
        reply = await gateway.post(ROUTE, input=TEXTS, late_chunking=True)
        assert reply.status_code == 400
        assert "embeds inputs alone" in reply.json()["message"]
