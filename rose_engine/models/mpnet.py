"""MPNet: BERT's blocks with a bias by distance on every score, without segments.

Song et al., 2020, arXiv:2004.09297. Shapes: T packed tokens, D model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from rose_engine.attention.base import Attend, with_bias
from rose_engine.checkpoint import FusedGroup, WeightRules
from rose_engine.layers.activation import hidden_activation
from rose_engine.layers.embeddings import EncoderEmbeddings
from rose_engine.layers.encoder import EncoderLayer
from rose_engine.layers.relative_bias import RelativePositionBias
from rose_engine.models.base import Family, Trunk, TrunkFacts
from rose_engine.models.encoder_config import attention_spec, require
from rose_engine.settings_file import SettingsFile
from rose_engine.staging import DeviceBatch

# Facts of the family that no `config.json` changes.
NUM_BUCKETS, MAX_DISTANCE = 32, 128
POSITION_OFFSET = 2  # positions follow the padding index, 1 whatever `pad_token_id` says

MPNET_WEIGHTS = WeightRules(
    renames=(
        (r"^mpnet\.", ""),
        (r"^embeddings\.word_embeddings\.", "embeddings.tokens."),
        (r"^embeddings\.position_embeddings\.", "embeddings.positions."),
        (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
        (r"^encoder\.relative_attention_bias\.", "relative_bias."),
        (r"^encoder\.layer\.", "layers."),
        (r"\.attention\.attn\.o\.", ".attention.output."),
        (r"\.attention\.attn\.", ".attention."),
        (r"\.attention\.LayerNorm\.", ".attention_norm."),
        (r"\.intermediate\.dense\.", ".feed_forward.up."),
        (r"\.output\.dense\.", ".feed_forward.down."),
        (r"\.output\.LayerNorm\.", ".feed_forward_norm."),
    ),
    fused=(FusedGroup("qkv", ("q", "k", "v")),),
    ignorable=("pooler.*", "lm_head.*", "embeddings.position_ids"),
)


class MPNetTrunk(Trunk):
    """Embeddings, the bias, and a stack of post-norm blocks."""

    def __init__(self, config: SettingsFile, facts: TrunkFacts) -> None:
        super().__init__()
        width, (spec,) = facts.hidden_size, facts.attention_specs
        norm_eps = config.optional("layer_norm_eps", float, 1e-12)
        self.embeddings = EncoderEmbeddings(
            width, facts.vocabulary_size, facts.max_positions, 0, norm_eps, facts.position_offset
        )
        self.relative_bias = RelativePositionBias(NUM_BUCKETS, spec.num_heads, MAX_DISTANCE, facts.max_length)
        inner_width = config.required("intermediate_size", int)
        activation = hidden_activation(config.optional("hidden_act", str, "gelu"))
        self.layers = nn.ModuleList(
            EncoderLayer(width, inner_width, spec, activation, norm_eps)
            for _ in range(config.required("num_hidden_layers", int))
        )

    def forward(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer."""
        hidden_TD: Tensor = self.embeddings(batch.token_ids_T, batch.position_ids_T, None)
        attend = with_bias(attend, self.relative_bias())
        for layer in self.layers:
            hidden_TD = layer(hidden_TD, attend)
        return hidden_TD


def mpnet_facts(config: SettingsFile) -> TrunkFacts:
    """Facts of an MPNet. Raises `CheckpointError` for another number of buckets."""
    require(config, relative_attention_num_buckets=NUM_BUCKETS)
    width, num_heads = config.required("hidden_size", int), config.required("num_attention_heads", int)
    return TrunkFacts(
        hidden_size=width,
        vocabulary_size=config.required("vocab_size", int),
        max_positions=config.required("max_position_embeddings", int),
        attention_specs=(attention_spec(config, width, num_heads, biased=True),),
        position_offset=POSITION_OFFSET,
    )


FAMILY = Family(facts=mpnet_facts, build=MPNetTrunk, weights=MPNET_WEIGHTS)
