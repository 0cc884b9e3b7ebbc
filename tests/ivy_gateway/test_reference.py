"""The gateway's half of the self-test: texts must become the ids of the model's reference file."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from ivy_gateway.app import create_app
from ivy_gateway.config import GatewayConfig
from ivy_gateway.errors import StartupError
from protos.reference import REFERENCE_FILE, ReferenceExample, write_reference
from tests.ivy_gateway.fake_tulip import FakeTulip

TEXTS = ["plum jam", "Zürich 東京 🙂", "word " * 300]


@pytest.fixture
def folder(minilm, tmp_path):
    return shutil.copytree(minilm, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))


@pytest.fixture
def examples(minilm):
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vector = np.ones(4, np.float32)
    return [ReferenceExample(text, np.array(tokenizer.encode(text).ids, np.int32), vector) for text in TEXTS]


def start(folder, **settings):
    create_app(GatewayConfig(model=folder, replicas=("127.0.0.1:1",), **settings))


@pytest.mark.parametrize("settings", [{}, {"literal_text": False}, {"max_length": 16}], ids=str)
def test_the_right_ids_pass(folder, examples, settings):
    write_reference(folder / REFERENCE_FILE, examples, {})
    start(folder, **settings)


def test_other_ids_stop_the_gateway_unless_allowed(folder, examples, caplog):
    changed = examples[1].token_ids.copy()
    changed[1] += 1
    examples[1] = replace(examples[1], token_ids=changed)
    write_reference(folder / REFERENCE_FILE, examples, {})
    with pytest.raises(StartupError, match=r"text 1 has other ids here \(1 of 3 .*--allow-reference-gap"):
        start(folder)
    start(folder, allow_reference_gap=True)
    assert "text 1 has other ids" in caplog.text


def test_a_broken_file_stops_the_gateway_in_any_case(folder):
    (folder / REFERENCE_FILE).write_text("{}")
    with pytest.raises(StartupError, match=REFERENCE_FILE):
        start(folder, allow_reference_gap=True)


async def test_info_shows_the_servers_half(start_gateway):
    for tulip, shown in ((FakeTulip(), None), (FakeTulip(reference_cosine=0.5), 0.5)):
        async with start_gateway(tulip) as gateway:
            assert (await gateway.client.get("/info")).json()["reference_cosine"] == shown
