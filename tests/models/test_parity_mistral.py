"""Mistral trunks against `transformers.MistralModel`; what they share with Llama is tested there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, MistralModel

from rose_engine.errors import CheckpointError
from rose_engine.models.decoder_config import CAUSAL, FULL
from rose_engine.models.mistral import mistral_facts
from rose_engine.settings_file import SettingsFile
from tests.models.decoder_parity import (
    RAGGED,
    SIZES,
    VOCABULARY,
    assert_parity,
    assert_prefix_and_head_do_not_matter,
    assert_saved_parity,
    assert_spare_tokens_change_nothing,
)
from tests.models.parity import edit_config, load_trunk, random_ids, randomize, run_trunk

WINDOW = 8


def tiny(**changes: object) -> MistralModel:
    settings = {
        "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    return randomize(MistralModel(MistralConfig(**(SIZES | settings | changes))))


@pytest.fixture(scope="module")
def reference() -> MistralModel:
    return tiny()


@pytest.fixture
def folder(reference: MistralModel, tmp_path: Path) -> Path:
    reference.save_pretrained(tmp_path)
    return tmp_path


def window_of(folder: Path) -> tuple[int, int]:
    (spec,) = mistral_facts(SettingsFile.read(folder / "config.json")).attention_specs
    return spec.window


@pytest.mark.parametrize("lengths", [*RAGGED, (WINDOW - 1, WINDOW, WINDOW + 1)], ids=str)
def test_hidden_states(reference: MistralModel, folder: Path, lengths: tuple[int, ...]):
    assert_parity(reference, folder, lengths)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 1},
        {"sliding_window": 63},
        {"sliding_window": 64},
        {"head_dim": 32},
        {"is_causal": False},
        {"is_causal": False, "sliding_window": None},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 5e3,
            }
        },
    ],
    ids=str,
)
def test_variants(tmp_path: Path, changes: dict[str, object]):
    assert_saved_parity(tiny(**changes), tmp_path)


def test_what_lies_outside_the_window_is_not_seen(folder: Path):
    """With three layers the last token is reached from 3 * (window - 1) tokens back, and no further."""
    trunk = load_trunk(folder)
    (ids,) = random_ids((40,), VOCABULARY)
    reach = 3 * (WINDOW - 1)
    for back, seen in ((reach, True), (reach + 1, False)):
        changed = ids.copy()
        changed[-1 - back] = (changed[-1 - back] + 1) % VOCABULARY
        (before,), (after,) = run_trunk(trunk, [ids]), run_trunk(trunk, [changed])
        assert torch.equal(before[-1], after[-1]) is not seen


@pytest.mark.parametrize(
    ("values", "window"),
    [
        ({"sliding_window": 8}, (7, 0)),
        ({"sliding_window": 63}, (62, 0)),
        ({"sliding_window": 64}, CAUSAL),  # the longest sequence fits
        ({"sliding_window": 8, "is_causal": False}, (8, 8)),
        ({"sliding_window": 4096, "is_causal": False}, FULL),
    ],
    ids=str,
)
def test_windows(folder: Path, values: dict[str, object], window: tuple[int, int]):
    edit_config(folder, **values)
    assert window_of(folder) == window


def test_no_window_and_no_word_about_windows_differ(folder: Path):
    """Null turns the window off; a file without the key means the first Mistral's 4,096 tokens."""
    edit_config(folder, sliding_window=None, max_position_embeddings=8192)  # takes the key out
    assert window_of(folder) == (4095, 0)
    file = folder / "config.json"
    file.write_text(file.read_text().replace("{", '{"sliding_window": null, ', 1))
    assert window_of(folder) == CAUSAL


def test_names_of_tensors(reference: MistralModel, tmp_path: Path):
    assert_prefix_and_head_do_not_matter(reference, tmp_path)


def test_spare_tokens_and_empty_slots_change_nothing(folder: Path):
    assert_spare_tokens_change_nothing(load_trunk(folder))


def test_variants_are_refused_by_name(folder: Path):
    edit_config(folder, hidden_act="gelu")
    with pytest.raises(CheckpointError, match="hidden_act"):
        window_of(folder)
