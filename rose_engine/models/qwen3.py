"""Qwen3: pre-norm blocks, normalised query and key heads, rotary positions, gated SiLU, causal attention.

Shapes: T packed tokens, D model width.
"""

from __future__ import annotations

from torch import Tensor

from rose_engine.attention.base import Attend, AttentionSpec
from rose_engine.checkpoint import FusedGroup, WeightRules
from rose_engine.errors import CheckpointError
from rose_engine.layers.decoder import DecoderShape, DecoderStack
from rose_engine.layers.rotary import RotarySpec
from rose_engine.models.base import Family, Trunk, TrunkFacts
from rose_engine.settings_file import SettingsFile
from rose_engine.staging import DeviceBatch

CAUSAL, FULL = (-1, 0), (-1, -1)
DEFAULT_ROPE_THETA = 10_000.0

QWEN3_WEIGHTS = WeightRules(
    renames=(
        (r"^model\.", ""),
        (r"^(?=(embed_tokens|layers|norm)\.)", "decoder."),
        (r"\.embed_tokens\.", ".tokens."),
        (r"\.input_layernorm\.", ".attention_norm."),
        (r"\.post_attention_layernorm\.", ".feed_forward_norm."),
        (r"\.self_attn\.", ".attention."),
        (r"\.o_proj\.", ".output."),
        (r"\.mlp\.", ".feed_forward."),
        (r"\.down_proj\.", ".down."),
    ),
    fused=(
        FusedGroup("qkv", ("q_proj", "k_proj", "v_proj")),
        FusedGroup("qk_norm", ("q_norm", "k_norm")),
        FusedGroup("gate_up", ("gate_proj", "up_proj")),
    ),
    ignorable=("lm_head.*",),
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
                rotary=RotarySpec(spec.head_dim, rope_theta(config), facts.max_positions),
                norm_eps=config.optional("rms_norm_eps", float, 1e-6),
            )
        )

    def forward(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer, after the final norm."""
        hidden_TD: Tensor = self.decoder(batch, attend)
        return hidden_TD


def qwen3_facts(config: SettingsFile, window: tuple[int, int] = CAUSAL) -> TrunkFacts:
    """Facts of a trunk of the Qwen3 kind. Raises `CheckpointError` for variants that are none."""
    _refuse_variants(config)
    width, num_heads = config.required("hidden_size", int), config.required("num_attention_heads", int)
    num_kv_heads = config.optional("num_key_value_heads", int, num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{config.path}: {num_heads} heads over {num_kv_heads} num_key_value_heads")
    head_dim = config.optional("head_dim", int, width // num_heads)
    return TrunkFacts(
        hidden_size=width,
        vocabulary_size=config.required("vocab_size", int),
        max_positions=config.required("max_position_embeddings", int),
        attention_specs=(AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5, window),),
    )


def rope_theta(config: SettingsFile) -> float:
    """The rotary base: `rope_parameters.rope_theta`, else `rope_theta`.

    Raises `CheckpointError` for rotations other than the plain one, in either layout of the file.
    """
    parameters = config.section("rope_parameters")
    for section in (parameters, config.section("rope_scaling")):
        kind = section.optional("rope_type", str, None) or section.optional("type", str, "default")
        if kind != "default":
            raise CheckpointError(f"{config.path}: rotary type {kind!r} is not supported")
    stated = parameters.optional("rope_theta", float, None)
    return stated if stated is not None else config.optional("rope_theta", float, DEFAULT_ROPE_THETA)


def _refuse_variants(config: SettingsFile) -> None:
    for key in ("attention_bias", "use_sliding_window"):
        if config.optional(key, bool, False):
            raise CheckpointError(f"{config.path}: {key} is not supported")
    activation = config.optional("hidden_act", str, "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{config.path}: hidden_act {activation!r} is not supported, only silu")


FAMILY = Family(facts=qwen3_facts, build=Qwen3Trunk, weights=QWEN3_WEIGHTS)
