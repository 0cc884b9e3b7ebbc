"""Prompts left out of the pool: gateway and engine together, against sentence-transformers itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

from ivy_gateway.jobs import Truncation
from ivy_gateway.model_profile import ModelProfile
from ivy_gateway.templates import apply_prompt
from ivy_gateway.tokenizer import TextTokenizer
from rose_engine.batch import Batch, Sequence
from rose_engine.config import EngineConfig
from rose_engine.engine import Engine
from rose_engine.module_chain import POOLING_MODES
from tests.cases.models import decoder, encoder

PROMPTS = {"query": "Represent this sentence for retrieval: ", "short": "q:", "glued": "sub", "document": ""}
TEXTS = (
    "ferry",
    "A ship that carries people, and vehicles; over short distances!",
    "word " * 400,
    "Zürich 🙂",
)


def leave_prompts_out(folder: Path) -> Path:
    """All modes, concatenated, none with the prompt."""
    hidden_size = json.loads((folder / "config.json").read_text())["hidden_size"]
    pooling = {
        "embedding_dimension": hidden_size,
        "pooling_mode": list(POOLING_MODES),
        "include_prompt": False,
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    return folder


def vectors(folder: Path, texts: tuple[str, ...], *prompt_names: str | None) -> list[np.ndarray]:
    """What the gateway sends and the engine makes of it, for each prompt; all in one batch."""
    profile = ModelProfile.read(folder)
    tokenizer = TextTokenizer.load(
        folder, literal=True, max_length=profile.max_length, workers=1, lower_case=profile.do_lower_case
    )
    engine = Engine.load(EngineConfig(folder, device="cpu", dtype="float32", threads=1))
    try:
        encoded = [
            item
            for name in prompt_names
            for item in asyncio.run(
                tokenizer.encode(apply_prompt(texts, profile, name), Truncation(), True, "inputs")
            )
        ]
        rows = engine.step(
            Batch.pack(Sequence(item.token_ids, item.segment_ids, item.spans) for item in encoded)
        ).result()
        return np.split(rows, len(prompt_names))
    finally:
        tokenizer.close()
        engine.close()


def check(folder: Path) -> None:
    reference = SentenceTransformer(str(folder), device="cpu", local_files_only=True).float()
    names = ("query", None, "short", "glued", "document")
    for name, got in zip(names, vectors(folder, TEXTS, *names), strict=True):
        wanted = reference.encode(list(TEXTS), prompt_name=name)
        np.testing.assert_allclose(got, wanted, atol=2e-5, err_msg=str(name))
    without = reference.encode(list(TEXTS), prompt_name="query")
    reference.set_pooling_include_prompt(include_prompt=True)
    assert not np.allclose(without, reference.encode(list(TEXTS), prompt_name="query"), atol=1e-3)


def test_an_encoder_with_special_tokens_at_both_ends(minilm, tmp_path):
    encoder(tmp_path, minilm)
    check(leave_prompts_out(tmp_path))


def test_a_decoder_with_an_end_token(shared, tmp_path):
    decoder(tmp_path, shared)
    check(leave_prompts_out(tmp_path))
