"""NomicBERT: BERT with rotary positions, a gated SiLU unit and no biases.

Nussbaum et al., 2024, arXiv:2402.01613. Its `config.json` comes in two spellings: the publisher's, after
GPT-2's, and that of transformers. Shapes: T packed tokens, D model width.
"""

from __future__ import annotations

from torch import Tensor

from rose_engine.attention.base import Attend
from rose_engine.checkpoint import FusedGroup, WeightRules
from rose_engine.layers.activation import hidden_activation
from rose_engine.layers.rotary import RotarySpec
from rose_engine.layers.rotary_encoder import RotaryEncoder, RotaryEncoderShape
from rose_engine.models.base import Family, Trunk, TrunkFacts
from rose_engine.models.encoder_config import attention_spec, require
from rose_engine.settings_file import SettingsFile
from rose_engine.staging import DeviceBatch

DEFAULT_ROPE_THETA, DEFAULT_NORM_EPS, DEFAULT_TRAINED_POSITIONS = 1000.0, 1e-12, 2048

NOMIC_WEIGHTS = WeightRules(
    renames=(
        (r"^(bert|nomic_bert)\.", ""),
        (r"^(?=(embeddings|emb_ln|encoder)\.)", "encoder."),
        (r"^encoder\.encoder\.", "encoder."),
        (r"\.embeddings\.word_embeddings\.", ".embeddings.tokens."),
        (r"\.embeddings\.token_type_embeddings\.", ".embeddings.segments."),
        (r"\.emb_ln\.", ".embeddings.norm."),
        (r"\.attn\.Wqkv\.", ".attention.qkv."),
        (r"\.attn\.out_proj\.", ".attention.output."),
        (r"\.norm1\.", ".attention_norm."),
        (r"\.norm2\.", ".feed_forward_norm."),
        (r"\.mlp\.fc2\.", ".feed_forward.down."),
        (r"\.mlp\.", ".feed_forward."),
    ),
    fused=(FusedGroup("gate_up", ("fc12", "fc11")),),
    ignorable=("pooler.*", "cls.*"),
)


class NomicBertTrunk(Trunk):
    """A rotary encoder without biases."""

    def __init__(self, config: SettingsFile, facts: TrunkFacts) -> None:
        super().__init__()
        (spec,) = facts.attention_specs
        shape = RotaryEncoderShape(
            width=facts.hidden_size,
            inner_width=_number(config, "n_inner", "intermediate_size"),
            num_layers=_number(config, "n_layer", "num_hidden_layers"),
            vocabulary_size=facts.vocabulary_size,
            num_segments=facts.num_segments,
            attention=spec,
            rotary=RotarySpec(spec.head_dim, rope_theta(config), facts.max_positions),
            activation=hidden_activation("silu"),
            norm_eps=_norm_eps(config),
            attention_bias=False,
            down_bias=False,
            gate_first=True,
        )
        self.encoder = RotaryEncoder(shape)

    def forward(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer."""
        hidden_TD: Tensor = self.encoder(batch, attend)
        return hidden_TD


def nomic_bert_facts(config: SettingsFile) -> TrunkFacts:
    """Facts of a NomicBERT trunk. Raises `CheckpointError` for variants that are none, experts among them.

    There are as many positions as there were in training: up to there the publisher's dynamic stretching of
    the rotary basis (`rotary_scaling_factor`) changes nothing.
    """
    _refuse_variants(config)
    width = _number(config, "n_embd", "hidden_size")
    positions = _number(config, "n_positions", "max_position_embeddings")
    trained = config.optional("max_trained_positions", int, DEFAULT_TRAINED_POSITIONS)
    return TrunkFacts(
        hidden_size=width,
        vocabulary_size=config.required("vocab_size", int),
        max_positions=min(positions, trained) if "n_positions" in config.values else positions,
        attention_specs=(attention_spec(config, width, _number(config, "n_head", "num_attention_heads")),),
        num_segments=config.optional("type_vocab_size", int, 2),
    )


def rope_theta(config: SettingsFile) -> float:
    """The rotary base, in either spelling."""
    stated = config.optional("rotary_emb_base", float, DEFAULT_ROPE_THETA)
    return config.section("rope_parameters").optional("rope_theta", float, stated)


def _norm_eps(config: SettingsFile) -> float:
    stated = config.optional("layer_norm_eps", float, DEFAULT_NORM_EPS)
    return config.optional("layer_norm_epsilon", float, stated)


def _number(config: SettingsFile, published: str, otherwise: str) -> int:
    stated = config.optional(published, int, None)
    return config.required(otherwise, int) if stated is None else stated


def _refuse_variants(config: SettingsFile) -> None:
    require(config, activation_function="swiglu", hidden_act="silu", rotary_emb_fraction=1.0)
    require(config, qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False)
    require(config, prenorm=False, parallel_block=False, use_rms_norm=False, causal=False)
    require(config, rotary_emb_interleaved=False, rotary_emb_scale_base=None, moe_every_n_layers=0)
    require(config.section("rope_parameters"), rope_type="default")


FAMILY = Family(facts=nomic_bert_facts, build=NomicBertTrunk, weights=NOMIC_WEIGHTS)
