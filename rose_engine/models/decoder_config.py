"""What decoder families have in common in their files: tensor names, heads, windows, kinds of layers."""

from __future__ import annotations

from collections.abc import Iterable

from rose_engine.attention.base import AttentionSpec
from rose_engine.checkpoint import FusedGroup, WeightRules
from rose_engine.errors import CheckpointError
from rose_engine.models.base import TrunkFacts
from rose_engine.settings_file import SettingsFile

Window = tuple[int, int]  # of an AttentionSpec
CAUSAL, FULL = (-1, 0), (-1, -1)
FULL_LAYER, SLIDING_LAYER = "full_attention", "sliding_attention"  # in `layer_types`

DECODER_WEIGHTS = WeightRules(
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
        FusedGroup("gate_up", ("gate_proj", "up_proj")),
    ),
    ignorable=("lm_head.*", "*.rotary_emb.inv_freq"),
)


def decoder_facts(config: SettingsFile, specs: Iterable[AttentionSpec]) -> TrunkFacts:
    """Facts of a decoder whose layers attend by `specs`."""
    return TrunkFacts(
        hidden_size=config.required("hidden_size", int),
        vocabulary_size=config.required("vocab_size", int),
        max_positions=config.required("max_position_embeddings", int),
        attention_specs=tuple(dict.fromkeys(specs)),
    )


def read_attention(
    config: SettingsFile, window: Window, default_head_dim: int | None = None, scale: float | None = None
) -> AttentionSpec:
    """A layer's attention. Head width: `head_dim`, else the default, else D / N. Scale: else 1 / sqrt(H).

    Raises `CheckpointError` when the query heads cannot share the key heads evenly.
    """
    width, num_heads = config.required("hidden_size", int), config.required("num_attention_heads", int)
    num_kv_heads = config.optional("num_key_value_heads", int, num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{config.path}: {num_heads} heads over {num_kv_heads} num_key_value_heads")
    head_dim = config.optional("head_dim", int, default_head_dim or width // num_heads)
    return AttentionSpec(num_heads, num_kv_heads, head_dim, scale or head_dim**-0.5, window)


def causal_unless_stated(config: SettingsFile) -> Window:
    """The window of a layer that sees everything allowed: causal, or full where `is_causal` is false."""
    return CAUSAL if config.optional("is_causal", bool, True) else FULL


def sliding(config: SettingsFile, width: int) -> Window:
    """The window of a layer that sees `width` tokens, itself included; `width` to each side if not causal."""
    causal = causal_unless_stated(config) == CAUSAL
    return bounded(config, (width - 1, 0) if causal else (width, width))


def bounded(config: SettingsFile, window: Window) -> Window:
    """`window`, without the bounds that the longest sequence never reaches."""
    furthest = config.required("max_position_embeddings", int) - 1
    left, right = (-1 if side >= furthest else side for side in window)
    return left, right


def read_layer_kinds(config: SettingsFile, default: Iterable[str]) -> tuple[str, ...]:
    """The kind of each layer: `layer_types`, or `default`. Raises `CheckpointError` for others."""
    kinds = tuple(config.optional("layer_types", list, list(default)))
    num_layers = config.required("num_hidden_layers", int)
    if len(kinds) != num_layers:
        raise CheckpointError(f"{config.path}: {len(kinds)} layer_types for {num_layers} layers")
    for kind in kinds:
        if kind not in (FULL_LAYER, SLIDING_LAYER):
            raise CheckpointError(f"{config.path}: layer_types names {kind!r}, which is not supported")
    return kinds


def refuse(config: SettingsFile, *keys: str) -> None:
    """Raises `CheckpointError`, by name, where a switch that the family has no code for is on."""
    for key in keys:
        if config.optional(key, bool, False):
            raise CheckpointError(f"{config.path}: {key} is not supported")


def require_silu(config: SettingsFile) -> None:
    """Raises `CheckpointError` for any other gate of the feed-forward block."""
    activation = config.optional("hidden_act", str, "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{config.path}: hidden_act {activation!r} is not supported, only silu")
