"""BERT against transformers on small random weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from rose_engine.batch import Batch
from rose_engine.config import EngineConfig
from rose_engine.engine import Engine
from rose_engine.errors import CheckpointError
from tests.rose_engine.samples import random_sequences

TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}


def save_bert(folder, **options):
    torch.manual_seed(0)
    model = BertModel(BertConfig(**{**TINY, **options}), add_pooling_layer=options.pop("pooler", True)).eval()
    # Fresh layers are near the identity and their biases zero: move everything so that mistakes show.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def means(model, sequences):
    """Mean hidden state of each sequence, computed one at a time."""
    rows = []
    for item in sequences:
        ids = torch.from_numpy(item.token_ids).long()[None]
        segments = None if item.segment_ids is None else torch.from_numpy(item.segment_ids).long()[None]
        with torch.inference_mode():
            rows.append(model(input_ids=ids, token_type_ids=segments).last_hidden_state[0].mean(0))
    return torch.stack(rows).numpy()


def engine_rows(folder, sequences):
    engine = Engine.load(EngineConfig(folder, device="cpu", threads=1))
    try:
        return engine.step(Batch.pack(sequences)).result()
    finally:
        engine.close()


@pytest.mark.parametrize("segments", [False, True], ids=["one-segment", "segments"])
@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu", "silu"])
def test_equals_transformers(tmp_path, act, segments):
    model = save_bert(tmp_path, hidden_act=act)
    sequences = random_sequences([7, 1, 40, 7, 13], segments=segments)
    expected = means(model, sequences)
    rows = engine_rows(tmp_path, sequences)
    assert np.abs(rows - expected).max() / np.abs(expected).max() <= 1e-5


def test_checkpoints_of_other_heads_and_old_names_load(tmp_path):
    """A `bert.` prefix, `gamma` and `beta`, position ids and a prediction head: as early checkpoints."""
    from safetensors.torch import load_file, save_file

    model = save_bert(tmp_path)
    file = tmp_path / "model.safetensors"
    old_names = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for name, t in load_file(file).items()
    }
    extra = {"bert.embeddings.position_ids": torch.arange(40)[None], "cls.predictions.bias": torch.zeros(100)}
    save_file({**old_names, **extra}, file)
    sequences = random_sequences([5, 9])
    expected = means(model, sequences)
    rows = engine_rows(tmp_path, sequences)
    assert np.abs(rows - expected).max() / np.abs(expected).max() <= 1e-5


def change_config(folder, **keys):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "bort"}, "model_type 'bort' is not supported; supported are .*bert"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is not supported"),
        ({"hidden_act": "mish"}, "activation 'mish' is not supported"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', expected int"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 4}, r"layers\.3\.attention\.qkv\.weight is missing"),
        ({"num_hidden_layers": 2}, r"no place for encoder\.layer\.2"),
        ({"vocab_size": 99}, r"embeddings\.tokens\.weight: shape \(100, 32\) in the files, \(99, 32\)"),
    ],
)
def test_a_config_that_does_not_fit_is_named(tmp_path, keys, message):
    save_bert(tmp_path)
    change_config(tmp_path, **keys)
    with pytest.raises(CheckpointError, match=message):
        Engine.load(EngineConfig(tmp_path, device="cpu"))


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: not a folder"):
        Engine.load(EngineConfig(tmp_path / "nowhere", device="cpu"))


def test_limits_and_description_follow_the_files(tmp_path):
    save_bert(tmp_path)
    engine = Engine.load(EngineConfig(tmp_path, device="cpu", threads=1))
    engine.close()
    limits, description = engine.limits, engine.description
    assert (limits.max_length, limits.vocabulary_size, limits.num_segments) == (40, 100, 2)
    assert (description.dimensions, description.pooling, description.normalized) == (32, "mean", False)
    assert (description.model_id, description.dtype, description.device) == (tmp_path.name, "float32", "cpu")
    assert description.tokenizer_file is None
