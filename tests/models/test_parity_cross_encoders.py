"""Scorers of every kind against transformers, with the same random weights: logits in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rose_engine.batch import Batch, Sequence
from rose_engine.config import EngineConfig
from rose_engine.engine import Engine
from rose_engine.errors import CheckpointError, EngineConfigError
from tests.models.parity import assert_rows_close, edit_config, randomize

VOCABULARY, MAX_POSITIONS = 97, 42
LENGTHS = (1, 7, 33, 2, 40, 7)
SEGMENTED = ("Bert", "Gte", "NomicBert")

ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 1,
}
DECODER = ENCODER | {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
DISENTANGLED = {
    "type_vocab_size": 0,
    "relative_attention": True,
    "share_att_key": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 16,
    "position_biased_input": False,
}
SMALL_WINDOW = {"local_attention": 8, "global_attn_every_n_layers": 2, "eos_token_id": 2, "cls_token_id": 2}
KINDS = {
    "Bert": ENCODER,
    "Roberta": ENCODER | {"type_vocab_size": 1},
    "XLMRoberta": ENCODER | {"type_vocab_size": 1},
    "Camembert": ENCODER | {"type_vocab_size": 1},
    "DistilBert": {
        "vocab_size": VOCABULARY,
        "dim": 48,
        "hidden_dim": 80,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": MAX_POSITIONS,
    },
    "MPNet": ENCODER,
    "ModernBert": ENCODER | SMALL_WINDOW | {"classifier_pooling": "cls"},
    "DebertaV2": ENCODER | DISENTANGLED,
    "Gte": ENCODER | {"type_vocab_size": 2},
    "NomicBert": ENCODER | {"type_vocab_size": 2},
    "Qwen2": DECODER,
    "Qwen3": DECODER,
    "Mistral": DECODER,
    "Llama": DECODER,
    "Gemma3Text": DECODER | {"sliding_window": 8, "query_pre_attn_scalar": 16},
}


def tiny(kind: str, **changes: object) -> PreTrainedModel:
    config = getattr(transformers, f"{kind}Config")(**(KINDS[kind] | changes))
    return randomize(getattr(transformers, f"{kind}ForSequenceClassification")(config))


def tiny_language_model(**changes: object) -> Qwen3ForCausalLM:
    return randomize(Qwen3ForCausalLM(Qwen3Config(**(DECODER | changes))))


def random_sequences(*, segments: bool) -> list[Sequence]:
    """Sequences of LENGTHS; with `segments` each is split somewhere, as a pair of texts is."""
    generator = np.random.default_rng(5)
    sequences = []
    for length in LENGTHS:
        ids = generator.integers(3, VOCABULARY, length, dtype=np.int32)
        border = int(generator.integers(0, length + 1))
        segment_ids = (np.arange(length) >= border).astype(np.int32) if segments else None
        sequences.append(Sequence(ids, segment_ids))
    return sequences


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, sequences: list[Sequence]) -> torch.Tensor:
    """One sequence at a time, so without padding; of a language model, those of the last position."""
    rows = []
    for item in sequences:
        inputs = {"input_ids": torch.from_numpy(item.token_ids).long()[None]}
        if item.segment_ids is not None:
            inputs["token_type_ids"] = torch.from_numpy(item.segment_ids).long()[None]
        logits = model(**inputs).logits
        rows.append(logits[0, -1] if logits.dim() == 3 else logits[0])
    return torch.stack(rows)


def our_logits(folder: Path, sequences: list[Sequence], **settings: object) -> torch.Tensor:
    engine = Engine.load(EngineConfig(folder, device="cpu", threads=1, **settings))
    try:
        assert engine.description.task == "score"
        rows = engine.step(Batch.pack(sequences)).result()
        assert rows.dtype == np.float32
        assert rows.shape == (len(sequences), engine.description.dimensions)
        return torch.from_numpy(rows.copy())
    finally:
        engine.close()


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def write(folder: Path, name: str, content: object) -> None:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("num_labels", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_classification_logits(tmp_path: Path, kind: str, num_labels: int):
    model = tiny(kind, num_labels=num_labels)
    sequences = random_sequences(segments=kind in SEGMENTED)
    got = our_logits(saved(model, tmp_path), sequences)
    assert_rows_close(got.T, reference_logits(model, sequences).T)


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_modernbert_heads(tmp_path: Path, pooling: str, biases: bool):
    model = tiny(
        "ModernBert", num_labels=1, classifier_pooling=pooling, classifier_bias=biases, norm_bias=biases
    )
    sequences = random_sequences(segments=False)
    got = our_logits(saved(model, tmp_path), sequences)
    assert_rows_close(got.T, reference_logits(model, sequences).T)


def test_segments_move_the_logit(tmp_path: Path):
    sequences = random_sequences(segments=True)
    unsegmented = [Sequence(item.token_ids) for item in sequences]
    folder = saved(tiny("Bert", num_labels=1), tmp_path)
    difference = our_logits(folder, sequences) - our_logits(folder, unsegmented)
    assert difference.abs().max() > 1e-2


def test_a_pair_does_not_depend_on_its_neighbours(tmp_path: Path):
    folder, sequences = saved(tiny("XLMRoberta", num_labels=1), tmp_path), random_sequences(segments=False)
    together = our_logits(folder, sequences)
    alone = torch.cat([our_logits(folder, [item]) for item in sequences])
    assert_rows_close(together.T, alone.T, tolerance=5e-6)


def test_the_head_stays_float32_under_a_bfloat16_trunk(tmp_path: Path):
    """Scores near each other must not be rounded to the same value."""
    model, sequences = tiny("Bert", num_labels=1), random_sequences(segments=True)
    rows = our_logits(saved(model, tmp_path), sequences, dtype="bfloat16")
    assert not torch.equal(rows, rows.bfloat16().float())


def test_the_number_of_labels_is_checked_against_the_weights(tmp_path: Path):
    folder = saved(tiny("Roberta", num_labels=3), tmp_path)
    edit_config(folder, id2label={"0": "a", "1": "b"}, num_labels=None)
    with pytest.raises(CheckpointError, match=r"output\.weight: shape \(3, 48\)"):
        Engine.load(EngineConfig(folder, device="cpu"))


def test_a_folder_without_its_head_is_refused(tmp_path: Path):
    transformers.BertModel(transformers.BertConfig(**ENCODER)).save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["BertForSequenceClassification"])
    with pytest.raises(CheckpointError, match=r"output\.weight is missing"):
        Engine.load(EngineConfig(tmp_path, device="cpu"))


# Language models that answer yes or no.

YES, NO = 55, 21
TOKENIZER = {"model": {"type": "BPE", "vocab": {"no": NO, "yes": YES, "other": 3}}}


def yes_less_no(model: Qwen3ForCausalLM, sequences: list[Sequence]) -> torch.Tensor:
    logits = reference_logits(model, sequences)
    return logits[:, YES, None] - logits[:, NO, None]


def signal_logit_score(folder: Path) -> None:
    name = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    write(folder, "1_LogitScore/config.json", {"true_token_id": YES, "false_token_id": NO})
    first = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.models.Transformer"}
    write(folder, "modules.json", [first, {"idx": 1, "name": "1", "path": "1_LogitScore", "type": name}])


def signal_words(folder: Path) -> None:
    write(folder, "tokenizer.json", TOKENIZER)
    edit_config(folder, classifier_from_token=["no", "yes"], architectures=["Qwen3ForSequenceClassification"])


def signal_metadata(folder: Path) -> None:
    write(folder, "tokenizer.json", TOKENIZER)
    write(folder, "config_sentence_transformers.json", {"model_type": "CrossEncoder"})


@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied"])
@pytest.mark.parametrize("signal", [signal_logit_score, signal_words, signal_metadata])
def test_language_model_scores(tmp_path: Path, signal, tied: bool):
    model, sequences = tiny_language_model(tie_word_embeddings=tied), random_sequences(segments=False)
    signal(saved(model, tmp_path))
    got = our_logits(tmp_path, sequences)
    assert_rows_close(got.T, yes_less_no(model, sequences).T)


def test_the_score_is_the_probability_of_yes_against_no(tmp_path: Path):
    """As the model card computes it: softmax over the two logits."""
    model, sequences = tiny_language_model(), random_sequences(segments=False)
    write(saved(model, tmp_path), "tokenizer.json", TOKENIZER)
    scores = torch.sigmoid(our_logits(tmp_path, sequences, task="score"))
    two = reference_logits(model, sequences)[:, [NO, YES]]
    torch.testing.assert_close(scores[:, 0], two.softmax(dim=1)[:, 1], atol=1e-5, rtol=0)


def test_without_a_false_token_the_logit_stands_alone(tmp_path: Path):
    model, sequences = tiny_language_model(), random_sequences(segments=False)
    signal_logit_score(saved(model, tmp_path))
    write(tmp_path, "1_LogitScore/config.json", {"true_token_id": YES, "false_token_id": None})
    wanted = reference_logits(model, sequences)[:, YES, None]
    assert_rows_close(our_logits(tmp_path, sequences).T, wanted.T)


def test_an_unstated_tie_follows_the_weights(tmp_path: Path):
    model, sequences = tiny_language_model(tie_word_embeddings=True), random_sequences(segments=False)
    signal_logit_score(saved(model, tmp_path))
    edit_config(tmp_path, tie_word_embeddings=None)
    assert_rows_close(our_logits(tmp_path, sequences).T, yes_less_no(model, sequences).T)


def test_a_converted_copy_scores_as_its_original(tmp_path: Path):
    """One fused row stored as `score.weight`, the form in which classifiers are passed around."""
    original, sequences = tiny_language_model(), random_sequences(segments=False)
    copy = tiny("Qwen3", num_labels=1)
    copy.model.load_state_dict(original.model.state_dict())
    rows = original.lm_head.weight.detach()
    copy.score.weight.data.copy_(rows[YES, None] - rows[NO, None])
    got = our_logits(saved(copy, tmp_path), sequences)
    assert_rows_close(got.T, yes_less_no(original, sequences).T)


def test_a_language_model_without_a_signal_embeds(tmp_path: Path):
    write(saved(tiny_language_model(), tmp_path), "tokenizer.json", TOKENIZER)
    hashes = set()
    for task in ("auto", "embed", "score"):
        engine = Engine.load(EngineConfig(tmp_path, task=task, device="cpu", threads=1))
        engine.close()
        assert engine.description.task == ("score" if task == "score" else "embed")
        hashes.add(engine.description.weights_hash)
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda f: edit_config(f, final_logit_softcapping=30.0), "final_logit_softcapping"),
        (lambda f: write(f, "1_LogitScore/config.json", {"true_token_id": VOCABULARY}), "none numbered 97"),
        (lambda f: write(f, "1_LogitScore/config.json", {}), "true_token_id is missing"),
    ],
    ids=["softcapping", "id-outside", "no-id"],
)
def test_language_model_heads_that_are_refused(tmp_path: Path, spoil, named: str):
    signal_logit_score(saved(tiny_language_model(), tmp_path))
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=named):
        Engine.load(EngineConfig(tmp_path, device="cpu"))


def test_tasks_that_cannot_be_had(tmp_path: Path):
    folder = tmp_path / "bert"
    transformers.BertModel(transformers.BertConfig(**ENCODER)).save_pretrained(folder)
    with pytest.raises(EngineConfigError, match="'rank'"):
        Engine.load(EngineConfig(folder, task="rank", device="cpu"))
    with pytest.raises(CheckpointError, match="no scoring head"):
        Engine.load(EngineConfig(folder, task="score", device="cpu"))
    folder = saved(tiny_language_model(), tmp_path / "words")
    write(folder, "tokenizer.json", {"model": {"vocab": {"yes": 1}}})
    with pytest.raises(CheckpointError, match="'no' is not in the vocabulary"):
        Engine.load(EngineConfig(folder, task="score", device="cpu"))
