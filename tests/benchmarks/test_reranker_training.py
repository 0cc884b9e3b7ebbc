"""A training run from end to end on a tiny random base, and the folder that it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from benchmarks.reranker_training import (
    RECIPES,
    PairEncoder,
    Recipe,
    Run,
    Settings,
    Trainer,
    TrainingRecord,
    export_base,
)
from benchmarks.training_groups import Group
from benchmarks.xquad import Xquad

WORDS = [f"w{i}" for i in range(60)]
TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A random bi-encoder with a word of its own for each number."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(3)
    transformers.BertModel(transformers.BertConfig(**TINY)).save_pretrained(folder)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "?", ".", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data() -> Xquad:
    """Ten articles of two passages, each with two questions made of its words."""
    generator = np.random.default_rng(1)
    passages = [" ".join(generator.choice(WORDS, 8, replace=False)) for _ in range(20)]
    questions = [" ".join(passages[i // 2].split()[i % 2 :: 2]) + "?" for i in range(40)]
    answers = tuple(i // 2 for i in range(40))
    return Xquad(tuple(passages), tuple(questions), answers, (0,) * 40, tuple(i // 2 for i in range(20)))


def settings(**changes: object) -> Settings:
    usual = {"seconds": 1.0, "negatives": 3, "groups_per_step": 4, "validations": 2}
    return Settings(**(usual | changes))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    model = transformers.BertForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return model.state_dict()


def test_a_run_leaves_an_ordinary_folder_and_says_how_it_was_made(base, data, tmp_path):
    record = Run(data, str(base), settings(recipe="distilled"), "cpu", tmp_path).train()
    assert TrainingRecord.read(tmp_path) == record
    assert record.steps >= 1
    assert record.validations
    assert record.bi_encoder is not None
    saved, before = tensors(tmp_path), transformers.BertModel.from_pretrained(base).state_dict()
    assert saved["classifier.weight"].shape == (1, 32)
    assert torch.equal(
        saved["bert.embeddings.word_embeddings.weight"], before["embeddings.word_embeddings.weight"]
    )
    learnt = "encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(saved[f"bert.{learnt}"], before[learnt])


def test_without_validation_the_last_weights_are_kept(base, data, tmp_path):
    record = Run(data, str(base), settings(validations=0, save_dtype="float16"), "cpu", tmp_path).train()
    assert (record.bi_encoder, record.validations) == (None, [])
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    assert torch.isfinite(tensors(tmp_path)["classifier.weight"]).all()


def test_steps_lower_the_loss_and_the_average_follows(base, monkeypatch):
    monkeypatch.setitem(RECIPES, "fast", Recipe(learning_rate=3e-3, head_rate=1e-2, dropout=0.0))
    trainer = Trainer(str(base), settings(recipe="fast"), "cpu")
    passages = tuple((f"w{i} w{i + 1}",) for i in range(4))
    groups = [
        Group(f"w{i}", (passages[i], *(p for p in passages if p != passages[i])), (0, 1, 2, 3))
        for i in range(4)
    ]
    losses = [trainer.step(groups, torch.zeros(4, 32), progress=0.2).item() for _ in range(60)]
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    own = [trainer.averaged_logits(group.query, group.passages) for group in groups]
    assert all(logits.argmax() == 0 for logits in own)


def test_pairs_are_those_of_the_tokenizer(base):
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    encoder = PairEncoder(tokenizer)
    pairs = [("w1 w2?", ("w3 w4.", "w5.")), ("w7", ("w8 w9 w10 w11.",))]
    encoded = [encoder.pairs(query, [passage])[0] for query, passage in pairs]
    got = encoder.tensors(encoded, torch.device("cpu"))
    wanted = tokenizer(
        [q for q, _ in pairs], [" ".join(p) for _, p in pairs], padding=True, return_tensors="pt"
    )
    for name, tensor in got.items():
        assert torch.equal(tensor, wanted[name]), name


def test_long_passages_are_cut(base):
    encoder = PairEncoder(transformers.AutoTokenizer.from_pretrained(base))
    ((query, passage),) = encoder.pairs("w1 w2", [(" ".join(WORDS * 10),)])
    assert len(query) == 2
    assert len(query) + len(passage) + 3 == 384


def test_a_halved_base_has_the_same_weights_within_float16(base, tmp_path):
    export_base(str(base), tmp_path)
    wanted = transformers.BertModel.from_pretrained(base).state_dict()
    for name, tensor in transformers.BertModel.from_pretrained(tmp_path).state_dict().items():
        assert tensor.dtype == torch.float16
        torch.testing.assert_close(tensor.float(), wanted[name], rtol=1e-3, atol=1e-4)
