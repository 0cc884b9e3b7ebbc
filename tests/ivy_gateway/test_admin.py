"""What clients ask about the server: TEI's `/info`, model names, version, the description of all routes."""

from __future__ import annotations

import json
import shutil

import pytest

from protos import __version__
from protos.tulip.v1 import inference_pb2 as pb
from tests.ivy_gateway.fake_tulip import FakeTulip

TEI_KEYS = {
    "model_id": str,
    "model_sha": str | None,
    "model_dtype": str,
    "served_model_name": str,
    "model_type": dict,
    "max_concurrent_requests": int,
    "max_input_length": int,
    "max_batch_tokens": int,
    "max_batch_requests": int | None,
    "max_client_batch_size": int,
    "auto_truncate": bool,
    "tokenization_workers": int,
    "version": str,
    "sha": str | None,
    "docker_label": str | None,
}


@pytest.fixture
def labelled(minilm, tmp_path):
    """A folder of the small model, made a classifier: from label names to the folder."""

    def make(*labels):
        skipped = shutil.ignore_patterns("*.safetensors", "*.bin", "modules.json")
        folder = shutil.copytree(minilm, tmp_path / f"m{len(labels)}", ignore=skipped)
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = ["BertForSequenceClassification"]
        config["id2label"] = {str(i): label for i, label in enumerate(labels)}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


async def info_of(gateway):
    info = (await gateway.client.get("/info")).json()
    for key, kind in TEI_KEYS.items():
        assert isinstance(info[key], kind), key
    return info


@pytest.mark.parametrize(
    ("pooling", "shown"),
    [("mean", "mean"), ("cls", "cls"), ("lasttoken", "last_token")],
)
async def test_info_of_an_embedder(start_gateway, pooling, shown):
    async with start_gateway(FakeTulip(pooling=pooling)) as gateway:
        assert (await info_of(gateway))["model_type"] == {"embedding": {"pooling": shown}}


@pytest.mark.parametrize(
    ("labels", "kind"), [(("LABEL_0",), "reranker"), (("calm", "angry", "sad"), "classifier")]
)
async def test_info_of_scorers_maps_labels_both_ways(start_gateway, labelled, labels, kind):
    tulip = FakeTulip(task=pb.TASK_SCORE, dimensions=len(labels))
    async with start_gateway(tulip, model=labelled(*labels)) as gateway:
        assert (await info_of(gateway))["model_type"] == {
            kind: {
                "id2label": {str(i): label for i, label in enumerate(labels)},
                "label2id": {label: i for i, label in enumerate(labels)},
            }
        }


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
async def test_models_are_listed_under_every_name(start_gateway, path):
    names = ["minilm", "pplx-embed-v1-0.6b", "short"]
    async with start_gateway(aliases=tuple(names[1:]), max_length=100) as gateway:
        listing = (await gateway.client.get(path)).json()
        assert listing["object"] == "list"
        assert [model["id"] for model in listing["data"]] == names
        for model in listing["data"]:
            assert (model["object"], model["max_model_len"]) == ("model", 100)
            assert isinstance(model["created"], int)
            assert model["owned_by"]


async def test_version(start_gateway):
    async with start_gateway() as gateway:
        assert (await gateway.client.get("/version")).json() == {"version": __version__}
        assert (await info_of(gateway))["version"] == __version__


async def test_the_description_of_all_routes_at_both_addresses(start_gateway):
    async with start_gateway() as gateway:
        ours, teis = [
            (await gateway.client.get(path)).json() for path in ("/openapi.json", "/api-doc/openapi.json")
        ]
        assert ours == teis
        assert {"/embed", "/v1/embeddings", "/v2/embed", "/info"} <= teis["paths"].keys()
