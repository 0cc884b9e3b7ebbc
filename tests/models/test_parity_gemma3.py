"""Gemma 3 trunks against `transformers.Gemma3TextModel`, and a whole folder in EmbeddingGemma's shape."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3TextConfig, Gemma3TextModel, PreTrainedTokenizerFast

from rose_engine.batch import Batch, Sequence
from rose_engine.config import EngineConfig
from rose_engine.engine import Engine
from rose_engine.errors import CheckpointError, EngineConfigError
from rose_engine.models.decoder_config import CAUSAL, FULL
from rose_engine.models.gemma3 import gemma3_facts
from rose_engine.settings_file import SettingsFile
from tests.models.decoder_parity import (
    MAX_LENGTH,
    RAGGED,
    SIZES,
    VOCABULARY,
    assert_parity,
    assert_prefix_and_head_do_not_matter,
    assert_saved_parity,
    assert_spare_tokens_change_nothing,
    first_token_sees_last,
)
from tests.models.parity import assert_rows_close, edit_config, load_trunk, random_ids, randomize, run_trunk

WINDOW = 8
ROTATIONS = {
    "full_attention": {"rope_type": "default", "rope_theta": 50_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}


def tiny(**changes: object) -> Gemma3TextModel:
    """By default as EmbeddingGemma: to both sides, with a full layer among sliding ones."""
    settings = {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 20,
        "use_bidirectional_attention": True,
        "rope_parameters": {kind: dict(rotation) for kind, rotation in ROTATIONS.items()},
    }
    model = randomize(Gemma3TextModel(Gemma3TextConfig(**(SIZES | settings | changes))))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data -= 1  # these are distances from one
    return model


@pytest.fixture(scope="module")
def reference() -> Gemma3TextModel:
    return tiny()


@pytest.fixture
def folder(reference: Gemma3TextModel, tmp_path: Path) -> Path:
    reference.save_pretrained(tmp_path)
    return tmp_path


def windows_of(folder: Path) -> set[tuple[int, int]]:
    facts = gemma3_facts(SettingsFile.read(folder / "config.json"))
    return {spec.window for spec in facts.attention_specs}


@pytest.mark.parametrize("lengths", [*RAGGED, (4, 5, 6, WINDOW, WINDOW + 1)], ids=str)
def test_hidden_states(reference: Gemma3TextModel, folder: Path, lengths: tuple[int, ...]):
    assert_parity(reference, folder, lengths)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_bidirectional_attention": False},
        {"sliding_window": 7},
        {"sliding_window": 512},
        {"num_attention_heads": 3, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
        {"layer_types": ["full_attention"] * 4},
        {"layer_types": ["sliding_attention", "full_attention"] * 2},
        {"attention_bias": True},
        {
            "rope_parameters": ROTATIONS
            | {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4}}
        },
    ],
    ids=str,
)
def test_variants(tmp_path: Path, changes: dict[str, object]):
    assert_saved_parity(tiny(**changes), tmp_path)


def test_the_old_layout(reference: Gemma3TextModel, folder: Path):
    """Two bases as two keys, the kinds of layers as a period, defaults left out."""
    (ids,) = random_ids((MAX_LENGTH,), VOCABULARY)
    (new,) = run_trunk(load_trunk(folder), [ids])
    edit_config(
        folder,
        rope_parameters=None,
        layer_types=None,
        sliding_window_pattern=3,
        rope_theta=50_000.0,
        rope_local_base_freq=300.0,
    )
    assert torch.equal(run_trunk(load_trunk(folder), [ids])[0], new)
    scaling = {"rope_type": "linear", "factor": 8.0}  # of the full layers' basis only
    edit_config(folder, rope_theta=None, rope_local_base_freq=None, rope_scaling=scaling)
    (defaults,) = run_trunk(load_trunk(folder), [ids])
    with torch.inference_mode():
        wanted = Gemma3TextModel.from_pretrained(folder)(torch.from_numpy(ids).long()[None])
    assert_rows_close(defaults, wanted.last_hidden_state[0])


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({}, {FULL, (4, 4)}),  # as published: half of the window to each side
        ({"sliding_window": 7}, {FULL, (3, 3)}),
        ({"use_bidirectional_attention": False}, {CAUSAL, (7, 0)}),
        ({"use_bidirectional_attention": None, "sliding_window": None}, {CAUSAL}),  # 4,096 fits all
        ({"sliding_window": 512}, {FULL}),
    ],
    ids=str,
)
def test_windows(folder: Path, values: dict[str, object], windows: set[tuple[int, int]]):
    edit_config(folder, **values)
    assert windows_of(folder) == windows


def test_who_sees_whom(folder: Path):
    assert first_token_sees_last(load_trunk(folder), 30)
    edit_config(folder, layer_types=["sliding_attention"] * 4)
    assert first_token_sees_last(load_trunk(folder), 4 * WINDOW // 2 + 1)
    assert not first_token_sees_last(load_trunk(folder), 4 * WINDOW // 2 + 2)


def test_names_of_tensors(reference: Gemma3TextModel, tmp_path: Path):
    assert_prefix_and_head_do_not_matter(reference, tmp_path)


def test_spare_tokens_and_empty_slots_change_nothing(folder: Path):
    assert_spare_tokens_change_nothing(load_trunk(folder))


def test_bfloat16_keeps_norms_exact(folder: Path):
    ids = random_ids((5, 64, 1, 30), VOCABULARY)
    exact = torch.cat(run_trunk(load_trunk(folder), ids))
    trunk = load_trunk(folder, torch.bfloat16)
    rounded = torch.cat(run_trunk(trunk, ids))
    assert rounded.dtype == torch.bfloat16
    assert trunk.decoder.norm.weight.dtype == torch.float32
    assert torch.cosine_similarity(rounded.float(), exact, dim=1).min() > 0.999


def test_float16_is_refused(folder: Path):
    with pytest.raises(EngineConfigError, match=r"float16.*bfloat16 or float32"):
        load_trunk(folder, torch.float16)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
        ({"use_bidirectional_attention": "vision"}, "use_bidirectional_attention"),
    ],
)
def test_variants_are_refused_by_name(folder: Path, values: dict[str, object], named: str):
    edit_config(folder, **values)
    with pytest.raises(CheckpointError, match=named):
        windows_of(folder)


WORDS = [f"w{number}" for number in range(VOCABULARY - 2)]


@pytest.fixture
def embedder(reference: Gemma3TextModel, tmp_path: Path) -> Path:
    """Transformer, mean pooling, two Dense modules without bias or activation, normalisation."""
    trunk_folder, folder = tmp_path / "trunk", tmp_path / "embedder"
    reference.save_pretrained(trunk_folder)
    vocabulary = {"<pad>": 0, "<unk>": 1} | {word: index for index, word in enumerate(WORDS, 2)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", model_max_length=MAX_LENGTH
    ).save_pretrained(trunk_folder)
    torch.manual_seed(3)
    transformer = Transformer(str(trunk_folder), max_seq_length=MAX_LENGTH)
    modules = [
        transformer,
        Pooling(48, pooling_mode="mean"),
        Dense(48, 96, bias=False, activation_function=torch.nn.Identity()),
        Dense(96, 32, bias=False, activation_function=torch.nn.Identity()),
        Normalize(),
    ]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)
    return folder


def test_a_folder_in_the_shape_of_embeddinggemma(embedder: Path):
    """Its vectors are sentence-transformers' own, Dense modules included."""
    kinds = [m["type"].rpartition(".")[2] for m in json.loads((embedder / "modules.json").read_text())]
    assert kinds == ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    ids = random_ids((1, 7, MAX_LENGTH, 30, 2), VOCABULARY)
    texts = [" ".join(WORDS[i - 2] for i in token_ids) for token_ids in ids]
    wanted = SentenceTransformer(str(embedder), device="cpu").encode(texts)
    engine = Engine.load(EngineConfig(embedder, device="cpu", threads=1))
    try:
        rows = engine.step(Batch.pack(Sequence(token_ids) for token_ids in ids)).result()
    finally:
        engine.close()
    assert rows.shape == wanted.shape == (5, 32)
    np.testing.assert_allclose(rows, wanted, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
