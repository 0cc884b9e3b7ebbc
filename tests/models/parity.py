"""What the parity tests share: saving a random model, loading it as the engine does, comparing.

Every family is compared in float32 on the CPU, packed and without padding against one sequence at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from rose_engine.attention.base import RaggedLayout
from rose_engine.attention.sdpa import SdpaBackend
from rose_engine.batch import Batch, Sequence
from rose_engine.checkpoint import load_weights
from rose_engine.models.base import Trunk
from rose_engine.models.registry import find_family
from rose_engine.settings_file import SettingsFile
from rose_engine.staging import DeviceBatch

TOLERANCE = 1e-5  # max |difference| over max |reference|, per row


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """`model` with every parameter random, norms and biases too, so that none can be left out unnoticed."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = "norm" in name.lower() and name.endswith("weight")
        parameter.data.copy_(1 + 0.3 * noise if is_norm else noise * 0.08)
    return model.eval().float()


def save(model: PreTrainedModel, folder: Path, prefix: str = "", **extra: Tensor) -> Path:
    """The model's files, its tensors under `prefix` and some `extra` ones beside them."""
    tensors = {prefix + name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors | extra, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    return folder


def edit_config(folder: Path, **values: object) -> None:
    """Change keys of a saved `config.json`; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def load_trunk(folder: Path, dtype: torch.dtype = torch.float32) -> Trunk:
    """The trunk of `folder` on the CPU, loaded as the engine does."""
    config = SettingsFile.read(folder / "config.json")
    family = find_family(config.required("model_type", str))
    with torch.device("meta"):
        trunk = family.build(config, family.facts(config))
    load_weights(trunk, folder, family.weights, dtype, torch.device("cpu"))
    return trunk.eval()


def random_ids(lengths: SequenceOf[int], vocabulary_size: int) -> list[np.ndarray]:
    """Token ids of sequences of these lengths."""
    generator = np.random.default_rng(5)
    return [generator.integers(3, vocabulary_size, length, dtype=np.int32) for length in lengths]


def device_batch(ids: SequenceOf[np.ndarray]) -> DeviceBatch:
    """The sequences packed, on the CPU."""
    batch = Batch.pack(Sequence(token_ids) for token_ids in ids)
    layout = RaggedLayout(
        torch.from_numpy(batch.layout.cu_lengths),
        batch.layout.max_length,
        batch.num_sequences,
        tuple(batch.layout.lengths.tolist()),
    )
    return DeviceBatch(
        torch.from_numpy(batch.token_ids_T), torch.from_numpy(batch.position_ids_T), None, layout
    )


@torch.inference_mode()
def run_trunk(trunk: Trunk, ids: SequenceOf[np.ndarray]) -> list[Tensor]:
    """Hidden states of each sequence, computed together."""
    batch = device_batch(ids)
    hidden_TD = trunk(batch, SdpaBackend().bind(batch.layout))
    return list(hidden_TD.split([len(token_ids) for token_ids in ids]))


def assert_rows_close(got: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    """max |got - wanted| / max |wanted| within `tolerance`, row by row."""
    assert got.shape == wanted.shape
    error = (got - wanted).abs().amax(-1) / wanted.abs().amax(-1)
    assert error.max() <= tolerance, f"largest relative error {error.max():.2e}"
