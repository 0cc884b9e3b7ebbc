"""Pickled weights become safetensors that the engine serves; what could run code does not."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rose_engine.batch import Batch
from rose_engine.config import EngineConfig
from rose_engine.convert import convert_model, main
from rose_engine.engine import Engine
from rose_engine.errors import CheckpointError
from tests.rose_engine.samples import random_sequences


def pickled_copy(minilm, folder):
    """The model with its weights as they were published years ago, and code beside them."""
    shutil.copytree(minilm, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(minilm / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "modeling.py").write_text("raise SystemExit('checkpoint code was run')")
    return tensors


def rows_of(folder):
    engine = Engine.load(EngineConfig(folder, device="cpu", threads=1))
    try:
        return engine.step(Batch.pack(random_sequences([3, 17, 1]))).result(), engine.description
    finally:
        engine.close()


def test_a_converted_model_gives_the_same_vectors(minilm, tmp_path):
    folder, out = tmp_path / "pickled", tmp_path / "converted"
    pickled_copy(minilm, folder)
    with pytest.raises(CheckpointError, match=r"rose_engine\.convert"):
        rows_of(folder)
    assert convert_model(folder, out) == out
    np.testing.assert_array_equal(rows_of(out)[0], rows_of(minilm)[0])
    assert not list(out.glob("*.bin"))
    assert not list(out.glob("*.py"))
    assert (out / "1_Pooling" / "config.json").is_file()


def test_in_place_the_pickled_file_stays_and_a_second_run_is_refused(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert convert_model(tmp_path) == tmp_path
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], tensors["a"])
    assert (tmp_path / "pytorch_model.bin").is_file()
    with pytest.raises(CheckpointError, match="already"):
        convert_model(tmp_path)


def test_tied_views_and_transposed_tensors_are_written_out(tmp_path):
    table = torch.randn(4, 3)
    tensors = {"embeddings": table, "lm_head": table, "first_rows": table[:2], "transposed": table.T}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    convert_model(tmp_path)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)


def test_shards_and_modules_are_converted_with_their_index(tmp_path):
    for number, name in ((1, "a"), (2, "b")):
        torch.save(
            {name: torch.full((2,), float(number))}, tmp_path / f"pytorch_model-0000{number}-of-00002.bin"
        )
    places = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / "2_Dense").mkdir()
    torch.save({"linear.weight": torch.eye(2)}, tmp_path / "2_Dense" / "pytorch_model.bin")
    convert_model(tmp_path)
    written = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert written == {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    assert load_file(tmp_path / written["b"])["b"].tolist() == [2, 2]
    assert torch.equal(load_file(tmp_path / "2_Dense" / "model.safetensors")["linear.weight"], torch.eye(2))


class Dangerous:
    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3, "model": torch.zeros(1)}, "epoch hold no tensor"),
        ([torch.zeros(1)], "holds a list"),
        (b"no pickle at all", "not a readable PyTorch file|more than tensors"),
    ],
    ids=["checkpoint", "list", "bytes"],
)
def test_what_is_no_table_of_tensors_is_refused(tmp_path, content, message):
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(CheckpointError, match=message):
        convert_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]


def test_a_pickle_that_would_run_code_does_not(tmp_path):
    dangerous, dangerous_folder = Dangerous(), tmp_path / "made-by-the-pickle"
    dangerous.folder = dangerous_folder
    torch.save({"a": dangerous}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="could run code"):
        convert_model(tmp_path)
    assert not dangerous_folder.exists()


def test_the_command_ends_with_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"error: .*no pytorch_model\.bin"):
        main([str(tmp_path)])
