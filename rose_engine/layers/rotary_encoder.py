"""The encoder of BERT's post-norm blocks with rotary positions and gated units.

Shapes: T packed tokens, D model width, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from rose_engine.attention.base import Attend, AttentionSpec
from rose_engine.layers.activation import Activation
from rose_engine.layers.embeddings import EncoderEmbeddings
from rose_engine.layers.encoder import GatedUnit, PostNormLayer, SelfAttention
from rose_engine.layers.rotary import RotarySpec
from rose_engine.layers.rotary_table import RotaryTable
from rose_engine.staging import DeviceBatch


@dataclass(frozen=True, slots=True)
class RotaryEncoderShape:
    """What such encoders differ in."""

    width: int  # D
    inner_width: int
    num_layers: int
    vocabulary_size: int
    num_segments: int  # 0: the model has no segment embedding
    attention: AttentionSpec
    rotary: RotarySpec
    activation: Activation
    norm_eps: float
    attention_bias: bool
    down_bias: bool
    gate_first: bool


class RotaryEncoder(nn.Module):
    """Embeddings without positions, and a stack of post-norm blocks."""

    def __init__(self, shape: RotaryEncoderShape) -> None:
        super().__init__()
        self.embeddings = EncoderEmbeddings(
            shape.width, shape.vocabulary_size, 0, shape.num_segments, shape.norm_eps
        )
        self.rotary = RotaryTable(shape.rotary)
        self.layers = nn.ModuleList(_layer(shape) for _ in range(shape.num_layers))

    def forward(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer."""
        hidden_TD: Tensor = self.embeddings(batch.token_ids_T, batch.position_ids_T, batch.segment_ids_T)
        rotary_TH = self.rotary(batch.position_ids_T)
        for layer in self.layers:
            hidden_TD = layer(hidden_TD, attend, rotary_TH)
        return hidden_TD


def _layer(shape: RotaryEncoderShape) -> PostNormLayer:
    attention = SelfAttention(shape.width, shape.attention, bias=shape.attention_bias)
    feed_forward = GatedUnit(
        shape.width,
        shape.inner_width,
        shape.activation,
        gate_first=shape.gate_first,
        down_bias=shape.down_bias,
    )
    return PostNormLayer(shape.width, attention, feed_forward, shape.norm_eps)
