"""Model families by the `model_type` of their `config.json`, imported when asked for."""

from __future__ import annotations

from importlib import import_module

from rose_engine.errors import CheckpointError
from rose_engine.models.base import Family

# model_type -> module of this package that holds its FAMILY
FAMILY_MODULES: dict[str, str] = {
    "bert": "bert",
    "bidirectional_pplx_qwen3": "pplx",
    "camembert": "xlm_roberta",
    "deberta-v2": "deberta_v2",
    "distilbert": "distilbert",
    "gemma3_text": "gemma3",
    "gte": "gte",
    "llama": "llama",
    "mistral": "mistral",
    "modernbert": "modernbert",
    "mpnet": "mpnet",
    "new": "gte",
    "nomic_bert": "nomic_bert",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "roberta": "xlm_roberta",
    "xlm-roberta": "xlm_roberta",
}


def find_family(model_type: str) -> Family:
    """The family of `model_type`. Raises `CheckpointError`, listing what is supported."""
    module = FAMILY_MODULES.get(model_type)
    if module is None:
        supported = ", ".join(sorted(FAMILY_MODULES))
        raise CheckpointError(f"model_type {model_type!r} is not supported; supported are {supported}")
    family: Family = import_module(f"rose_engine.models.{module}").FAMILY
    return family
