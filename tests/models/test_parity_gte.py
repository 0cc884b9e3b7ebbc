"""GTE trunks against `transformers.GteModel`, with the same random weights.

transformers has the publisher's architecture under the name `gte`, but not its rotary scaling `ntk`. For that
the reference is the same model with the frequencies of the published formulas put in: the base multiplied by
the factor f, and every frequency divided by f^(2 / H).   (kexue.fm/archives/9706, equation 6)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GteConfig, GteForTokenClassification, GteModel

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

MAX_LENGTH, HEAD_DIM, THETA, FACTOR = 64, 16, 700.0, 8.0
NTK = {
    "rope_parameters": None,
    "rope_theta": THETA,
    "rope_scaling": {"type": "ntk", "factor": FACTOR},
}


def tiny_config(**changes: object) -> GteConfig:
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 3 * HEAD_DIM,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": MAX_LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    }
    return GteConfig(**(settings | changes))


def tiny(**changes: object) -> GteModel:
    return randomize(GteModel(tiny_config(**changes)))


@pytest.mark.parametrize("lengths", ragged(MAX_LENGTH), ids=str)
@pytest.mark.parametrize("type_vocab_size", [0, 1])
def test_hidden_states(tmp_path: Path, type_vocab_size: int, lengths: tuple[int, ...]):
    model = tiny(type_vocab_size=type_vocab_size)
    assert_parity(model, saved(model, tmp_path), lengths)


def test_segments(tmp_path: Path):
    model = tiny(type_vocab_size=2)
    (ids,) = random_ids((6,), VOCABULARY)
    segments = np.array([0, 0, 0, 1, 1, 1], np.int32)
    segment_ids = torch.from_numpy(segments).long()[None]
    (wanted,) = reference_states(model, [ids], token_type_ids=segment_ids)
    assert_rows_close(run_segments(load_trunk(saved(model, tmp_path)), ids, segments), wanted)


def test_linear_scaling(tmp_path: Path):
    model = tiny(rope_parameters={"rope_type": "linear", "rope_theta": THETA, "factor": 1.5})
    assert_parity(model, saved(model, tmp_path), (MAX_LENGTH, 7))


def test_the_publishers_keys_and_ntk_scaling(tmp_path: Path):
    model = tiny()
    exponents = torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM
    model.rotary_emb.inv_freq = 1.0 / (THETA * FACTOR) ** exponents / FACTOR ** (2 / HEAD_DIM)
    saved(model, tmp_path)
    edit_config(
        tmp_path,
        model_type="new",
        **NTK,
        position_embedding_type="rope",
        layer_norm_type="layer_norm",
        pack_qkv=True,
        logn_attention_scale=False,
        logn_attention_clip1=False,
    )
    assert_parity(model, tmp_path, (MAX_LENGTH, 7, 1))


@pytest.mark.parametrize("prefix", ["new.", "gte.", ""])
def test_prefixed_names_and_heads_that_are_not_used(tmp_path: Path, prefix: str):
    model = randomize(GteForTokenClassification(tiny_config()))
    saved(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.replace("gte.", prefix): tensor for name, tensor in load_file(file).items()}
    assert "classifier.weight" in tensors
    save_file(tensors | {f"{prefix}pooler.dense.bias": torch.ones(48)}, file)
    assert_parity(model.gte, tmp_path, (4, 8))


def test_facts(tmp_path: Path):
    facts = facts_of(saved(tiny(type_vocab_size=0), tmp_path))
    assert (facts.max_length, facts.position_offset, facts.num_segments) == (MAX_LENGTH, 0, 1)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type"),
        ({"logn_attention_scale": True}, "logn_attention_scale"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": None}, "rope_theta"),
        ({**NTK, "rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.7}}, "mixed_b"),
        ({**NTK, "rope_scaling": {"type": "ntk"}}, "factor"),
    ],
    ids=str,
)
def test_variants_are_refused_by_name(tmp_path: Path, values: dict[str, object], named: str):
    saved(tiny(), tmp_path)
    edit_config(tmp_path, **values)
    with pytest.raises(CheckpointError, match=named):
        load_trunk(tmp_path)


def test_spare_tokens_and_empty_slots_change_nothing(tmp_path: Path):
    assert_spare_tokens_change_nothing(load_trunk(saved(tiny(), tmp_path)), (5, 1, 60, 9))
