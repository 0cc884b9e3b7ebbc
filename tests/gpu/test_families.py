"""Every family on the card, in every dtype it allows, against the same folder in float32 on the CPU.

The CPU's rows are compared with the reference library's in tests/models.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rose_engine.batch import Batch, Sequence
from rose_engine.config import EngineConfig
from rose_engine.engine import Engine
from rose_engine.errors import EngineConfigError
from tests.models.parity import random_ids, randomize

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

VOCABULARY, POSITIONS = 200, 600
LENGTHS = (9, 2, 400, 9, 1, 64, 130)
ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": POSITIONS,
}
DECODER = ENCODER | {"num_key_value_heads": 2, "head_dim": 32}
FAMILIES = {
    "bert": ("Bert", ENCODER),
    "xlm-roberta": ("XLMRoberta", ENCODER | {"type_vocab_size": 1}),
    "qwen3": ("Qwen3", DECODER),
    "pplx": ("Qwen3", DECODER),
    "qwen2": ("Qwen2", DECODER),
    "llama": ("Llama", DECODER),
    "mistral": ("Mistral", DECODER | {"sliding_window": 50}),
    "gemma3": ("Gemma3Text", DECODER | {"sliding_window": 50, "query_pre_attn_scalar": 32}),
    "modernbert": ("ModernBert", ENCODER | {"local_attention": 32, "pad_token_id": 0}),
    "mpnet": ("MPNet", ENCODER),
}
LEAST_COSINE = {"bfloat16": 0.999, "float16": 0.9999, "float32": 0.999999}
FLOAT16_OVERFLOWS = {"pplx", "gemma3"}


def written(family: str, folder: Path) -> Path:
    """A random model of the family, as its library saves it."""
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**settings)
    randomize(getattr(transformers, f"{name}Model")(config)).save_pretrained(folder)
    if family == "pplx":
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "bidirectional_pplx_qwen3"}))
    return folder


def rows(folder: Path, device: str, dtype: str, attention: str = "sdpa") -> list[torch.Tensor]:
    """The rows of three steps in a row: eager, captured, replayed."""
    engine = Engine.load(EngineConfig(folder, device=device, dtype=dtype, attention=attention))
    try:
        batch = Batch.pack(Sequence(ids) for ids in random_ids(LENGTHS, VOCABULARY))
        return [torch.from_numpy(engine.step(batch).result().copy()).float() for _ in range(3)]
    finally:
        engine.close()


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("dtype", LEAST_COSINE)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_agree_with_the_cpus(family: str, dtype: str, tmp_path: Path):
    folder = written(family, tmp_path)
    biased = family == "mpnet"  # only the reference backend adds a bias to the scores
    attention = "sdpa" if biased or dtype == "float32" else "fa2"
    if dtype == "float16" and family in FLOAT16_OVERFLOWS:
        with pytest.raises(EngineConfigError, match="float16 overflows"):
            rows(folder, "cuda:0", dtype, attention)
        return
    wanted = rows(folder, "cpu", "float32")[0]
    for found in rows(folder, "cuda:0", dtype, attention):
        assert torch.cosine_similarity(found, wanted, dim=1).min() >= LEAST_COSINE[dtype]
