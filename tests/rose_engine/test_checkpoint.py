"""Weights are placed strictly: whatever does not add up is an error by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rose_engine.checkpoint import FusedGroup, WeightRules, load_weights, weight_files
from rose_engine.errors import CheckpointError

CPU = torch.device("cpu")
RULES = WeightRules(
    renames=((r"^model\.", ""), (r"^block\.(\d+)\.", r"blocks.\1.")),
    fused=(FusedGroup("qkv", ("query", "key", "value")),),
    ignorable=("pooler.*",),
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(4)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])


def tensors():
    """What a checkpoint of `Tiny` holds: prefixed, and with q (2 rows), k and v apart."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"norm.weight": (4,), "norm.bias": (4,)}
    for part in ("query", "key", "value"):
        shapes |= {f"{part}.weight": (2, 4), f"{part}.bias": (2,)}
    return {
        f"model.block.{i}.{name}": torch.randn(shape, generator=generator)
        for i in range(2)
        for name, shape in shapes.items()
    }


def load(folder, dtype=torch.float32):
    with torch.device("meta"):
        model = Tiny()
    load_weights(model, folder, RULES, dtype, CPU)
    return model


def save(folder, content, name="model.safetensors"):
    save_file(content, folder / name)


def save_sharded(folder, content):
    names = sorted(content)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for shard, held in shards.items():
        save(folder, {name: content[name] for name in held}, shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def assert_loaded(model, content, dtype=torch.float32):
    for i, block in enumerate(model.blocks):
        for kind in ("weight", "bias"):
            parts = [content[f"model.block.{i}.{part}.{kind}"] for part in ("query", "key", "value")]
            torch.testing.assert_close(getattr(block.qkv, kind), torch.cat(parts).to(dtype), rtol=0, atol=0)
            norm = content[f"model.block.{i}.norm.{kind}"].to(dtype)
            torch.testing.assert_close(getattr(block.norm, kind), norm, rtol=0, atol=0)


def test_tensors_are_renamed_fused_and_ignored_where_allowed(tmp_path):
    save(tmp_path, {**tensors(), "model.pooler.dense.weight": torch.zeros(4, 4)})
    model = load(tmp_path)
    assert_loaded(model, tensors())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_tensors_are_cast_to_the_run_dtype(tmp_path):
    save(tmp_path, {name: tensor.half() for name, tensor in tensors().items()})
    halves = {name: tensor.half() for name, tensor in tensors().items()}
    assert_loaded(load(tmp_path, torch.bfloat16), halves, torch.bfloat16)


def test_shards_make_one_model(tmp_path):
    save_sharded(tmp_path, tensors())
    assert len(weight_files(tmp_path)) == 2
    assert_loaded(load(tmp_path), tensors())


def test_half_a_sharded_checkpoint_names_the_missing_shard(tmp_path):
    save_sharded(tmp_path, tensors())
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shards that are missing: model-2\.safetensors"):
        load(tmp_path)


def test_a_shard_without_its_tensor_is_named(tmp_path):
    save_sharded(tmp_path, tensors())
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = "model-1.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"tensors that no shard holds: model\.extra\.weight"):
        load(tmp_path)


def without(*names):
    return {name: tensor for name, tensor in tensors().items() if name not in names}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**tensors(), "model.surprise": torch.zeros(1)}, r"no place for model\.surprise"),
        (without("model.block.1.norm.bias"), r"blocks\.1\.norm\.bias is missing"),
        (
            without("model.block.0.key.weight"),
            r"blocks\.0\.qkv\.weight is half filled: blocks\.0\.key\.weight is missing",
        ),
        (
            without(*(f"model.block.0.{part}.bias" for part in ("query", "key", "value"))),
            r"blocks\.0\.qkv\.bias is missing",
        ),
        (
            {**tensors(), "model.block.0.norm.weight": torch.zeros(5)},
            r"blocks\.0\.norm\.weight: shape \(5,\) in the files, \(4,\) in the model",
        ),
        (
            {**tensors(), "model.block.0.value.weight": torch.zeros(3, 4)},
            r"blocks\.0\.qkv\.weight: shape \(2, 4\) \+ \(2, 4\) \+ \(3, 4\) in the files, \(6, 4\) in",
        ),
        (
            {**tensors(), "model.block.0.value.weight": torch.zeros(2, 5)},
            r"blocks\.0\.qkv\.weight: shape \(2, 4\) \+ \(2, 4\) \+ \(2, 5\) in the files",
        ),
        ({**tensors(), "block.0.norm.bias": torch.zeros(4)}, r"are meant for the same place"),
    ],
    ids=["unused", "missing", "half", "whole-group", "shape", "fused-rows", "fused-columns", "twice"],
)
def test_what_does_not_add_up_is_named(tmp_path, content, message):
    save(tmp_path, content)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(CheckpointError, match=r"pickled weights are refused.*rose_engine\.convert"):
        load(tmp_path)


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"a pointer to a large file\n"], ids=["empty", "pointer"])
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable safetensors file"):
        load(tmp_path)


class Rotation(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.arange(3.0), persistent=False)

    def fill_buffers(self, device):
        self.angles = torch.arange(3.0, device=device)


def test_computed_buffers_are_filled_after_loading(tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Rotation())
    save(tmp_path, {"0.weight": torch.eye(2), "0.bias": torch.zeros(2)})
    load_weights(model, tmp_path, WeightRules(), torch.bfloat16, CPU)
    assert model[1].angles.tolist() == [0.0, 1.0, 2.0]
    assert model[1].angles.dtype == torch.float32
