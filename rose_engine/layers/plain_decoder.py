"""The pre-norm gated decoder stack for families that need no more than one way to run it.

Blocks may differ in their attention window and rotary basis; a family may bring a block of its own. The stack
with query and key norms, folded weights and several paths is `layers/decoder.py`. Knows no attention backend
(`attend` comes with each call), no family, no checkpoint names.

Shapes: T packed tokens, D model width, N query heads, M key / value heads, H head width, Q = (N + 2M) * H,
I inner width, P positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose_engine.attention.base import Attend, AttentionSpec
from rose_engine.kernels.rotary import rotate_heads
from rose_engine.kernels.silu_mul import silu_mul
from rose_engine.layers.gated import GatedFeedForward
from rose_engine.layers.norm import RMSNorm
from rose_engine.layers.rotary import RotarySpec
from rose_engine.staging import DeviceBatch


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """What one block may have to itself."""

    attention: AttentionSpec
    rotary: RotarySpec


@dataclass(frozen=True, slots=True)
class PlainDecoderShape:
    """The numbers of a stack."""

    width: int  # D
    inner_width: int  # I
    vocabulary_size: int
    norm_eps: float
    blocks: tuple[BlockSpec, ...]
    qkv_bias: bool = False
    output_bias: bool = False


class RotaryAttention(nn.Module):
    """Attention over rotated query and key heads, the three input projections in one matrix."""

    def __init__(self, shape: PlainDecoderShape, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        qkv_width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv = nn.Linear(shape.width, qkv_width, bias=shape.qkv_bias)
        self.output = nn.Linear(spec.num_heads * spec.head_dim, shape.width, bias=shape.output_bias)

    def forward(self, normalised_TD: Tensor, rotary_TH: Tensor, attend: Attend) -> Tensor:
        """Attention's output `[T, D]`, projected, before the residual."""
        spec = self.spec
        qkv_TQ = self.qkv(normalised_TD)
        self.rotate(qkv_TQ, rotary_TH)
        heads = qkv_TQ.view(len(qkv_TQ), -1, spec.head_dim)
        q_TNH, k_TMH, v_TMH = torch.split(
            heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1
        )
        projected_TD: Tensor = self.output(attend(q_TNH, k_TMH, v_TMH, spec).flatten(1))
        return projected_TD

    def rotate(self, qkv_TQ: Tensor, rotary_TH: Tensor) -> None:
        """Turn the query and key heads of `qkv_TQ` by their positions, in place."""
        rotate_heads(qkv_TQ, rotary_TH, self.spec.num_heads + self.spec.num_kv_heads)


class SiluFeedForward(GatedFeedForward):
    """The gated block with a SiLU gate."""

    def forward(self, normalised_TD: Tensor) -> Tensor:
        """`[T, D]`, before the residual."""
        output_TD: Tensor = self.down(silu_mul(self.gate_up(normalised_TD)))
        return output_TD


class PlainBlock(nn.Module):
    """Attention, then the feed-forward block, each after its norm. A family may bring other parts."""

    norm_type: ClassVar[type[RMSNorm]] = RMSNorm
    attention_type: ClassVar[type[RotaryAttention]] = RotaryAttention
    feed_forward_type: ClassVar[type[GatedFeedForward]] = SiluFeedForward

    def __init__(self, shape: PlainDecoderShape, spec: BlockSpec) -> None:
        super().__init__()
        self.rotary = spec.rotary
        self.attention_norm = self.norm_type(shape.width, shape.norm_eps)
        self.attention = self.attention_type(shape, spec.attention)
        self.feed_forward_norm = self.norm_type(shape.width, shape.norm_eps)
        self.feed_forward = self.feed_forward_type(shape.width, shape.inner_width)

    def forward(
        self, normalised_TD: Tensor, residual_TD: Tensor, rotary_TH: Tensor, attend: Attend
    ) -> Tensor:
        """From rows that `attention_norm` normalised to the update `[T, D]` that is still to be added.

        Attention's own update is added to `residual_TD` in place.
        """
        update_TD = self.attention_update(normalised_TD, rotary_TH, attend)
        return self.feed_forward_update(self.feed_forward_norm.after_adding(update_TD, residual_TD))

    def attention_update(self, normalised_TD: Tensor, rotary_TH: Tensor, attend: Attend) -> Tensor:
        """What attention adds to the residual, `[T, D]`."""
        update_TD: Tensor = self.attention(normalised_TD, rotary_TH, attend)
        return update_TD

    def feed_forward_update(self, normalised_TD: Tensor) -> Tensor:
        """What the feed-forward block adds to the residual, `[T, D]`."""
        update_TD: Tensor = self.feed_forward(normalised_TD)
        return update_TD


class PlainDecoderStack(nn.Module):
    """Embedding, blocks, final norm. Every block's last sum is one kernel with the norm that follows it."""

    def __init__(self, shape: PlainDecoderShape, block: type[PlainBlock] = PlainBlock) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary_size, shape.width)
        self.layers = nn.ModuleList(block(shape, spec) for spec in shape.blocks)
        self.norm = block.norm_type(shape.width, shape.norm_eps)
        self._bases = tuple(dict.fromkeys(spec.rotary for spec in shape.blocks))
        self._tables: dict[RotarySpec, Tensor] = {}

    def fill_buffers(self, device: torch.device) -> None:
        """Compute one rotary table `[P, H]` for every basis."""
        self._tables = {basis: basis.table(self.tokens.weight.dtype, device) for basis in self._bases}

    def forward(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last block, after the final norm."""
        rotary = {basis: F.embedding(batch.position_ids_T, table) for basis, table in self._tables.items()}
        blocks = list(cast("Iterable[PlainBlock]", self.layers))
        residual_TD = F.embedding(batch.token_ids_T, self.tokens.weight)
        normalised_TD: Tensor = blocks[0].attention_norm(residual_TD)
        for block, next_norm in zip(blocks, self._next_norms(blocks), strict=True):
            update_TD = block(normalised_TD, residual_TD, rotary[block.rotary], attend)
            normalised_TD = next_norm.after_adding(update_TD, residual_TD)
        return normalised_TD

    def _next_norms(self, blocks: list[PlainBlock]) -> list[RMSNorm]:
        """The norm after each block: the next one's first, and the stack's own after the last."""
        return [*(block.attention_norm for block in blocks[1:]), self.norm]
