"""DeBERTa v2 and v3 trunks against `transformers.DebertaV2Model`, with the same random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DebertaV2Config, DebertaV2Model
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from rose_engine.errors import CheckpointError
from rose_engine.layers.disentangled import log_buckets
from tests.models.encoder_parity import (
    VOCABULARY,
    assert_parity,
    assert_spare_tokens_change_nothing,
    facts_of,
    ragged,
    saved,
)
from tests.models.parity import edit_config, load_trunk, randomize, save

MAX_LENGTH, NUM_BUCKETS = 72, 16
# What the published third version states beside its sizes.
V3 = {
    "relative_attention": True,
    "position_buckets": NUM_BUCKETS,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "max_relative_positions": -1,
    "position_biased_input": False,
    "type_vocab_size": 0,
}


def tiny(**changes: object) -> DebertaV2Model:
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": MAX_LENGTH,
    }
    model = randomize(DebertaV2Model(DebertaV2Config(**(settings | V3 | changes))))
    model.encoder.rel_embeddings.weight.data *= 10  # so that a wrong bucket is seen
    return model


@pytest.mark.parametrize("lengths", ragged(MAX_LENGTH), ids=str)
def test_hidden_states(tmp_path: Path, lengths: tuple[int, ...]):
    model = tiny()
    assert_parity(model, saved(model, tmp_path), lengths)


@pytest.mark.parametrize(
    "changes",
    [
        {"position_biased_input": True, "type_vocab_size": 2},
        {"norm_rel_ebd": "none", "pos_att_type": ["c2p", "p2c"]},
        {
            "max_relative_positions": 40
        },  # fewer than there are positions: far distances are in the last bucket
        {"position_buckets": 6, "num_attention_heads": 4},
    ],
    ids=str,
)
def test_variants(tmp_path: Path, changes: dict[str, object]):
    model = tiny(**changes)
    assert_parity(model, saved(model, tmp_path), (1, MAX_LENGTH, 19))


def test_buckets_of_every_distance():
    distances = torch.arange(-511, 512)
    wanted = make_log_bucket_position(distances, 256, 512).long()
    assert torch.equal(log_buckets(distances, 256, 512), wanted)


def test_prefixed_names_and_heads_that_are_not_used(tmp_path: Path):
    model = tiny()
    extra = {
        "deberta.embeddings.position_embeddings.weight": torch.ones(MAX_LENGTH, 48),
        "lm_predictions.lm_head.bias": torch.ones(VOCABULARY),
        "mask_predictions.dense.weight": torch.ones(48, 48),
        "pooler.dense.bias": torch.ones(48),
    }
    assert_parity(model, save(model, tmp_path, "deberta.", **extra), (4, 8))


def test_facts(tmp_path: Path):
    facts = facts_of(saved(tiny(), tmp_path))
    assert (facts.max_length, facts.position_offset, facts.num_segments) == (MAX_LENGTH, 0, 1)
    (spec,) = facts.attention_specs
    assert spec.biased
    assert spec.scale == pytest.approx((3 * 16) ** -0.5)


@pytest.mark.parametrize(
    "values",
    [
        {"relative_attention": False},
        {"share_att_key": None},
        {"pos_att_type": "c2p"},
        {"position_buckets": -1},
        {"conv_kernel_size": 3},
        {"embedding_size": 32},
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
