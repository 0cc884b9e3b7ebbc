"""Qwen3: pre-norm blocks, normalised query and key heads, rotary positions, gated SiLU, causal attention.

Shapes: T packed tokens, D model width.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from rose_engine.attention.base import Attend
from rose_engine.checkpoint import FusedGroup
from rose_engine.layers.decoder import DecoderShape, DecoderStack
from rose_engine.models.base import Family, Trunk, TrunkFacts
from rose_engine.models.decoder_config import (
    DECODER_WEIGHTS,
    Window,
    causal_unless_stated,
    decoder_facts,
    read_attention,
    refuse,
    require_silu,
)
from rose_engine.models.rotary_config import read_rotary
from rose_engine.settings_file import SettingsFile
from rose_engine.staging import DeviceBatch

QWEN3_WEIGHTS = replace(
    DECODER_WEIGHTS, fused=(*DECODER_WEIGHTS.fused, FusedGroup("qk_norm", ("q_norm", "k_norm")))
)


class Qwen3Trunk(Trunk):
    """A decoder stack without a language-model head."""

    def __init__(self, config: SettingsFile, facts: TrunkFacts) -> None:
        super().__init__()
        (spec,) = facts.attention_specs
        self.decoder = DecoderStack(
            DecoderShape(
                width=facts.hidden_size,
                inner_width=config.required("intermediate_size", int),
                num_layers=config.required("num_hidden_layers", int),
                vocabulary_size=facts.vocabulary_size,
                attention=spec,
                rotary=read_rotary(config, spec.head_dim),
                norm_eps=config.optional("rms_norm_eps", float, 1e-6),
            )
        )

    def forward(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer, after the final norm."""
        hidden_TD: Tensor = self.decoder(batch, attend)
        return hidden_TD


def qwen3_facts(config: SettingsFile, window: Window | None = None) -> TrunkFacts:
    """Facts of a trunk of the Qwen3 kind, causal unless a window or the file says otherwise.

    Raises `CheckpointError` for variants that are none.
    """
    refuse(config, "attention_bias", "use_sliding_window")
    require_silu(config)
    return decoder_facts(config, [read_attention(config, window or causal_unless_stated(config))])


FAMILY = Family(facts=qwen3_facts, build=Qwen3Trunk, weights=QWEN3_WEIGHTS)
