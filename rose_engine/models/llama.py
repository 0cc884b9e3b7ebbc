"""Llama: pre-norm blocks, rotary positions, gated SiLU, causal attention; no query and key norms.

Shapes: T packed tokens, D model width.
"""

from __future__ import annotations

from torch import Tensor

from rose_engine.attention.base import Attend
from rose_engine.layers.plain_decoder import BlockSpec, PlainDecoderShape, PlainDecoderStack
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


class LlamaTrunk(Trunk):
    """A plain decoder stack; `windows` holds one for each layer."""

    def __init__(
        self,
        config: SettingsFile,
        facts: TrunkFacts,
        windows: tuple[Window, ...],
        qkv_bias: bool = False,
        output_bias: bool = False,
    ) -> None:
        super().__init__()
        specs = [read_attention(config, window) for window in windows]
        self.decoder = PlainDecoderStack(
            PlainDecoderShape(
                width=facts.hidden_size,
                inner_width=config.required("intermediate_size", int),
                vocabulary_size=facts.vocabulary_size,
                norm_eps=config.optional("rms_norm_eps", float, 1e-6),
                blocks=tuple(BlockSpec(spec, read_rotary(config, spec.head_dim)) for spec in specs),
                qkv_bias=qkv_bias,
                output_bias=output_bias,
            )
        )

    def forward(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer, after the final norm."""
        hidden_TD: Tensor = self.decoder(batch, attend)
        return hidden_TD


def llama_facts(config: SettingsFile) -> TrunkFacts:
    """Facts of a Llama trunk. Raises `CheckpointError` for variants that are none."""
    refuse(config, "mlp_bias")
    require_silu(config)
    return decoder_facts(config, [read_attention(config, causal_unless_stated(config))])


def llama_trunk(config: SettingsFile, facts: TrunkFacts) -> LlamaTrunk:
    """Every layer alike; `attention_bias` is one for all four projections."""
    windows = (causal_unless_stated(config),) * config.required("num_hidden_layers", int)
    bias = config.optional("attention_bias", bool, False)
    return LlamaTrunk(config, facts, windows, qkv_bias=bias, output_bias=bias)


FAMILY = Family(facts=llama_facts, build=llama_trunk, weights=DECODER_WEIGHTS)
