"""Model folders of true shapes with seeded random weights, for machines where no weights can be had.

    python -m benchmarks.random_folders SHAPE FOLDER [--tokenizer FILE] [--seed 0]

Those of encoders are ordinary sentence-transformers folders; those of scorers hold what transformers'
sequence classifiers load. Every server and library reads them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # settings alone are written without waiting for torch
    import torch
    from torch import Tensor

Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class FolderShape:
    """What a folder says of itself; weights follow from `config`."""

    config: dict[str, Any]
    pooling: str | None  # None: a scorer, whose head is among the weights
    max_length: int

    def as_scorer(self, architecture: str, pad_token_id: int) -> FolderShape:
        """The same trunk under a head with one label, which pools the last token that is not padding."""
        head = {"architectures": [architecture], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        config = {**self.config, **head, "pad_token_id": pad_token_id}
        return FolderShape(config, None, self.max_length)


SHAPES: dict[str, FolderShape] = {
    "qwen3-0.6b": FolderShape(
        {
            "architectures": ["Qwen3Model"],
            "model_type": "qwen3",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_669,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        pooling="lasttoken",
        max_length=8192,
    ),
    "minilm": FolderShape(
        {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "vocab_size": 30_522,
            "type_vocab_size": 2,
            "max_position_embeddings": 512,
            "layer_norm_eps": 1e-12,
            "hidden_act": "gelu",
            "pad_token_id": 0,
        },
        pooling="mean",
        max_length=512,
    ),
}
SHAPES["qwen3-0.6b-score"] = SHAPES["qwen3-0.6b"].as_scorer("Qwen3ForSequenceClassification", 151_643)


def tensor_shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of a checkpoint with this `config`."""
    trunk = {"qwen3": _qwen3_shapes, "bert": _bert_shapes}[config["model_type"]](config)
    if config["architectures"][0] != "Qwen3ForSequenceClassification":
        yield from trunk
        return
    yield from (("model." + name, shape) for name, shape in trunk)
    yield "score.weight", (len(config["id2label"]), config["hidden_size"])


def _qwen3_shapes(config: dict[str, Any]) -> Shapes:
    D, inner, H = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    N, M = config["num_attention_heads"], config["num_key_value_heads"]
    yield "embed_tokens.weight", (config["vocab_size"], D)
    for layer in (f"layers.{i}." for i in range(config["num_hidden_layers"])):
        yield layer + "input_layernorm.weight", (D,)
        yield layer + "post_attention_layernorm.weight", (D,)
        yield from ((f"{layer}self_attn.{name}_norm.weight", (H,)) for name in "qk")
        yield layer + "self_attn.q_proj.weight", (N * H, D)
        yield from ((f"{layer}self_attn.{name}_proj.weight", (M * H, D)) for name in "kv")
        yield layer + "self_attn.o_proj.weight", (D, N * H)
        yield from ((f"{layer}mlp.{name}_proj.weight", (inner, D)) for name in ("gate", "up"))
        yield layer + "mlp.down_proj.weight", (D, inner)
    yield "norm.weight", (D,)


def _bert_shapes(config: dict[str, Any]) -> Shapes:
    D, inner = config["hidden_size"], config["intermediate_size"]
    yield "embeddings.word_embeddings.weight", (config["vocab_size"], D)
    yield "embeddings.position_embeddings.weight", (config["max_position_embeddings"], D)
    yield "embeddings.token_type_embeddings.weight", (config["type_vocab_size"], D)
    yield from _norm_and_bias("embeddings.LayerNorm", D)
    for layer in (f"encoder.layer.{i}." for i in range(config["num_hidden_layers"])):
        for name in (
            "attention.self.query",
            "attention.self.key",
            "attention.self.value",
            "attention.output.dense",
        ):
            yield from _matrix_and_bias(layer + name, D, D)
        yield from _matrix_and_bias(layer + "intermediate.dense", inner, D)
        yield from _matrix_and_bias(layer + "output.dense", D, inner)
        yield from _norm_and_bias(layer + "attention.output.LayerNorm", D)
        yield from _norm_and_bias(layer + "output.LayerNorm", D)


def _matrix_and_bias(name: str, rows: int, columns: int) -> Shapes:
    yield name + ".weight", (rows, columns)
    yield name + ".bias", (rows,)


def _norm_and_bias(name: str, width: int) -> Shapes:
    yield name + ".weight", (width,)
    yield name + ".bias", (width,)


def random_tensors(config: dict[str, Any], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Matrices of standard deviation 0.02, norm weights around 1, biases around 0."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def values(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        is_norm = "norm" in name.lower() and name.endswith(".weight")
        return (1 + 0.1 * noise if is_norm else 0.02 * noise).to(dtype)

    return {name: values(name, shape) for name, shape in tensor_shapes(config)}


def write_folder(folder: Path, shape: FolderShape, seed: int = 0, tokenizer: Path | None = None) -> None:
    """Write the folder; an existing one is overwritten file by file."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, shape.config.get("torch_dtype", "float32"))
    save_file(random_tensors(shape.config, seed, dtype), folder / "model.safetensors", {"format": "pt"})
    write_settings(folder, shape)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")


def write_settings(folder: Path, shape: FolderShape) -> None:
    """Everything but weights and tokenizer: all that a gateway reads of a model."""
    files: dict[str, Any] = {
        "config.json": shape.config,
        "sentence_bert_config.json": {"max_seq_length": shape.max_length, "do_lower_case": False},
    }
    if shape.pooling is not None:
        files |= _pooling_modules(shape.config["hidden_size"], shape.pooling)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _pooling_modules(width: int, pooling: str) -> dict[str, Any]:
    """The chain of sentence-transformers: trunk, pooling, unit length."""
    modules = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    return {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(modules)
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": width, "pooling_mode": pooling},
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json to put beside the weights")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_folder(args.folder, SHAPES[args.shape], args.seed, args.tokenizer)
    print(f"{args.shape}, seed {args.seed}: written to {args.folder}")


if __name__ == "__main__":
    main()
