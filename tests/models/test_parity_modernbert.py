"""ModernBERT trunks against `transformers.ModernBertModel`, with the same random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import ModernBertConfig, ModernBertModel

from rose_engine.errors import CheckpointError
from rose_engine.models.modernbert import layer_kinds, rope_theta
from rose_engine.settings_file import SettingsFile
from tests.models.encoder_parity import (
    VOCABULARY,
    assert_parity,
    assert_spare_tokens_change_nothing,
    facts_of,
    ragged,
    saved,
)
from tests.models.parity import edit_config, load_trunk, randomize, save

MAX_LENGTH, HALF_WINDOW = 72, 8
LOCAL, FULL = "sliding_attention", "full_attention"


def tiny(**changes: object) -> ModernBertModel:
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 5,
        "num_attention_heads": 3,
        "max_position_embeddings": MAX_LENGTH,
        "local_attention": 2 * HALF_WINDOW,
        "rope_parameters": {FULL: {"rope_theta": 5000.0}, LOCAL: {"rope_theta": 300.0}},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "cls_token_id": 1,
        "eos_token_id": 2,
        "sep_token_id": 2,
    }
    return randomize(ModernBertModel(ModernBertConfig(**(settings | changes))))


@pytest.mark.parametrize("lengths", [*ragged(MAX_LENGTH), (8, 9, 10, 17, 18)], ids=str)
def test_hidden_states(tmp_path: Path, lengths: tuple[int, ...]):
    model = tiny()
    assert_parity(model, saved(model, tmp_path), lengths)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "norm_eps": 1e-3},
        {"layer_types": [LOCAL, LOCAL, FULL, LOCAL, FULL], "hidden_activation": "silu"},
        {"layer_types": [FULL] * 5, "num_attention_heads": 4},
    ],
    ids=str,
)
def test_variants(tmp_path: Path, changes: dict[str, object]):
    model = tiny(**changes)
    assert_parity(model, saved(model, tmp_path), (1, 40, 19))


def test_published_names_and_keys(tmp_path: Path):
    """As the first checkpoints have them: a prefix, a prediction head, the old keys for layers and bases."""
    model = tiny()
    extra = {
        "head.dense.weight": torch.ones(48, 48),
        "head.norm.weight": torch.ones(48),
        "decoder.bias": torch.ones(VOCABULARY),
    }
    save(model, tmp_path, "model.", **extra)
    edit_config(tmp_path, rope_parameters=None, layer_types=None, global_attn_every_n_layers=3)
    edit_config(tmp_path, global_rope_theta=5000, local_rope_theta=300.0, position_embedding_type="absolute")
    assert_parity(model, tmp_path, (4, 30))


def test_rotary_bases_and_layers_without_any_key(tmp_path: Path):
    saved(tiny(), tmp_path)
    edit_config(tmp_path, rope_parameters=None, layer_types=None)
    config = SettingsFile.read(tmp_path / "config.json")
    assert [rope_theta(config, kind) for kind in (FULL, LOCAL)] == [160_000.0, 10_000.0]
    assert layer_kinds(config) == [FULL, LOCAL, LOCAL, FULL, LOCAL]
    one_base = SettingsFile(config.path, {**config.values, "local_rope_theta": None, "global_rope_theta": 7})
    assert rope_theta(one_base, LOCAL) == 7.0


def test_facts(tmp_path: Path):
    facts = facts_of(saved(tiny(), tmp_path))
    assert (facts.max_length, facts.position_offset, facts.num_segments) == (MAX_LENGTH, 0, 1)
    windows = {spec.window for spec in facts.attention_specs}
    assert windows == {(-1, -1), (HALF_WINDOW, HALF_WINDOW)}
    edit_config(tmp_path, max_position_embeddings=None)
    assert facts_of(tmp_path).max_length == 8192


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"layer_types": [FULL]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 5}, "layer_types"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn"),
    ],
    ids=str,
)
def test_other_variants_are_refused_by_name(tmp_path: Path, values: dict[str, object], named: str):
    saved(tiny(), tmp_path)
    edit_config(tmp_path, **values)
    with pytest.raises(CheckpointError, match=named):
        facts_of(tmp_path)


def test_spare_tokens_and_empty_slots_change_nothing(tmp_path: Path):
    assert_spare_tokens_change_nothing(load_trunk(saved(tiny(), tmp_path)), (5, 1, 60, 9))
