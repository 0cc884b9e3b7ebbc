"""ModernBERT: pre-norm blocks, most of them with local attention, rotary positions, a gated unit.

Warner et al., 2024, arXiv:2412.13663. Shapes: T packed tokens, D model width, H head width.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from rose_engine.attention.base import Attend, AttentionSpec
from rose_engine.checkpoint import WeightRules
from rose_engine.errors import CheckpointError
from rose_engine.layers.activation import hidden_activation
from rose_engine.layers.encoder import GatedUnit, PreNormLayer, SelfAttention
from rose_engine.layers.rotary import RotarySpec
from rose_engine.layers.rotary_table import RotaryTable
from rose_engine.models.base import Family, Trunk, TrunkFacts
from rose_engine.models.encoder_config import FULL, attention_spec, require
from rose_engine.settings_file import SettingsFile
from rose_engine.staging import DeviceBatch

LayerKind = Literal["full_attention", "sliding_attention"]
KINDS: tuple[LayerKind, ...] = ("full_attention", "sliding_attention")
_THETA_KEYS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
_DEFAULT_THETAS = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}

MODERNBERT_WEIGHTS = WeightRules(
    renames=(
        (r"^model\.", ""),
        (r"^embeddings\.tok_embeddings\.", "tokens."),
        (r"^embeddings\.norm\.", "norm."),
        (r"\.attn\.Wqkv\.", ".attention.qkv."),
        (r"\.attn\.Wo\.", ".attention.output."),
        (r"\.attn_norm\.", ".attention_norm."),
        (r"\.mlp\.Wi\.", ".feed_forward.gate_up."),
        (r"\.mlp\.Wo\.", ".feed_forward.down."),
        (r"\.mlp_norm\.", ".feed_forward_norm."),
    ),
    ignorable=("head.*", "decoder.*"),
)


class ModernBertTrunk(Trunk):
    """Normalised embeddings, a stack of pre-norm blocks, and a final norm."""

    def __init__(self, config: SettingsFile, facts: TrunkFacts) -> None:
        super().__init__()
        width = facts.hidden_size
        self._kinds = layer_kinds(config)
        self.tokens = nn.Embedding(facts.vocabulary_size, width)
        self.norm = _norm(config, width)
        self.rotary = nn.ModuleDict({kind: _rotary_table(config, facts, kind) for kind in self._kinds})
        self.layers = nn.ModuleList(
            _layer(config, width, kind, first=index == 0) for index, kind in enumerate(self._kinds)
        )
        self.final_norm = _norm(config, width)

    def forward(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer, after the final norm."""
        hidden_TD = self.norm(self.tokens(batch.token_ids_T))
        rotary_TH = {kind: table(batch.position_ids_T) for kind, table in self.rotary.items()}
        for kind, layer in zip(self._kinds, self.layers, strict=True):
            hidden_TD = layer(hidden_TD, attend, rotary_TH[kind])
        output_TD: Tensor = self.final_norm(hidden_TD)
        return output_TD


def layer_kinds(config: SettingsFile) -> list[LayerKind]:
    """Each layer's attention: `layer_types`, or the first of every `global_attn_every_n_layers` full."""
    num_layers = config.required("num_hidden_layers", int)
    every = config.optional("global_attn_every_n_layers", int, 3)
    alternating = [KINDS[bool(index % every)] for index in range(num_layers)]
    stated = config.optional("layer_types", list, alternating)
    if len(stated) != num_layers or not set(stated) <= set(KINDS):
        raise CheckpointError(f"{config.path}: layer_types {stated!r} is not {num_layers} of {KINDS}")
    return stated


def spec_of(config: SettingsFile, kind: LayerKind) -> AttentionSpec:
    """The attention of one kind of layer; `local_attention` counts the tokens of both sides."""
    half = config.optional("local_attention", int, 128) // 2
    width, num_heads = config.required("hidden_size", int), config.required("num_attention_heads", int)
    return attention_spec(config, width, num_heads, FULL if kind == "full_attention" else (half, half))


def rope_theta(config: SettingsFile, kind: LayerKind) -> float:
    """The rotary base of one kind of layer: in `rope_parameters`, or under a key of its own.

    A `local_rope_theta` of null, unlike one that is absent, means that there is one base for all layers.
    """
    section = config.section("rope_parameters").section(kind)
    require(section, rope_type="default")
    key = _THETA_KEYS[kind]
    if key in config.values and config.values[key] is None:
        key = _THETA_KEYS["full_attention"]
    stated = config.optional(key, float, _DEFAULT_THETAS[kind])
    return section.optional("rope_theta", float, stated)


def modernbert_facts(config: SettingsFile) -> TrunkFacts:
    """Facts of a ModernBERT trunk. Raises `CheckpointError` for scaled rotations."""
    require(config.section("rope_scaling"), rope_type="default", type="default")
    return TrunkFacts(
        hidden_size=config.required("hidden_size", int),
        vocabulary_size=config.required("vocab_size", int),
        max_positions=config.optional("max_position_embeddings", int, 8192),
        attention_specs=tuple(spec_of(config, kind) for kind in sorted(set(layer_kinds(config)))),
    )


def _rotary_table(config: SettingsFile, facts: TrunkFacts, kind: LayerKind) -> RotaryTable:
    head_dim = facts.attention_specs[0].head_dim
    return RotaryTable(RotarySpec(head_dim, rope_theta(config, kind), facts.max_positions))


def _layer(config: SettingsFile, width: int, kind: LayerKind, *, first: bool) -> PreNormLayer:
    """One block; the first one's attention reads the normalised embeddings as they are."""
    bias = config.optional("mlp_bias", bool, False)
    activation = hidden_activation(config.optional("hidden_activation", str, "gelu"))
    inner_width = config.required("intermediate_size", int)
    return PreNormLayer(
        nn.Identity() if first else _norm(config, width),
        SelfAttention(width, spec_of(config, kind), bias=config.optional("attention_bias", bool, False)),
        _norm(config, width),
        GatedUnit(width, inner_width, activation, bias=bias, down_bias=bias),
    )


def _norm(config: SettingsFile, width: int) -> nn.LayerNorm:
    norm_eps = config.optional("norm_eps", float, 1e-5)
    return nn.LayerNorm(width, eps=norm_eps, bias=config.optional("norm_bias", bool, False))


FAMILY = Family(facts=modernbert_facts, build=ModernBertTrunk, weights=MODERNBERT_WEIGHTS)
