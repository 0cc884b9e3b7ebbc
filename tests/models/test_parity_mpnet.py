"""MPNet trunks against `transformers.MPNetModel`, with the same random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MPNetConfig, MPNetModel

from rose_engine.errors import CheckpointError
from rose_engine.layers.relative_bias import distance_buckets
from tests.models.encoder_parity import (
    VOCABULARY,
    assert_parity,
    assert_spare_tokens_change_nothing,
    facts_of,
    ragged,
    saved,
)
from tests.models.parity import edit_config, load_trunk, randomize, save

MAX_POSITIONS = 200  # more than the 128 tokens from which on all distances are alike
MAX_LENGTH = MAX_POSITIONS - 2


def tiny(**changes: object) -> MPNetModel:
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": MAX_POSITIONS,
    }
    model = randomize(MPNetModel(MPNetConfig(**(settings | changes)), add_pooling_layer=False))
    model.encoder.relative_attention_bias.weight.data *= 20  # so that a wrong bucket is seen
    return model


@pytest.mark.parametrize("lengths", ragged(MAX_LENGTH), ids=str)
def test_hidden_states(tmp_path: Path, lengths: tuple[int, ...]):
    model = tiny()
    assert_parity(model, saved(model, tmp_path), lengths)


def test_buckets_of_every_distance():
    distances = torch.arange(-600, 601)
    wanted = tiny().encoder.relative_position_bucket(distances)
    assert torch.equal(distance_buckets(distances, 32, 128), wanted)


def test_prefixed_names_a_pooler_and_a_head_that_is_not_used(tmp_path: Path):
    model = tiny()
    extra = {
        "mpnet.pooler.dense.weight": torch.ones(48, 48),
        "mpnet.embeddings.position_ids": torch.arange(MAX_POSITIONS)[None],
        "lm_head.bias": torch.ones(VOCABULARY),
    }
    assert_parity(model, save(model, tmp_path, "mpnet.", **extra), (4, 8))


def test_facts(tmp_path: Path):
    facts = facts_of(saved(tiny(), tmp_path))
    assert (facts.max_length, facts.position_offset, facts.num_segments) == (MAX_LENGTH, 2, 1)
    assert facts.attention_specs[0].biased
    edit_config(tmp_path, relative_attention_num_buckets=16)
    with pytest.raises(CheckpointError, match="relative_attention_num_buckets 16"):
        facts_of(tmp_path)


def test_spare_tokens_and_empty_slots_change_nothing(tmp_path: Path):
    assert_spare_tokens_change_nothing(load_trunk(saved(tiny(), tmp_path)), (5, 1, 9, 150, 150))
