"""DistilBERT trunks against `transformers.DistilBertModel`, with the same random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DistilBertConfig, DistilBertModel

from rose_engine.errors import CheckpointError
from tests.models.encoder_parity import (
    VOCABULARY,
    assert_parity,
    assert_spare_tokens_change_nothing,
    facts_of,
    ragged,
    saved,
)
from tests.models.parity import edit_config, load_trunk, randomize, save

MAX_LENGTH = 40


def tiny(**changes: object) -> DistilBertModel:
    settings = {
        "vocab_size": VOCABULARY,
        "dim": 48,
        "hidden_dim": 96,
        "n_layers": 2,
        "n_heads": 3,
        "max_position_embeddings": MAX_LENGTH,
    }
    return randomize(DistilBertModel(DistilBertConfig(**(settings | changes))))


@pytest.mark.parametrize("lengths", ragged(MAX_LENGTH), ids=str)
def test_hidden_states(tmp_path: Path, lengths: tuple[int, ...]):
    model = tiny()
    assert_parity(model, saved(model, tmp_path), lengths)


def test_another_activation(tmp_path: Path):
    model = tiny(activation="relu", n_heads=4)
    assert_parity(model, saved(model, tmp_path), (3, 17))


def test_prefixed_names_and_a_head_that_is_not_used(tmp_path: Path):
    model = tiny()
    extra = {
        "vocab_transform.weight": torch.ones(48, 48),
        "vocab_layer_norm.bias": torch.ones(48),
        "vocab_projector.bias": torch.ones(VOCABULARY),
    }
    assert_parity(model, save(model, tmp_path, "distilbert.", **extra), (4, 8))


def test_an_unknown_tensor_is_refused(tmp_path: Path):
    save(tiny(), tmp_path, **{"transformer.layer.0.attention.extra.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"extra\.weight"):
        load_trunk(tmp_path)


def test_facts(tmp_path: Path):
    facts = facts_of(saved(tiny(), tmp_path))
    assert (facts.hidden_size, facts.max_length, facts.num_segments) == (48, MAX_LENGTH, 1)
    edit_config(tmp_path, n_heads=5)
    with pytest.raises(CheckpointError, match="5 heads do not divide a width of 48"):
        facts_of(tmp_path)


def test_spare_tokens_and_empty_slots_change_nothing(tmp_path: Path):
    assert_spare_tokens_change_nothing(load_trunk(saved(tiny(), tmp_path)), (5, 1, 9))
