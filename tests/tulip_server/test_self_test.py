"""The self-test: right vectors pass, others stop the server, and the outcome is told to clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import grpc
import numpy as np
import pytest

from protos.reference import REFERENCE_FILE, ReferenceExample, read_reference, write_reference
from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1.inference_pb2_grpc import InferenceStub
from rose_engine.batch import Batch
from rose_engine.config import EngineConfig
from rose_engine.engine import Engine
from rose_engine.errors import CheckpointError
from rose_engine.fake import FakeEngine
from tests.tulip_server.conftest import expected_rows
from tulip_server import reference
from tulip_server.config import ServerConfig
from tulip_server.errors import ConfigError, StartupError
from tulip_server.self_test import check_reference
from tulip_server.server import serve

SEQUENCES = [[101, 7, 102], [101, 8, 9, 102], [5], list(range(300))]


def write_for_fake(folder, change=lambda rows: rows, sequences=SEQUENCES):
    """A reference of what a fake engine gives, changed."""
    rows = change(expected_rows(*sequences))
    examples = [
        ReferenceExample(f"text {i}", np.array(ids, np.int32), row)
        for i, (ids, row) in enumerate(zip(sequences, rows, strict=True))
    ]
    write_reference(folder / REFERENCE_FILE, examples, {})


def config_of(folder, **settings):
    return ServerConfig(model=folder, **settings)


def test_without_a_file_there_is_no_test(tmp_path):
    assert check_reference(FakeEngine(), config_of(tmp_path)) is None


def test_the_right_vectors_pass_whatever_their_length(tmp_path):
    write_for_fake(tmp_path, lambda rows: rows * 3)
    assert check_reference(FakeEngine(), config_of(tmp_path)) == pytest.approx(1, abs=1e-6)


def turned(rows):
    rows = rows.copy()
    rows[2] += 0.5 * np.roll(rows[2], 1)
    return rows


def test_one_wrong_vector_stops_the_server_unless_allowed(tmp_path):
    write_for_fake(tmp_path, turned)
    with pytest.raises(StartupError, match=r"reference text 2 has cosine .*--allow-reference-gap"):
        check_reference(FakeEngine(), config_of(tmp_path))
    worst = check_reference(FakeEngine(), config_of(tmp_path, allow_reference_gap=True))
    assert worst < 0.99


class NotANumber(FakeEngine):
    def step(self, batch: Batch):
        lazy = super().step(batch)
        rows = lazy.result()
        rows[-1] = np.nan
        return lazy


def test_a_vector_that_is_not_finite_is_as_wrong_as_can_be(tmp_path):
    write_for_fake(tmp_path)
    assert check_reference(NotANumber(), config_of(tmp_path, allow_reference_gap=True)) == -1


@pytest.mark.parametrize(
    ("sequences", "change", "message"),
    [
        ([[1], [2] * 513], lambda rows: rows, "reference text 1: 513 tokens"),
        ([[40_000]], lambda rows: rows, "reference text 0: token id 40000"),
        ([[1]], lambda rows: rows[:, :5], "reference text 0: 5 values, the model's rows have 8"),
    ],
)
def test_a_file_that_does_not_fit_the_model_is_named(tmp_path, sequences, change, message):
    write_for_fake(tmp_path, change, sequences)
    with pytest.raises(StartupError, match=message):
        check_reference(FakeEngine(), config_of(tmp_path, allow_reference_gap=True))


async def describe(config):
    """Serve, ask what is served, stop."""
    ready = config.ready_file
    async with asyncio.timeout(20):
        serving = asyncio.create_task(serve(config, FakeEngine))
        while not ready.exists() and not serving.done():
            await asyncio.sleep(0.01)
        if not serving.done():
            address = f"127.0.0.1:{json.loads(ready.read_text())['port']}"
            async with grpc.aio.insecure_channel(address) as channel:
                reply = await InferenceStub(channel).Describe(pb.DescribeRequest())
            os.kill(os.getpid(), signal.SIGTERM)
        await serving
    return reply


async def test_describe_tells_the_outcome(tmp_path):
    config = ServerConfig(model=tmp_path, port=0, ready_file=tmp_path / "ready.json")
    assert not (await describe(config)).HasField("reference_cosine")
    write_for_fake(tmp_path)
    assert (await describe(config)).reference_cosine == pytest.approx(1, abs=1e-6)
    write_for_fake(tmp_path, turned)
    with pytest.raises(StartupError, match="self-test"):
        await describe(config)


# The command that writes the file.


@pytest.fixture(scope="module")
def written(minilm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    reference.main([str(minilm), "--out", str(folder / REFERENCE_FILE)])
    return folder


def test_the_engine_passes_the_test_that_the_command_writes(minilm, written):
    examples = read_reference(written)
    assert [example.text for example in examples] == list(reference.TEXTS)
    engine = Engine.load(EngineConfig(minilm, device="cpu", threads=1))
    try:
        assert check_reference(engine, config_of(written)) > 0.99999
    finally:
        engine.close()


def test_the_command_says_what_it_cannot_do(minilm, tmp_path):
    texts = tmp_path / "texts"
    for content, message in (("", "0 texts"), ("a\n" * 21, "21 texts"), ("word " * 300, "limit of 256")):
        texts.write_text(content)
        with pytest.raises(SystemExit, match=message):
            reference.main([str(minilm), "--texts", str(texts), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError):
        reference.reference_examples(tmp_path, ["a"])
    with pytest.raises(ConfigError):
        reference.read_texts(texts_of_blank_lines(tmp_path))


def texts_of_blank_lines(folder):
    file = folder / "blank"
    file.write_text("\n\n\n")
    return file
