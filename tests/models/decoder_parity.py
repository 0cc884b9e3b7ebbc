"""What the parity tests of decoder families share, beside `parity.py`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rose_engine.attention.base import RaggedLayout
from rose_engine.attention.sdpa import SdpaBackend
from rose_engine.models.base import Trunk
from rose_engine.staging import DeviceBatch
from tests.models.parity import assert_rows_close, device_batch, load_trunk, random_ids, run_trunk, save

VOCABULARY, MAX_LENGTH = 97, 64
RAGGED = [(1,), (MAX_LENGTH,), (1, 5, MAX_LENGTH, 2, 33, 1), (7, 7, 7), (3, MAX_LENGTH)]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
}


@torch.inference_mode()
def reference_states(model: PreTrainedModel, ids: SequenceOf[np.ndarray]) -> list[Tensor]:
    """Each sequence alone."""
    return [model(torch.from_numpy(i).long()[None]).last_hidden_state[0] for i in ids]


def assert_parity(model: PreTrainedModel, folder: Path, lengths: SequenceOf[int]) -> None:
    """The folder's trunk computes the model's hidden states, all sequences at once."""
    ids = random_ids(lengths, VOCABULARY)
    for got, wanted in zip(run_trunk(load_trunk(folder), ids), reference_states(model, ids), strict=True):
        assert_rows_close(got, wanted)


def assert_saved_parity(model: PreTrainedModel, folder: Path, lengths: SequenceOf[int] = (1, 40, 64)) -> None:
    """As `assert_parity`, with the model's own files written to `folder` first."""
    model.save_pretrained(folder)
    assert_parity(model, folder, lengths)


def assert_spare_tokens_change_nothing(trunk: Trunk) -> None:
    """As in a captured graph: more rows than tokens, more slots than sequences, lengths not on the host."""
    ids = random_ids((5, 1, 9), VOCABULARY)
    wanted = torch.cat(run_trunk(trunk, ids))
    batch = device_batch(ids)
    spare = torch.zeros(6, dtype=torch.int32)
    cu_lengths = torch.cat((batch.layout.cu_lengths, batch.layout.cu_lengths[-1:].expand(3)))
    layout = RaggedLayout(cu_lengths, MAX_LENGTH, 6, None)
    padded = DeviceBatch(
        torch.cat((batch.token_ids_T, spare)), torch.cat((batch.position_ids_T, spare)), None, layout
    )
    with torch.inference_mode():
        got = trunk(padded, SdpaBackend().bind(layout))
    assert_rows_close(got[: len(wanted)], wanted, tolerance=5e-6)


def assert_prefix_and_head_do_not_matter(model: PreTrainedModel, folder: Path) -> None:
    """Tensors under `model.`, and a language-model head beside them, load as the bare model does."""
    plain_folder, prefixed_folder = folder / "plain", folder / "prefixed"
    for each in (plain_folder, prefixed_folder):
        each.mkdir()
    save(model, plain_folder)
    save(model, prefixed_folder, "model.", **{"lm_head.weight": torch.ones(VOCABULARY, 48)})
    ids = random_ids((4, 6), VOCABULARY)
    plain, prefixed = (run_trunk(load_trunk(each), ids) for each in (plain_folder, prefixed_folder))
    assert all(torch.equal(a, b) for a, b in zip(plain, prefixed, strict=True))


def first_token_sees_last(trunk: Trunk, length: int) -> bool:
    """Whether the last of `length` tokens moves the first one's hidden state."""
    (ids,) = random_ids((length,), VOCABULARY)
    changed = ids.copy()
    changed[-1] = (changed[-1] + 1) % VOCABULARY
    (before,), (after,) = run_trunk(trunk, [ids]), run_trunk(trunk, [changed])
    return bool((before[0] - after[0]).abs().max() > 1e-5)
