"""Qwen2 trunks against `transformers.Qwen2Model`, causal and with every token visible (GTE-Qwen2)."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen2Model

from rose_engine.errors import CheckpointError
from rose_engine.models.decoder_config import CAUSAL, FULL
from rose_engine.models.qwen2 import qwen2_facts
from rose_engine.settings_file import SettingsFile
from tests.models.decoder_parity import (
    RAGGED,
    SIZES,
    assert_parity,
    assert_prefix_and_head_do_not_matter,
    assert_saved_parity,
    assert_spare_tokens_change_nothing,
    first_token_sees_last,
)
from tests.models.parity import edit_config, load_trunk, randomize

WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def tiny(**changes: object) -> Qwen2Model:
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    return randomize(Qwen2Model(Qwen2Config(**(SIZES | settings | changes))))


@pytest.fixture(scope="module")
def reference() -> Qwen2Model:
    return tiny()


@pytest.fixture(scope="module")
def windowed() -> Qwen2Model:
    return tiny(**WINDOWED)


@pytest.fixture
def folder(reference: Qwen2Model, tmp_path: Path) -> Path:
    reference.save_pretrained(tmp_path)
    return tmp_path


def windows_of(folder: Path) -> list[tuple[int, int]]:
    facts = qwen2_facts(SettingsFile.read(folder / "config.json"))
    return [spec.window for spec in facts.attention_specs]


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_hidden_states(reference: Qwen2Model, folder: Path, lengths: tuple[int, ...]):
    assert_parity(reference, folder, lengths)


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_hidden_states_with_a_window_in_later_layers(
    windowed: Qwen2Model, tmp_path: Path, lengths: tuple[int, ...]
):
    assert_saved_parity(windowed, tmp_path, lengths)
    assert windows_of(tmp_path) == [CAUSAL, (7, 0)]


@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": False},
        {"is_causal": False} | WINDOWED,
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
        WINDOWED | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ],
    ids=str,
)
def test_variants(tmp_path: Path, changes: dict[str, object]):
    assert_saved_parity(tiny(**changes), tmp_path)


def test_who_sees_whom(folder: Path):
    assert windows_of(folder) == [CAUSAL]
    assert not first_token_sees_last(load_trunk(folder), 12)
    edit_config(folder, is_causal=False)
    assert windows_of(folder) == [FULL]
    assert first_token_sees_last(load_trunk(folder), 12)


def test_names_of_tensors(reference: Qwen2Model, tmp_path: Path):
    assert_prefix_and_head_do_not_matter(reference, tmp_path)


def test_spare_tokens_and_empty_slots_change_nothing(windowed: Qwen2Model, tmp_path: Path):
    windowed.save_pretrained(tmp_path)
    assert_spare_tokens_change_nothing(load_trunk(tmp_path))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, "1 layer_types for 3 layers"),
        ({"use_sliding_window": True, "layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    ],
)
def test_variants_are_refused_by_name(folder: Path, values: dict[str, object], named: str):
    edit_config(folder, **values)
    with pytest.raises(CheckpointError, match=named):
        windows_of(folder)
