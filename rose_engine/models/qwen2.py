"""Qwen2: the Llama trunk with biases on queries, keys and values; later layers may see a sliding window.

GTE-Qwen2 is the same trunk with `is_causal` false: every token sees the whole sequence.
"""

from __future__ import annotations

from rose_engine.models.base import Family, TrunkFacts
from rose_engine.models.decoder_config import (
    DECODER_WEIGHTS,
    FULL_LAYER,
    SLIDING_LAYER,
    Window,
    causal_unless_stated,
    decoder_facts,
    read_attention,
    read_layer_kinds,
    require_silu,
    sliding,
)
from rose_engine.models.llama import LlamaTrunk
from rose_engine.settings_file import SettingsFile

DEFAULT_WIDTH, DEFAULT_FULL_LAYERS = 4096, 28  # where the file turns the window on and says no more


def qwen2_facts(config: SettingsFile) -> TrunkFacts:
    """Facts of a Qwen2 trunk. Raises `CheckpointError` for variants that are none."""
    require_silu(config)
    return decoder_facts(config, [read_attention(config, window) for window in _windows(config)])


def qwen2_trunk(config: SettingsFile, facts: TrunkFacts) -> LlamaTrunk:
    """Biases on the way in, none on the way out."""
    return LlamaTrunk(config, facts, _windows(config), qkv_bias=True)


def _windows(config: SettingsFile) -> tuple[Window, ...]:
    num_layers = config.required("num_hidden_layers", int)
    unbounded = causal_unless_stated(config)
    if not config.optional("use_sliding_window", bool, False):
        return (unbounded,) * num_layers
    num_full = min(num_layers, config.optional("max_window_layers", int, DEFAULT_FULL_LAYERS))
    kinds = read_layer_kinds(config, [FULL_LAYER] * num_full + [SLIDING_LAYER] * (num_layers - num_full))
    bounded = sliding(config, config.optional("sliding_window", int, DEFAULT_WIDTH))
    return tuple(bounded if kind == SLIDING_LAYER else unbounded for kind in kinds)


FAMILY = Family(facts=qwen2_facts, build=qwen2_trunk, weights=DECODER_WEIGHTS)
