"""Which head a folder's files describe, and the heads themselves on hidden states."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
import torch
from torch import nn

from rose_engine.errors import CheckpointError
from rose_engine.heads.scoring import ScoringHead
from rose_engine.score_spec import CLASSIFIERS, ClassifierSpec, TokenLogitSpec, read_score_spec, token_id
from rose_engine.settings_file import SettingsFile
from tests.rose_engine.samples import ragged

WIDTH = 6


def config_of(folder: Path, **values: object) -> SettingsFile:
    (folder / "config.json").write_text(json.dumps(values))
    return SettingsFile.read(folder / "config.json")


def classifier(folder: Path, model_type: str, **values: object) -> ClassifierSpec:
    config = config_of(
        folder, architectures=["TheForSequenceClassification"], model_type=model_type, **values
    )
    spec = read_score_spec(folder, config)
    assert isinstance(spec, ClassifierSpec)
    return spec


def modules(folder: Path, *kinds: str) -> None:
    listed = [{"idx": i, "path": f"{i}_{kind}" if i else "", "type": kind} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(listed))


@pytest.fixture(scope="module")
def qwen3_tokenizer(shared, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("qwen3") / "tokenizer.json"
    file.write_bytes(lzma.decompress((shared / "tokenizers/qwen3/tokenizer.json.xz").read_bytes()))
    return file


def test_the_ids_of_yes_and_no_in_the_published_vocabulary(qwen3_tokenizer):
    assert (token_id(qwen3_tokenizer, "yes"), token_id(qwen3_tokenizer, "no")) == (9693, 2152)
    config = config_of(qwen3_tokenizer.parent, architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    assert read_score_spec(qwen3_tokenizer.parent, config, "score") == TokenLogitSpec(9693, 2152, tied=None)
    assert read_score_spec(qwen3_tokenizer.parent, config) is None


def test_the_id_of_a_unigram_piece(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": [["<unk>", 0.0], ["yes", -1.5]]}}))
    assert token_id(file, "yes") == 1


@pytest.mark.parametrize(
    ("stated", "num_labels"),
    [({"id2label": {"0": "a"}}, 1), ({"num_labels": 3}, 3), ({}, 2), ({"id2label": {}, "num_labels": 1}, 1)],
)
def test_the_number_of_labels(tmp_path, stated, num_labels):
    assert classifier(tmp_path, "bert", **stated).num_labels == num_labels


def test_every_kind_of_head_names_its_own_tensors(tmp_path):
    for model_type in CLASSIFIERS:
        spec = classifier(tmp_path, model_type)
        assert "output" in spec.stored_names
        assert len(set(spec.stored_names.values())) == len(spec.stored_names)
        assert len(spec.not_the_trunks) == len(spec.stored_names)


def test_modernbert_says_where_it_pools(tmp_path):
    assert classifier(tmp_path, "modernbert").pooling == "cls"
    assert classifier(tmp_path, "modernbert", classifier_pooling="mean").pooling == "mean"
    with pytest.raises(CheckpointError, match="classifier_pooling 'max'"):
        classifier(tmp_path, "modernbert", classifier_pooling="max")


@pytest.mark.parametrize("words", [["yes"], ["a", "b", "c"], [1, 2], "no"])
def test_classifier_words_that_are_not_two(tmp_path, words):
    config = config_of(tmp_path, architectures=["Qwen3ForCausalLM"], classifier_from_token=words)
    with pytest.raises(CheckpointError, match="classifier_from_token"):
        read_score_spec(tmp_path, config)


@pytest.mark.parametrize("kinds", [("Transformer", "Pooling", "Dense"), ("Transformer", "Dense")])
def test_chains_behind_a_classifier_are_refused(tmp_path, kinds):
    modules(tmp_path, *kinds)
    with pytest.raises(CheckpointError, match=" -> ".join(kinds)):
        classifier(tmp_path, "bert")
    modules(tmp_path, "Transformer")
    assert classifier(tmp_path, "bert").output == "classifier"


def test_logit_score_must_come_straight_after_the_model(tmp_path):
    modules(tmp_path, "Transformer", "Dense", "LogitScore")
    with pytest.raises(CheckpointError, match="Transformer -> Dense -> LogitScore"):
        read_score_spec(tmp_path, config_of(tmp_path, architectures=["Qwen3ForCausalLM"]))


def test_a_family_without_a_known_head_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no classification head for 'bidirectional_pplx_qwen3'"):
        classifier(tmp_path, "bidirectional_pplx_qwen3")


def random_head(spec: ClassifierSpec) -> ScoringHead:
    torch.manual_seed(3)
    head = ScoringHead(spec, WIDTH)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    return head


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("pooling", ["cls", "mean", "lasttoken"])
def test_the_head_is_dense_activation_norm_output(pooling, in_graph):
    spec = ClassifierSpec(
        pooling, 3, "classifier", dense="head.dense", activation="gelu", norm="head.norm", norm_bias=False
    )
    head, lengths = random_head(spec), [2, 1, 4]
    hidden_TD = torch.randn(7, WIDTH, dtype=torch.bfloat16)
    rows = head(hidden_TD, ragged(lengths, in_graph))
    assert (rows.dtype, rows.shape) == (torch.float32, (3, 3))
    for row, states in zip(rows, hidden_TD.float().split(lengths), strict=True):
        pooled = {"cls": states[0], "mean": states.mean(0), "lasttoken": states[-1]}[pooling]
        wanted = head.output(head.norm(nn.functional.gelu(head.dense(pooled))))
        torch.testing.assert_close(row, wanted, atol=1e-5, rtol=1e-5)
