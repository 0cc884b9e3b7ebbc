"""XLM-RoBERTa, RoBERTa and CamemBERT trunks against transformers, with the same random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    CamembertConfig,
    CamembertModel,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from rose_engine.models.xlm_roberta import xlm_roberta_facts
from rose_engine.settings_file import SettingsFile
from tests.models.parity import (
    assert_rows_close,
    edit_config,
    load_trunk,
    random_ids,
    randomize,
    run_trunk,
    save,
)

VOCABULARY, PAD, MAX_POSITIONS = 101, 1, 42
MAX_LENGTH = MAX_POSITIONS - PAD - 1
KINDS = {
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaModel),
    "roberta": (RobertaConfig, RobertaModel),
    "camembert": (CamembertConfig, CamembertModel),
}
RAGGED = [(1,), (MAX_LENGTH,), (1, 6, MAX_LENGTH, 1, 13), (5, 5, 5)]


def tiny(kind: str, **changes: object) -> PreTrainedModel:
    config_class, model_class = KINDS[kind]
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": MAX_POSITIONS,
        "type_vocab_size": 1,
        "pad_token_id": PAD,
    }
    config: PreTrainedConfig = config_class(**(settings | changes))
    return randomize(model_class(config, add_pooling_layer=False))


@torch.inference_mode()
def reference_states(model: PreTrainedModel, ids) -> list[torch.Tensor]:
    return [model(torch.from_numpy(i).long()[None]).last_hidden_state[0] for i in ids]


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states(tmp_path: Path, kind: str, lengths: tuple[int, ...]):
    model = tiny(kind)
    ids = random_ids(lengths, VOCABULARY)
    got_states = run_trunk(load_trunk(save(model, tmp_path)), ids)
    for got, wanted in zip(got_states, reference_states(model, ids), strict=True):
        assert_rows_close(got, wanted)


def test_positions_follow_the_padding_index(tmp_path: Path):
    model = tiny("xlm-roberta", pad_token_id=2)
    ids = random_ids((9,), VOCABULARY)
    (got,) = run_trunk(load_trunk(save(model, tmp_path)), ids)
    assert_rows_close(got, reference_states(model, ids)[0])


def test_prefixed_names_a_pooler_and_heads_that_are_not_used(tmp_path: Path):
    model = tiny("xlm-roberta")
    extra = {
        "roberta.pooler.dense.weight": torch.ones(48, 48),
        "roberta.embeddings.position_ids": torch.arange(MAX_POSITIONS)[None],
        "lm_head.bias": torch.ones(VOCABULARY),
    }
    ids = random_ids((4, 8), VOCABULARY)
    got_states = run_trunk(load_trunk(save(model, tmp_path, "roberta.", **extra)), ids)
    for got, wanted in zip(got_states, reference_states(model, ids), strict=True):
        assert_rows_close(got, wanted)


def test_facts(tmp_path: Path):
    folder = save(tiny("roberta"), tmp_path)
    facts = xlm_roberta_facts(SettingsFile.read(folder / "config.json"))
    assert (facts.max_length, facts.position_offset, facts.num_segments) == (MAX_LENGTH, PAD + 1, 1)
    edit_config(folder, pad_token_id=None, type_vocab_size=None)
    facts = xlm_roberta_facts(SettingsFile.read(folder / "config.json"))
    assert (facts.position_offset, facts.num_segments) == (2, 1)
