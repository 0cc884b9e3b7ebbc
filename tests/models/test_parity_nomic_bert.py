"""NomicBERT trunks against `transformers.NomicBertModel`, with the same random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import NomicBertConfig, NomicBertModel

from rose_engine.errors import CheckpointError
from tests.models.encoder_parity import (
    VOCABULARY,
    assert_parity,
    assert_spare_tokens_change_nothing,
    facts_of,
    ragged,
    reference_states,
    run_segments,
    saved,
)
from tests.models.parity import assert_rows_close, edit_config, load_trunk, random_ids, randomize

MAX_LENGTH = 64
# The publisher's spelling of the keys that transformers' `config.json` has.
PUBLISHED = {
    "n_embd": 48,
    "n_inner": 80,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 8192,
    "max_trained_positions": MAX_LENGTH,
    "rotary_emb_base": 500,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_scaling_factor": 2,
    "layer_norm_epsilon": 1e-12,
    "activation_function": "swiglu",
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "prenorm": False,
    "causal": False,
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "max_position_embeddings": None,
    "rope_parameters": None,
    "layer_norm_eps": None,
    "hidden_act": None,
}


def tiny() -> NomicBertModel:
    config = NomicBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    return randomize(NomicBertModel(config))


@pytest.mark.parametrize("lengths", ragged(MAX_LENGTH), ids=str)
def test_hidden_states(tmp_path: Path, lengths: tuple[int, ...]):
    model = tiny()
    assert_parity(model, saved(model, tmp_path), lengths)


def test_segments(tmp_path: Path):
    model = tiny()
    (ids,) = random_ids((9,), VOCABULARY)
    segments = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1], np.int32)
    segment_ids = torch.from_numpy(segments).long()[None]
    (wanted,) = reference_states(model, [ids], token_type_ids=segment_ids)
    assert_rows_close(run_segments(load_trunk(saved(model, tmp_path)), ids, segments), wanted)


def test_published_keys(tmp_path: Path):
    model = tiny()
    saved(model, tmp_path)
    edit_config(tmp_path, **PUBLISHED)
    assert_parity(model, tmp_path, (MAX_LENGTH, 3))
    assert facts_of(tmp_path).max_length == MAX_LENGTH


def test_prefixed_names_and_a_head_that_is_not_used(tmp_path: Path):
    model = tiny()
    saved(model, tmp_path / "plain")
    prefixed = tmp_path / "prefixed"
    prefixed.mkdir()
    _copy_prefixed(tmp_path / "plain", prefixed)
    assert_parity(model, prefixed, (4, 8))


def _copy_prefixed(plain: Path, prefixed: Path) -> None:
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(plain / "model.safetensors").items()}
    head = {"cls.predictions.decoder.bias": torch.ones(VOCABULARY)}
    save_file(tensors | head, prefixed / "model.safetensors")
    (prefixed / "config.json").write_bytes((plain / "config.json").read_bytes())


def test_facts(tmp_path: Path):
    facts = facts_of(saved(tiny(), tmp_path))
    assert (facts.max_length, facts.position_offset, facts.num_segments) == (MAX_LENGTH, 0, 2)


@pytest.mark.parametrize(
    "values",
    [
        {"activation_function": "gelu"},
        {"qkv_proj_bias": True},
        {"prenorm": True},
        {"rotary_emb_fraction": 0.5},
        {"moe_every_n_layers": 2},
    ],
    ids=str,
)
def test_variants_are_refused_by_name(tmp_path: Path, values: dict[str, object]):
    saved(tiny(), tmp_path)
    edit_config(tmp_path, **values)
    with pytest.raises(CheckpointError, match=next(iter(values))):
        facts_of(tmp_path)


def test_spare_tokens_and_empty_slots_change_nothing(tmp_path: Path):
    assert_spare_tokens_change_nothing(load_trunk(saved(tiny(), tmp_path)), (5, 1, 60, 9))
