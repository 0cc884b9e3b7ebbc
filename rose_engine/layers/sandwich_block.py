"""The block with norms on both sides of each half, in the way of Gemma 3: QK-norm, and a GELU gate.

Every norm's weight is stored as its distance from one. Knows no family, no checkpoint names.

Shapes: T packed tokens, D model width, H head width, Q width of a packed qkv row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rose_engine.attention.base import Attend, AttentionSpec
from rose_engine.kernels.gelu_mul import gelu_mul
from rose_engine.kernels.qk_norm_rotary import qk_norm_rotary
from rose_engine.layers.decoder import HeadNorms
from rose_engine.layers.gated import GatedFeedForward
from rose_engine.layers.norm import OffsetRMSNorm
from rose_engine.layers.plain_decoder import BlockSpec, PlainBlock, PlainDecoderShape, RotaryAttention


class OffsetHeadNorms(HeadNorms):
    """Norm weights of query and key heads, stored as their distance from one."""

    def fill_buffers(self, device: torch.device) -> None:  # noqa: ARG002 - the loader's signature
        """Make of the stored weights the ones to multiply with, in float32."""
        self.weight = nn.Parameter(1 + self.weight.float(), requires_grad=False)


class NormedRotaryAttention(RotaryAttention):
    """Query and key heads are normalised before they are rotated."""

    def __init__(self, shape: PlainDecoderShape, spec: AttentionSpec) -> None:
        super().__init__(shape, spec)
        self.qk_norm = OffsetHeadNorms(spec.head_dim)
        self._norm_eps = shape.norm_eps

    def rotate(self, qkv_TQ: Tensor, rotary_TH: Tensor) -> None:
        """Normalise and rotate the query and key heads of `qkv_TQ`, in place."""
        norm_2H, spec = self.qk_norm.weight.view(2, -1), self.spec
        qk_norm_rotary(qkv_TQ, norm_2H, rotary_TH, spec.num_heads, spec.num_kv_heads, self._norm_eps)


class GeluFeedForward(GatedFeedForward):
    """The gated block with a GELU gate, by the tanh approximation."""

    def forward(self, normalised_TD: Tensor) -> Tensor:
        """`[T, D]`, before the norm and the residual."""
        output_TD: Tensor = self.down(gelu_mul(self.gate_up(normalised_TD)))
        return output_TD


class SandwichBlock(PlainBlock):
    """A block whose updates are normalised too, before they are added."""

    norm_type, attention_type, feed_forward_type = OffsetRMSNorm, NormedRotaryAttention, GeluFeedForward

    def __init__(self, shape: PlainDecoderShape, spec: BlockSpec) -> None:
        super().__init__(shape, spec)
        self.attention_update_norm = OffsetRMSNorm(shape.width, shape.norm_eps)
        self.feed_forward_update_norm = OffsetRMSNorm(shape.width, shape.norm_eps)

    def attention_update(self, normalised_TD: Tensor, rotary_TH: Tensor, attend: Attend) -> Tensor:
        """What attention adds to the residual, `[T, D]`."""
        update_TD = super().attention_update(normalised_TD, rotary_TH, attend)
        return self.attention_update_norm.forward(update_TD)

    def feed_forward_update(self, normalised_TD: Tensor) -> Tensor:
        """What the feed-forward block adds to the residual, `[T, D]`."""
        return self.feed_forward_update_norm.forward(super().feed_forward_update(normalised_TD))
