"""BERT: post-norm blocks, learned positions, segments, full attention.

Shapes: T packed tokens, D model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from rose_engine.attention.base import Attend, AttentionSpec
from rose_engine.checkpoint import FusedGroup, WeightRules
from rose_engine.errors import CheckpointError
from rose_engine.layers.activation import hidden_activation
from rose_engine.layers.embeddings import EncoderEmbeddings
from rose_engine.layers.encoder import EncoderLayer
from rose_engine.models.base import Family, Trunk, TrunkFacts
from rose_engine.settings_file import SettingsFile
from rose_engine.staging import DeviceBatch

# Tensor names of the BERT kind; `.gamma` and `.beta` are what its first, converted checkpoints hold.
BERT_RENAMES = (
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"^embeddings\.word_embeddings\.", "embeddings.tokens."),
    (r"^embeddings\.position_embeddings\.", "embeddings.positions."),
    (r"^embeddings\.token_type_embeddings\.", "embeddings.segments."),
    (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
    (r"^encoder\.layer\.", "layers."),
    (r"\.attention\.self\.", ".attention."),
    (r"\.attention\.output\.dense\.", ".attention.output."),
    (r"\.attention\.output\.LayerNorm\.", ".attention_norm."),
    (r"\.intermediate\.dense\.", ".feed_forward.up."),
    (r"\.output\.dense\.", ".feed_forward.down."),
    (r"\.output\.LayerNorm\.", ".feed_forward_norm."),
)
BERT_FUSED = (FusedGroup("qkv", ("query", "key", "value")),)
BERT_IGNORABLE = ("pooler.*", "embeddings.position_ids", "embeddings.token_type_ids")


class BertTrunk(Trunk):
    """Embeddings and a stack of post-norm blocks."""

    def __init__(self, config: SettingsFile, facts: TrunkFacts) -> None:
        super().__init__()
        norm_eps = config.optional("layer_norm_eps", float, 1e-12)
        self.embeddings = EncoderEmbeddings(
            facts.hidden_size,
            facts.vocabulary_size,
            facts.max_positions,
            facts.num_segments,
            norm_eps,
            facts.position_offset,
        )
        inner_width = config.required("intermediate_size", int)
        activation = hidden_activation(config.optional("hidden_act", str, "gelu"))
        (spec,) = facts.attention_specs
        self.layers = nn.ModuleList(
            EncoderLayer(facts.hidden_size, inner_width, spec, activation, norm_eps)
            for _ in range(config.required("num_hidden_layers", int))
        )

    def forward(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer."""
        hidden_TD: Tensor = self.embeddings(batch.token_ids_T, batch.position_ids_T, batch.segment_ids_T)
        for layer in self.layers:
            hidden_TD = layer(hidden_TD, attend)
        return hidden_TD


def bert_facts(config: SettingsFile, position_offset: int = 0) -> TrunkFacts:
    """Facts of a trunk of the BERT kind. Raises `CheckpointError` for variants that are none."""
    position_kind = config.optional("position_embedding_type", str, "absolute")
    if position_kind != "absolute":
        raise CheckpointError(f"{config.path}: position_embedding_type {position_kind!r} is not supported")
    if config.optional("is_decoder", bool, False):
        raise CheckpointError(f"{config.path}: is_decoder is not supported")
    width, num_heads = config.required("hidden_size", int), config.required("num_attention_heads", int)
    head_dim = width // num_heads
    return TrunkFacts(
        hidden_size=width,
        vocabulary_size=config.required("vocab_size", int),
        max_positions=config.required("max_position_embeddings", int),
        attention_specs=(AttentionSpec(num_heads, num_heads, head_dim, scale=head_dim**-0.5),),
        position_offset=position_offset,
        num_segments=config.optional("type_vocab_size", int, 2),
    )


FAMILY = Family(
    facts=bert_facts,
    build=BertTrunk,
    weights=WeightRules(
        renames=((r"^bert\.", ""), *BERT_RENAMES),
        fused=BERT_FUSED,
        ignorable=(*BERT_IGNORABLE, "cls.*"),
    ),
)
