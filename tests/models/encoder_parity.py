"""What the parity tests of encoders share: files as transformers saves them, references, spare tokens."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rose_engine.attention.base import RaggedLayout
from rose_engine.attention.sdpa import SdpaBackend
from rose_engine.models.base import Trunk, TrunkFacts
from rose_engine.models.registry import find_family
from rose_engine.settings_file import SettingsFile
from rose_engine.staging import DeviceBatch
from tests.models.parity import assert_rows_close, device_batch, load_trunk, random_ids, run_trunk

VOCABULARY = 101


def ragged(max_length: int) -> list[tuple[int, ...]]:
    """Lengths of batches: one token, the most, all kinds mixed, several of one length."""
    return [(1,), (max_length,), (1, 6, max_length, 1, 13), (5, 5, 5)]


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """`folder` with the files that transformers writes: tensors have their published names."""
    model.save_pretrained(folder)
    return folder


def facts_of(folder: Path) -> TrunkFacts:
    """What the family reads from the folder's `config.json`."""
    config = SettingsFile.read(folder / "config.json")
    return find_family(config.required("model_type", str)).facts(config)


@torch.inference_mode()
def reference_states(model: PreTrainedModel, ids: SequenceOf[np.ndarray], **inputs: Tensor) -> list[Tensor]:
    """The reference's hidden states, one sequence at a time, without padding."""
    return [model(torch.from_numpy(i).long()[None], **inputs).last_hidden_state[0] for i in ids]


def assert_parity(model: PreTrainedModel, folder: Path, lengths: SequenceOf[int]) -> None:
    """Hidden states of a batch of these lengths are those of the reference."""
    ids = random_ids(lengths, VOCABULARY)
    for got, wanted in zip(run_trunk(load_trunk(folder), ids), reference_states(model, ids), strict=True):
        assert_rows_close(got, wanted)


@torch.inference_mode()
def run_segments(trunk: Trunk, token_ids: np.ndarray, segment_ids: np.ndarray) -> Tensor:
    """Hidden states of one sequence with segments."""
    batch = replace(device_batch([token_ids]), segment_ids_T=torch.from_numpy(segment_ids))
    return trunk(batch, SdpaBackend().bind(batch.layout))


@torch.inference_mode()
def assert_spare_tokens_change_nothing(trunk: Trunk, lengths: SequenceOf[int]) -> None:
    """As in a captured graph: more rows than tokens, more slots than sequences, lengths not on the host."""
    ids = random_ids(lengths, VOCABULARY)
    wanted = torch.cat(run_trunk(trunk, ids))
    batch = device_batch(ids)
    spare = torch.zeros(6, dtype=torch.int32)
    cu_lengths = torch.cat((batch.layout.cu_lengths, batch.layout.cu_lengths[-1:].expand(3)))
    layout = RaggedLayout(cu_lengths, batch.layout.max_length, len(lengths) + 3, None)
    padded = DeviceBatch(
        torch.cat((batch.token_ids_T, spare)), torch.cat((batch.position_ids_T, spare)), None, layout
    )
    got = trunk(padded, SdpaBackend().bind(layout))
    assert_rows_close(got[: len(wanted)], wanted, tolerance=2e-6)
