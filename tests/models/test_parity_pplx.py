"""pplx-embed: `transformers.Qwen3Model` with all tokens visible, mean pooling, the quantiser written out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Model

from rose_engine.errors import EngineConfigError
from rose_engine.heads.pooling import pool
from rose_engine.heads.quantizer import quantize, row_width
from tests.models.parity import (
    assert_rows_close,
    device_batch,
    edit_config,
    load_trunk,
    random_ids,
    randomize,
    run_trunk,
    save,
)
from tests.models.test_parity_qwen3 import MAX_LENGTH, RAGGED, VOCABULARY, tiny_config


@pytest.fixture(scope="module")
def reference() -> Qwen3Model:
    return randomize(Qwen3Model(tiny_config()))


@pytest.fixture
def folder(reference: Qwen3Model, tmp_path: Path) -> Path:
    save(reference, tmp_path)
    edit_config(
        tmp_path,
        model_type="bidirectional_pplx_qwen3",
        architectures=["PPLXQwen3Model"],
        use_bidirectional_attention=True,
    )
    return tmp_path


@torch.inference_mode()
def reference_states(model: Qwen3Model, ids) -> list[torch.Tensor]:
    """Every token sees every other: an additive mask of zeros in place of the causal one."""
    states = []
    for token_ids in ids:
        visible = {"full_attention": torch.zeros(1, 1, len(token_ids), len(token_ids))}
        states.append(model(torch.from_numpy(token_ids).long()[None], visible).last_hidden_state[0])
    return states


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_hidden_states(reference: Qwen3Model, folder: Path, lengths: tuple[int, ...]):
    ids = random_ids(lengths, VOCABULARY)
    for got, wanted in zip(run_trunk(load_trunk(folder), ids), reference_states(reference, ids), strict=True):
        assert_rows_close(got, wanted)


def test_the_first_token_sees_the_last(folder: Path):
    trunk = load_trunk(folder)
    (ids,) = random_ids((12,), VOCABULARY)
    changed = ids.copy()
    changed[-1] = (changed[-1] + 1) % VOCABULARY
    (before,), (after,) = run_trunk(trunk, [ids]), run_trunk(trunk, [changed])
    assert (before[0] - after[0]).abs().max() > 1e-4


def test_rows(reference: Qwen3Model, folder: Path):
    """Trunk, mean pooling and quantiser together, against the formulas on the reference's states."""
    ids = random_ids((1, 17, MAX_LENGTH, 4), VOCABULARY)
    hidden_TD = torch.cat(run_trunk(load_trunk(folder), ids))
    pooled_BD = pool(("mean",), hidden_TD, device_batch(ids).layout)
    rows = quantize(pooled_BD).numpy()

    means = np.stack([states.mean(0).numpy() for states in reference_states(reference, ids)])
    codes = np.clip(np.round(127 * np.tanh(means)), -128, 127).astype(np.int8)
    exact = 127 * np.tanh(means)
    clear = np.abs(exact - np.floor(exact) - 0.5) > 1e-2  # not on the edge between two codes
    assert clear.mean() > 0.9
    assert (rows[:, :48] == codes)[clear].all()
    assert np.abs(rows[:, :48].astype(int) - codes).max() <= 1

    bits = np.unpackbits(rows[:, 48:].view(np.uint8), axis=1)
    decided = np.abs(means) > 1e-5
    assert (bits.astype(bool) == (means >= 0))[decided].all()


def test_quantiser_edges():
    values_BD = torch.tensor(
        [[0.0, -0.0, -0.003, 50.0, -50.0, float("nan"), float("inf"), float("-inf"), 1.0]]
    )
    rows = quantize(values_BD)
    assert rows.dtype == torch.int8
    assert rows.shape == (1, row_width(9)) == (1, 11)
    assert rows[0, :9].tolist() == [0, 0, 0, 127, -127, -128, -128, -128, 97]
    # Bits are those of the values: -0.003 has code 0 and no bit. Not a number has none either.
    assert [f"{byte & 0xFF:08b}" for byte in rows[0, 9:].tolist()] == ["11010010", "10000000"]


def test_prefixes_of_values_are_prefixes_of_rows():
    values_BD = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    whole, prefix = quantize(values_BD), quantize(values_BD[:, :24])
    assert torch.equal(whole[:, :24], prefix[:, :24])
    assert torch.equal(whole[:, 64:67], prefix[:, 24:])


def test_float16_is_refused(folder: Path):
    with pytest.raises(EngineConfigError, match=r"float16.*bfloat16 or float32"):
        load_trunk(folder, torch.float16)
