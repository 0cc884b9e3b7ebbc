"""A pplx-embed model as it is published, but tiny and random, and what transformers makes of ids with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3Model

from tests.models.parity import edit_config, randomize, save

DIMENSIONS = 48
MAX_LENGTH = 128
SEPARATOR = 256  # the id of the one special token, behind those of 256 bytes
_MODULES = ("sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling")


def reference_model(seed: int = 11) -> Qwen3Model:
    config = Qwen3Config(
        vocab_size=257,
        hidden_size=DIMENSIONS,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    model = randomize(Qwen3Model(config))
    model.norm.weight.data.mul_(0.4)  # pooled values of which tanh leaves something
    return model


def write_folder(model: Qwen3Model, folder: Path) -> Path:
    """The model's files, with a tokenizer whose ids are bytes, in its own order."""
    save(model, folder)
    edit_config(
        folder,
        model_type="bidirectional_pplx_qwen3",
        architectures=["PPLXQwen3Model"],
        auto_map={"AutoModel": "modeling.PPLXQwen3Model"},
        use_bidirectional_attention=True,
    )
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": _MODULES[0]},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": _MODULES[1]},
        {
            "idx": 2,
            "name": "2",
            "path": "",
            "type": "st_quantize.FlexibleQuantizer",
            "kwargs": ["quantization"],
        },
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (folder / "st_quantize.py").write_text("raise SystemExit('checkpoint code was run')")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_contextual_folder(model: Qwen3Model, folder: Path) -> Path:
    """The same as a contextual model: its own code's name, and a separator that is its padding too."""
    write_folder(model, folder)
    edit_config(
        folder,
        architectures=["PPLXQwen3ContextualModel"],
        auto_map={"AutoModel": "modeling.PPLXQwen3ContextualModel"},
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<|endoftext|>"}))
    return folder


@torch.inference_mode()
def states(model: Qwen3Model, token_ids: Sequence[int]) -> torch.Tensor:
    """Hidden states `[T, D]` of tokens each of which sees all others."""
    visible = {"full_attention": torch.zeros(1, 1, len(token_ids), len(token_ids))}
    return model(torch.tensor(token_ids).long()[None], visible).last_hidden_state[0]


def pooled_values(model: Qwen3Model, ids: Sequence[Sequence[int]]) -> np.ndarray:
    """Mean over all tokens, before quantisation: float32 `[N, D]`."""
    return np.stack([states(model, token_ids).mean(0).numpy() for token_ids in ids])


def document_ids(chunks: Sequence[Sequence[int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """A document's ids, its chunks joined by the separator, and where each chunk starts and ends."""
    ids: list[int] = []
    spans = []
    for chunk in chunks:
        ids += [SEPARATOR] if ids else []
        spans.append((len(ids), len(ids) + len(chunk)))
        ids += chunk
    return ids, spans


def chunk_values(model: Qwen3Model, chunks: Sequence[Sequence[int]]) -> np.ndarray:
    """Mean over each chunk of one document, all of which is visible, before quantisation: `[chunks, D]`."""
    ids, spans = document_ids(chunks)
    states_TD = states(model, ids)
    return np.stack([states_TD[start:end].mean(0).numpy() for start, end in spans])


def assert_codes(codes: np.ndarray, values: np.ndarray) -> None:
    """Codes are round(127 tanh x), but for values on the edge between two codes."""
    exact = 127 * np.tanh(values)
    clear = np.abs(exact - np.floor(exact) - 0.5) > 1e-2
    assert clear.mean() > 0.9
    assert np.array_equal(codes[clear], np.round(exact)[clear])
    assert np.abs(codes - np.round(exact)).max() <= 1


def assert_bits(bits: np.ndarray, values: np.ndarray, bitorder: str = "big") -> None:
    """Packed bits are x >= 0, but for values next to zero."""
    unpacked = np.unpackbits(bits.astype(np.uint8), axis=1, bitorder=bitorder).astype(bool)
    decided = np.abs(values) > 1e-5
    assert np.array_equal(unpacked[decided], (values >= 0)[decided])
