"""Every family on the card, in every dtype it allows, against the same folder in float32 on the CPU.

The CPU's rows are compared with the reference library's in tests/models.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rose_engine.batch import Sequence
from tests.gpu.engine_rows import (
    LEAST_COSINE,
    assert_float16_is_refused,
    assert_same_direction,
    backend,
    rows,
)
from tests.models.parity import edit_config, random_ids, randomize

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
DISTILLED = {
    "vocab_size": VOCABULARY,
    "dim": 128,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 256,
    "max_position_embeddings": POSITIONS,
}
DISENTANGLED = {
    "type_vocab_size": 0,
    "relative_attention": True,
    "share_att_key": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 32,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
FAMILIES = {
    "bert": ("Bert", ENCODER),
    "xlm-roberta": ("XLMRoberta", ENCODER | {"type_vocab_size": 1}),
    "roberta": ("Roberta", ENCODER | {"type_vocab_size": 1}),
    "camembert": ("Camembert", ENCODER | {"type_vocab_size": 1}),
    "distilbert": ("DistilBert", DISTILLED),
    "qwen3": ("Qwen3", DECODER),
    "pplx": ("Qwen3", DECODER),
    "qwen2": ("Qwen2", DECODER),
    "llama": ("Llama", DECODER),
    "mistral": ("Mistral", DECODER | {"sliding_window": 50}),
    "gemma3": ("Gemma3Text", DECODER | {"sliding_window": 50, "query_pre_attn_scalar": 32}),
    "modernbert": ("ModernBert", ENCODER | {"local_attention": 32, "pad_token_id": 0}),
    "mpnet": ("MPNet", ENCODER),
    "nomic_bert": ("NomicBert", ENCODER | ROTARY),
    "gte": ("Gte", ENCODER | ROTARY),
    "new": ("Gte", ENCODER | ROTARY),
    "deberta-v2": ("DebertaV2", ENCODER | DISENTANGLED),
}
# What the published files say where transformers says something else.
PUBLISHED = {
    "pplx": {"model_type": "bidirectional_pplx_qwen3"},
    "new": {
        "model_type": "new",
        "rope_parameters": None,
        "rope_theta": 500.0,
        "rope_scaling": {"type": "ntk", "factor": 2.0},
    },
}
BIASED = {"mpnet", "deberta-v2"}  # only the reference backend adds a bias to the scores
FLOAT16_OVERFLOWS = {"pplx", "gemma3"}


def written(family: str, folder: Path) -> Path:
    """A random model of the family, as its library saves it."""
    name, settings = FAMILIES[family]
    if not hasattr(transformers, f"{name}Model"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}Model")
    config = getattr(transformers, f"{name}Config")(**settings)
    randomize(getattr(transformers, f"{name}Model")(config)).save_pretrained(folder)
    edit_config(folder, **PUBLISHED.get(family, {}))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("dtype", LEAST_COSINE)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_agree_with_the_cpus(family: str, dtype: str, tmp_path: Path):
    folder = written(family, tmp_path)
    sequences = [Sequence(ids) for ids in random_ids(LENGTHS, VOCABULARY)]
    if dtype == "float16" and family in FLOAT16_OVERFLOWS:
        assert_float16_is_refused(folder, sequences)
        return
    (wanted, *_) = rows(folder, sequences, "cpu", "float32")
    for found in rows(folder, sequences, "cuda:0", dtype, backend(dtype, biased=family in BIASED)):
        assert_same_direction(found, wanted, dtype)
