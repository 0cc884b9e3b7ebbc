"""GTE v1.5 and multilingual: BERT with rotary positions and a gated unit.

Zhang et al., 2024, arXiv:2407.19669. `model_type` is `new` in the publisher's files and `gte` in
those of transformers; the tensors' names are the same. Shapes: T packed tokens, D model width.
"""

from __future__ import annotations

from torch import Tensor

from rose_engine.attention.base import Attend
from rose_engine.checkpoint import WeightRules
from rose_engine.errors import CheckpointError
from rose_engine.layers.activation import hidden_activation
from rose_engine.layers.rotary import RotarySpec
from rose_engine.layers.rotary_encoder import RotaryEncoder, RotaryEncoderShape
from rose_engine.layers.rotary_scaling import LinearScaling
from rose_engine.models.base import Family, Trunk, TrunkFacts
from rose_engine.models.encoder_config import attention_spec, require
from rose_engine.settings_file import SettingsFile
from rose_engine.staging import DeviceBatch

GTE_WEIGHTS = WeightRules(
    renames=(
        (r"^(new|gte)\.", ""),
        (r"^(?=(embeddings|encoder)\.)", "encoder."),
        (r"^encoder\.encoder\.layer\.", "encoder.layers."),
        (r"\.embeddings\.word_embeddings\.", ".embeddings.tokens."),
        (r"\.embeddings\.token_type_embeddings\.", ".embeddings.segments."),
        (r"\.embeddings\.LayerNorm\.", ".embeddings.norm."),
        (r"\.attention\.qkv_proj\.", ".attention.qkv."),
        (r"\.attention\.o_proj\.", ".attention.output."),
        (r"\.attn_ln\.", ".attention_norm."),
        (r"\.mlp_ln\.", ".feed_forward_norm."),
        (r"\.mlp\.up_gate_proj\.", ".feed_forward.gate_up."),
        (r"\.mlp\.down_proj\.", ".feed_forward.down."),
    ),
    # The published multilingual embedder is saved with a token classifier, for its sparse vectors.
    ignorable=("pooler.*", "lm_head.*", "classifier.*", "encoder.embeddings.position_ids"),
)


class GteTrunk(Trunk):
    """A rotary encoder, segments optional."""

    def __init__(self, config: SettingsFile, facts: TrunkFacts) -> None:
        super().__init__()
        (spec,) = facts.attention_specs
        shape = RotaryEncoderShape(
            width=facts.hidden_size,
            inner_width=config.required("intermediate_size", int),
            num_layers=config.required("num_hidden_layers", int),
            vocabulary_size=facts.vocabulary_size,
            num_segments=_num_segment_rows(config),
            attention=spec,
            rotary=gte_rotary(config, spec.head_dim, facts.max_positions),
            activation=hidden_activation(config.optional("hidden_act", str, "gelu")),
            norm_eps=config.optional("layer_norm_eps", float, 1e-12),
            attention_bias=True,
            down_bias=True,
            gate_first=False,
        )
        self.encoder = RotaryEncoder(shape)

    def forward(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer."""
        hidden_TD: Tensor = self.encoder(batch, attend)
        return hidden_TD


def gte_facts(config: SettingsFile) -> TrunkFacts:
    """Facts of a GTE trunk. Raises `CheckpointError` for variants that are none."""
    require(config, position_embedding_type="rope", layer_norm_type="layer_norm", pack_qkv=True)
    require(config, logn_attention_scale=False, logn_attention_clip1=False)
    width, num_heads = config.required("hidden_size", int), config.required("num_attention_heads", int)
    return TrunkFacts(
        hidden_size=width,
        vocabulary_size=config.required("vocab_size", int),
        max_positions=config.required("max_position_embeddings", int),
        attention_specs=(attention_spec(config, width, num_heads),),
        num_segments=max(1, _num_segment_rows(config)),
    )


def gte_rotary(config: SettingsFile, head_dim: int, max_positions: int) -> RotarySpec:
    """The rotary basis, plain, linearly scaled or, as published, stretched by a fixed "ntk" factor f.

    The last multiplies the base with f and divides every frequency by f^(2 / H), for sequences of any length.
    Raises `CheckpointError` for other kinds, and for ntk's mixed form.
    """
    parameters = config.section("rope_parameters")
    scaling = parameters if parameters.values else config.section("rope_scaling")
    kind = scaling.optional("rope_type", str, None) or scaling.optional("type", str, "default")
    if kind not in ("default", "linear", "ntk") or scaling.values.get("mixed_b") is not None:
        raise CheckpointError(f"{config.path}: rotary scaling {dict(scaling.values)} is not supported")
    theta = parameters.optional("rope_theta", float, None) or config.required("rope_theta", float)
    if kind == "default":
        return RotarySpec(head_dim, theta, max_positions)
    factor = scaling.required("factor", float)
    if kind == "linear":
        return RotarySpec(head_dim, theta, max_positions, LinearScaling(factor))
    return RotarySpec(head_dim, theta * factor, max_positions, LinearScaling(factor ** (2 / head_dim)))


def _num_segment_rows(config: SettingsFile) -> int:
    """Rows of the segment embedding; 0 in models that have none."""
    return config.optional("type_vocab_size", int, 1)


FAMILY = Family(facts=gte_facts, build=GteTrunk, weights=GTE_WEIGHTS)
