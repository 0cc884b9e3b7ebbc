"""Mistral: the Llama trunk with a sliding window in every layer, where the file states one."""

from __future__ import annotations

from rose_engine.models.base import Family, TrunkFacts
from rose_engine.models.decoder_config import (
    DECODER_WEIGHTS,
    Window,
    causal_unless_stated,
    decoder_facts,
    read_attention,
    require_silu,
    sliding,
)
from rose_engine.models.llama import LlamaTrunk
from rose_engine.settings_file import SettingsFile

DEFAULT_WIDTH = 4096  # of the first Mistral, whose files may leave it out; later ones say null for none


def mistral_facts(config: SettingsFile) -> TrunkFacts:
    """Facts of a Mistral trunk. Raises `CheckpointError` for variants that are none."""
    require_silu(config)
    return decoder_facts(config, [read_attention(config, _window(config))])


def mistral_trunk(config: SettingsFile, facts: TrunkFacts) -> LlamaTrunk:
    """Every layer alike."""
    return LlamaTrunk(config, facts, (_window(config),) * config.required("num_hidden_layers", int))


def _window(config: SettingsFile) -> Window:
    unstated = None if "sliding_window" in config.values else DEFAULT_WIDTH
    width = config.optional("sliding_window", int, unstated)
    return causal_unless_stated(config) if width is None else sliding(config, width)


FAMILY = Family(facts=mistral_facts, build=mistral_trunk, weights=DECODER_WEIGHTS)
