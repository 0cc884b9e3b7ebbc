"""Llama trunks, and the ways to stretch their rotary basis, against `transformers.LlamaModel`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from rose_engine.errors import CheckpointError
from rose_engine.models.llama import llama_facts
from rose_engine.models.rotary_config import read_rotary
from rose_engine.settings_file import SettingsFile
from tests.models.decoder_parity import (
    MAX_LENGTH,
    RAGGED,
    SIZES,
    VOCABULARY,
    assert_parity,
    assert_prefix_and_head_do_not_matter,
    assert_saved_parity,
    assert_spare_tokens_change_nothing,
    first_token_sees_last,
    reference_states,
)
from tests.models.parity import (
    assert_rows_close,
    edit_config,
    load_trunk,
    random_ids,
    randomize,
    run_trunk,
    save,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def tiny(**changes: object) -> LlamaModel:
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    return randomize(LlamaModel(LlamaConfig(**(SIZES | settings | changes))))


@pytest.fixture(scope="module")
def reference() -> LlamaModel:
    return tiny()


@pytest.fixture
def folder(reference: LlamaModel, tmp_path: Path) -> Path:
    reference.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_hidden_states(reference: LlamaModel, folder: Path, lengths: tuple[int, ...]):
    assert_parity(reference, folder, lengths)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
        {"num_hidden_layers": 1, "rms_norm_eps": 1e-3},
        {"attention_bias": True},
        {"is_causal": False},
    ],
    ids=str,
)
def test_variants(tmp_path: Path, changes: dict[str, object]):
    assert_saved_parity(tiny(**changes), tmp_path)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.5},
        LLAMA3,
        LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 3.0, "factor": 32.0},
        YARN,
        YARN | {"attention_factor": 1.25, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False},
        YARN | {"mscale": 0.8, "mscale_all_dim": 0.6},
        YARN | {"original_max_position_embeddings": 64, "factor": 1.0},
    ],
    ids=lambda scaling: " ".join(map(str, scaling.values())),
)
@pytest.mark.parametrize("theta", [500.0, 500000.0])
def test_stretched_rotations(tmp_path: Path, scaling: dict[str, object], theta: float):
    """At the default width of heads (12) and at one with more frequencies."""
    for head_dim in (12, 64):
        folder = tmp_path / str(head_dim)
        model = tiny(rope_parameters=scaling | {"rope_theta": theta}, head_dim=head_dim, num_hidden_layers=2)
        assert_saved_parity(model, folder)


def test_a_stretched_rotation_is_not_the_plain_one(folder: Path):
    ids = random_ids((MAX_LENGTH,), VOCABULARY)
    (plain,) = run_trunk(load_trunk(folder), ids)
    for scaling in ({"rope_type": "linear", "factor": 2.0}, LLAMA3, YARN):
        edit_config(folder, rope_parameters=scaling | {"rope_theta": 5000.0})
        (stretched,) = run_trunk(load_trunk(folder), ids)
        assert (stretched - plain).abs().max() > 1e-2


def test_the_old_layout_of_a_rotation(folder: Path):
    """`rope_theta` beside `rope_scaling`, whose kind was called `type` at first."""
    ids = random_ids((MAX_LENGTH,), VOCABULARY)
    edit_config(folder, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0})
    (new,) = run_trunk(load_trunk(folder), ids)
    edit_config(
        folder, rope_parameters=None, rope_theta=700.0, rope_scaling={"type": "linear", "factor": 2.0}
    )
    assert torch.equal(run_trunk(load_trunk(folder), ids)[0], new)
    (reloaded,) = reference_states(LlamaModel.from_pretrained(folder), ids)
    assert_rows_close(new, reloaded)


def test_names_of_tensors(reference: LlamaModel, tmp_path: Path):
    assert_prefix_and_head_do_not_matter(reference, tmp_path)


def test_stored_frequencies_are_ignored_and_other_tensors_are_not(reference: LlamaModel, tmp_path: Path):
    name = "layers.0.self_attn.rotary_emb.inv_freq"
    load_trunk(save(reference, tmp_path, **{name: torch.ones(6)}))
    save(reference, tmp_path, **{"layers.0.self_attn.q_norm.weight": torch.ones(12)})
    with pytest.raises(CheckpointError, match=r"no place for .*q_norm"):
        load_trunk(tmp_path)


def test_spare_tokens_and_empty_slots_change_nothing(folder: Path):
    assert_spare_tokens_change_nothing(load_trunk(folder))


def test_who_sees_whom(folder: Path):
    assert not first_token_sees_last(load_trunk(folder), 12)
    edit_config(folder, is_causal=False)
    assert first_token_sees_last(load_trunk(folder), 12)


def test_bfloat16(folder: Path):
    ids = random_ids((5, 64, 1, 30), VOCABULARY)
    exact = torch.cat(run_trunk(load_trunk(folder), ids))
    rounded = torch.cat(run_trunk(load_trunk(folder, torch.bfloat16), ids))
    assert rounded.dtype == torch.bfloat16
    assert torch.cosine_similarity(rounded.float(), exact, dim=1).min() > 0.999


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_variants_are_refused_by_name(folder: Path, values: dict[str, object], named: str):
    edit_config(folder, **values)
    with pytest.raises(CheckpointError, match=named):
        llama_facts(SettingsFile.read(folder / "config.json"))


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'.*linear, llama3, yarn"),
        ({"type": "longrope"}, "longrope"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "yarn", "factor": 0.5}, "factor 0.5"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "part of a head"),
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rotations_are_refused_by_name(folder: Path, key: str, parameters: dict[str, object], named: str):
    edit_config(folder, **({"rope_parameters": None} | {key: parameters}))
    with pytest.raises(CheckpointError, match=named):
        read_rotary(SettingsFile.read(folder / "config.json"), 12)
