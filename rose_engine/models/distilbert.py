"""DistilBERT: BERT's blocks under other names, without segments.   (Sanh et al., 2019, arXiv:1910.01108)

Shapes: T packed tokens, D model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from rose_engine.attention.base import Attend
from rose_engine.checkpoint import FusedGroup, WeightRules
from rose_engine.layers.activation import hidden_activation
from rose_engine.layers.embeddings import EncoderEmbeddings
from rose_engine.layers.encoder import EncoderLayer
from rose_engine.models.base import Family, Trunk, TrunkFacts
from rose_engine.models.encoder_config import attention_spec
from rose_engine.settings_file import SettingsFile
from rose_engine.staging import DeviceBatch

NORM_EPS = 1e-12  # no key of `config.json` says otherwise

DISTILBERT_WEIGHTS = WeightRules(
    renames=(
        (r"^distilbert\.", ""),
        (r"^embeddings\.word_embeddings\.", "embeddings.tokens."),
        (r"^embeddings\.position_embeddings\.", "embeddings.positions."),
        (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
        (r"^transformer\.layer\.", "layers."),
        (r"\.attention\.out_lin\.", ".attention.output."),
        (r"\.sa_layer_norm\.", ".attention_norm."),
        (r"\.ffn\.lin1\.", ".feed_forward.up."),
        (r"\.ffn\.lin2\.", ".feed_forward.down."),
        (r"\.output_layer_norm\.", ".feed_forward_norm."),
    ),
    fused=(FusedGroup("qkv", ("q_lin", "k_lin", "v_lin")),),
    ignorable=("embeddings.position_ids", "vocab_transform.*", "vocab_layer_norm.*", "vocab_projector.*"),
)


class DistilBertTrunk(Trunk):
    """Embeddings and a stack of post-norm blocks."""

    def __init__(self, config: SettingsFile, facts: TrunkFacts) -> None:
        super().__init__()
        width, (spec,) = facts.hidden_size, facts.attention_specs
        self.embeddings = EncoderEmbeddings(width, facts.vocabulary_size, facts.max_positions, 0, NORM_EPS)
        inner_width = config.required("hidden_dim", int)
        activation = hidden_activation(config.optional("activation", str, "gelu"))
        self.layers = nn.ModuleList(
            EncoderLayer(width, inner_width, spec, activation, NORM_EPS)
            for _ in range(config.required("n_layers", int))
        )

    def forward(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer."""
        hidden_TD: Tensor = self.embeddings(batch.token_ids_T, batch.position_ids_T, None)
        for layer in self.layers:
            hidden_TD = layer(hidden_TD, attend)
        return hidden_TD


def distilbert_facts(config: SettingsFile) -> TrunkFacts:
    """Facts of a DistilBERT; sinusoidal positions are stored like learned ones."""
    width = config.required("dim", int)
    return TrunkFacts(
        hidden_size=width,
        vocabulary_size=config.required("vocab_size", int),
        max_positions=config.required("max_position_embeddings", int),
        attention_specs=(attention_spec(config, width, config.required("n_heads", int)),),
    )


FAMILY = Family(facts=distilbert_facts, build=DistilBertTrunk, weights=DISTILBERT_WEIGHTS)
