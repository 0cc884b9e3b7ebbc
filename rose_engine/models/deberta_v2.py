"""DeBERTa v2 and v3: BERT's blocks with disentangled attention.   (He et al., 2021, arXiv:2111.09543)

Shapes: T packed tokens, D model width, K buckets of distances.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from rose_engine.attention.base import Attend
from rose_engine.checkpoint import FusedGroup, WeightRules
from rose_engine.errors import CheckpointError
from rose_engine.layers.activation import hidden_activation
from rose_engine.layers.disentangled import DisentangledAttention, DistanceVectors
from rose_engine.layers.embeddings import EncoderEmbeddings
from rose_engine.layers.encoder import FeedForward, PostNormLayer
from rose_engine.models.base import Family, Trunk, TrunkFacts
from rose_engine.models.bert import BERT_RENAMES
from rose_engine.models.encoder_config import attention_spec, require
from rose_engine.settings_file import SettingsFile
from rose_engine.staging import DeviceBatch

DEBERTA_WEIGHTS = WeightRules(
    renames=(
        (r"^deberta\.", ""),
        (r"^encoder\.rel_embeddings\.", "distances.vectors."),
        (r"^encoder\.LayerNorm\.", "distances.norm."),
        *BERT_RENAMES,
    ),
    fused=(FusedGroup("qkv", ("query_proj", "key_proj", "value_proj")),),
    # Where positions are not added to the embeddings, their table may still have been saved.
    ignorable=(
        "pooler.*",
        "cls.*",
        "lm_predictions.*",
        "mask_predictions.*",
        "embeddings.position_ids",
        "embeddings.positions.*",
    ),
)


class DebertaV2Trunk(Trunk):
    """Embeddings, the vectors of distances, and a stack of post-norm blocks."""

    def __init__(self, config: SettingsFile, facts: TrunkFacts) -> None:
        super().__init__()
        width, norm_eps = facts.hidden_size, config.optional("layer_norm_eps", float, 1e-7)
        added_positions = facts.max_positions if config.optional("position_biased_input", bool, True) else 0
        self.embeddings = EncoderEmbeddings(
            width, facts.vocabulary_size, added_positions, _num_segment_rows(config), norm_eps
        )
        normed = "layer_norm" in config.optional("norm_rel_ebd", str, "none").lower()
        self.distances = DistanceVectors(
            width,
            config.required("position_buckets", int),
            _max_distance(config),
            facts.max_positions,
            nn.LayerNorm(width, eps=norm_eps) if normed else nn.Identity(),
        )
        self.layers = nn.ModuleList(
            _layer(config, facts, norm_eps) for _ in range(config.required("num_hidden_layers", int))
        )

    def fill_buffers(self, device: torch.device) -> None:
        """Give every layer its projections of the distances' vectors."""
        vectors_KD, buckets_Q = self.distances(), self.distances.buckets().to(device)
        for layer in cast("Iterable[PostNormLayer]", self.layers):
            cast("DisentangledAttention", layer.attention).adopt_positions(vectors_KD, buckets_Q)

    def forward(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer."""
        hidden_TD: Tensor = self.embeddings(batch.token_ids_T, batch.position_ids_T, batch.segment_ids_T)
        for layer in self.layers:
            hidden_TD = layer(hidden_TD, attend)
        return hidden_TD


def deberta_v2_facts(config: SettingsFile) -> TrunkFacts:
    """Facts of a DeBERTa trunk as published. Raises `CheckpointError` for variants that are none."""
    _refuse_variants(config)
    width, num_heads = config.required("hidden_size", int), config.required("num_attention_heads", int)
    require(config, embedding_size=width, attention_head_size=width // num_heads)
    spec = attention_spec(config, width, num_heads, biased=True)
    return TrunkFacts(
        hidden_size=width,
        vocabulary_size=config.required("vocab_size", int),
        max_positions=config.required("max_position_embeddings", int),
        # Three terms of equal variance add up: the root of 3 H in place of that of H.
        attention_specs=(replace(spec, scale=(3 * spec.head_dim) ** -0.5),),
        num_segments=max(1, _num_segment_rows(config)),
    )


def _layer(config: SettingsFile, facts: TrunkFacts, norm_eps: float) -> PostNormLayer:
    width, (spec,) = facts.hidden_size, facts.attention_specs
    activation = hidden_activation(config.optional("hidden_act", str, "gelu"))
    feed_forward = FeedForward(width, config.required("intermediate_size", int), activation)
    return PostNormLayer(width, DisentangledAttention(width, spec), feed_forward, norm_eps)


def _refuse_variants(config: SettingsFile) -> None:
    for key in ("relative_attention", "share_att_key"):
        if not config.optional(key, bool, False):
            raise CheckpointError(f"{config.path}: {key} false is not supported")
    terms = config.values.get("pos_att_type") or ()
    named = {term.strip() for term in terms.lower().split("|")} if isinstance(terms, str) else set(terms)
    if named != {"c2p", "p2c"}:
        raise CheckpointError(f"{config.path}: pos_att_type {terms!r} is not supported, only 'c2p|p2c'")
    if config.required("position_buckets", int) < 1:
        raise CheckpointError(f"{config.path}: position_buckets must be at least 1")
    require(config, conv_kernel_size=0)


def _max_distance(config: SettingsFile) -> int:
    stated = config.optional("max_relative_positions", int, -1)
    return stated if stated > 0 else config.required("max_position_embeddings", int)


def _num_segment_rows(config: SettingsFile) -> int:
    """Rows of the segment embedding; 0 in models that have none."""
    return config.optional("type_vocab_size", int, 0)


FAMILY = Family(facts=deberta_v2_facts, build=DebertaV2Trunk, weights=DEBERTA_WEIGHTS)
