"""Gemma 3 text: norms before and after each half of a block, scaled embeddings, QK-norm, gated GELU.

Most layers see a sliding window and turn with a basis of their own. The family's embedding models see to both
sides: `use_bidirectional_attention`.

Shapes: T packed tokens, V vocabulary entries, D model width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rose_engine.attention.base import Attend
from rose_engine.checkpoint import FusedGroup
from rose_engine.errors import CheckpointError, EngineConfigError
from rose_engine.layers.plain_decoder import BlockSpec, PlainDecoderShape, PlainDecoderStack
from rose_engine.layers.rotary import RotarySpec
from rose_engine.layers.sandwich_block import SandwichBlock
from rose_engine.models.base import Family, Trunk, TrunkFacts
from rose_engine.models.decoder_config import (
    CAUSAL,
    DECODER_WEIGHTS,
    FULL,
    FULL_LAYER,
    SLIDING_LAYER,
    Window,
    bounded,
    decoder_facts,
    read_attention,
    read_layer_kinds,
)
from rose_engine.models.rotary_config import merged, rotary_of
from rose_engine.settings_file import SettingsFile
from rose_engine.staging import DeviceBatch

# What the first files leave out; later ones state everything.
DEFAULT_HEAD_DIM, DEFAULT_QUERY_SCALAR, DEFAULT_WIDTH, DEFAULT_FULL_EVERY = 256, 256.0, 4096, 6
TANH_GELU = "gelu_pytorch_tanh"
# layer kind -> (where the old layout states the base, its default)
OLD_THETAS = {FULL_LAYER: ("rope_theta", 1_000_000.0), SLIDING_LAYER: ("rope_local_base_freq", 10_000.0)}

GEMMA3_WEIGHTS = replace(
    DECODER_WEIGHTS,
    renames=(
        (r"\.post_attention_layernorm\.", ".attention_update_norm."),  # Llama's name for another place
        (r"\.pre_feedforward_layernorm\.", ".feed_forward_norm."),
        (r"\.post_feedforward_layernorm\.", ".feed_forward_update_norm."),
        *DECODER_WEIGHTS.renames,
    ),
    fused=(*DECODER_WEIGHTS.fused, FusedGroup("qk_norm", ("q_norm", "k_norm"))),
)


class Gemma3Trunk(Trunk):
    """A stack of Gemma 3 blocks over scaled embeddings."""

    def __init__(self, config: SettingsFile, facts: TrunkFacts) -> None:
        super().__init__()
        self._width = facts.hidden_size
        self.decoder = PlainDecoderStack(
            PlainDecoderShape(
                width=facts.hidden_size,
                inner_width=config.required("intermediate_size", int),
                vocabulary_size=facts.vocabulary_size,
                norm_eps=config.optional("rms_norm_eps", float, 1e-6),
                blocks=_blocks(config),
                qkv_bias=config.optional("attention_bias", bool, False),
                output_bias=config.optional("attention_bias", bool, False),
            ),
            SandwichBlock,
        )

    @torch.no_grad()
    def fill_buffers(self, device: torch.device) -> None:  # noqa: ARG002 - the loader's signature
        """Scale the embeddings by sqrt(D), in their own dtype as the models were trained to.

        Raises `EngineConfigError` for float16, whose range their activations leave.
        """
        embedding_VD = self.decoder.tokens.weight
        if embedding_VD.dtype == torch.float16:
            raise EngineConfigError("dtype: float16 overflows in Gemma 3 models; use bfloat16 or float32")
        embedding_VD *= torch.tensor(self._width**0.5, dtype=embedding_VD.dtype)

    def forward(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer, after the final norm."""
        hidden_TD: Tensor = self.decoder(batch, attend)
        return hidden_TD


def gemma3_facts(config: SettingsFile) -> TrunkFacts:
    """Facts of a Gemma 3 text trunk. Raises `CheckpointError` for variants that are none."""
    if config.optional("attn_logit_softcapping", float, None) is not None:
        raise CheckpointError(f"{config.path}: attn_logit_softcapping is not supported")
    activation = config.optional("hidden_activation", str, TANH_GELU)
    if activation != TANH_GELU:
        raise CheckpointError(f"{config.path}: hidden_activation {activation!r} is not supported")
    return decoder_facts(config, [block.attention for block in _blocks(config)])


def _blocks(config: SettingsFile) -> tuple[BlockSpec, ...]:
    full_every = config.optional("sliding_window_pattern", int, DEFAULT_FULL_EVERY)
    counts = range(1, config.required("num_hidden_layers", int) + 1)
    kinds = read_layer_kinds(config, [SLIDING_LAYER if n % full_every else FULL_LAYER for n in counts])
    spec_of = {kind: _block(config, kind) for kind in set(kinds)}
    return tuple(spec_of[kind] for kind in kinds)


def _block(config: SettingsFile, kind: str) -> BlockSpec:
    scale = config.optional("query_pre_attn_scalar", float, DEFAULT_QUERY_SCALAR) ** -0.5
    attention = read_attention(config, _window(config, kind), DEFAULT_HEAD_DIM, scale)
    return BlockSpec(attention, _rotary(config, kind, attention.head_dim))


def _window(config: SettingsFile, kind: str) -> Window:
    """In a layer that sees to both sides half of `sliding_window` lies on each."""
    both_sides = config.optional("use_bidirectional_attention", bool, False)
    if kind == FULL_LAYER:
        return FULL if both_sides else CAUSAL
    width = config.optional("sliding_window", int, DEFAULT_WIDTH)
    return bounded(config, (width // 2, width // 2) if both_sides else (width - 1, 0))


def _rotary(config: SettingsFile, kind: str, head_dim: int) -> RotarySpec:
    """One basis a kind of layer; the old layout stretches that of full layers only."""
    sections = [config.section("rope_parameters").section(kind)]
    if kind == FULL_LAYER:
        sections.append(config.section("rope_scaling"))
    key, default = OLD_THETAS[kind]
    theta = config.optional(key, float, default)
    return rotary_of(config, merged(config, *sections), head_dim, theta)


FAMILY = Family(facts=gemma3_facts, build=Gemma3Trunk, weights=GEMMA3_WEIGHTS)
