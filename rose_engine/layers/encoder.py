"""Encoder blocks: attention, feed-forward layers, and what normalises and adds them up.

Knows no attention backend: `attend` comes with each call. Shapes: T packed tokens, D model width, N heads,
H head width, Q = 3 * N * H, I width of the feed-forward layer.
"""

from __future__ import annotations

from torch import Tensor, nn

from rose_engine.attention.base import Attend, AttentionSpec
from rose_engine.kernels.rotary import rotate_heads
from rose_engine.layers.activation import Activation
from rose_engine.layers.norm import AddLayerNorm


class SelfAttention(nn.Module):
    """Multi-head attention with the three input projections in one matrix."""

    def __init__(self, width: int, spec: AttentionSpec, *, bias: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * spec.num_heads * spec.head_dim, bias=bias)
        self.output = nn.Linear(spec.num_heads * spec.head_dim, width, bias=bias)
        self._spec = spec

    def forward(self, hidden_TD: Tensor, attend: Attend, rotary_TH: Tensor | None = None) -> Tensor:
        """Attention's output `[T, D]`, projected, before the residual; `rotary_TH` turns queries and keys."""
        spec = self._spec
        qkv_TQ = self.qkv(hidden_TD)
        if rotary_TH is not None:
            rotate_heads(qkv_TQ, rotary_TH, 2 * spec.num_heads)
        q_TNH, k_TNH, v_TNH = qkv_TQ.unflatten(1, (3, spec.num_heads, spec.head_dim)).unbind(1)
        projected_TD: Tensor = self.output(attend(q_TNH, k_TNH, v_TNH, spec).flatten(1))
        return projected_TD


class FeedForward(nn.Module):
    """Two matrices with an activation between them."""

    def __init__(self, width: int, inner_width: int, activation: Activation) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner_width)
        self.down = nn.Linear(inner_width, width)
        self._activation = activation

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """`[T, D]`, before the residual."""
        output_TD: Tensor = self.down(self._activation(self.up(hidden_TD)))
        return output_TD


class GatedUnit(nn.Module):
    """down(activation(gate x) * up x).   (Shazeer, 2020, arXiv:2002.05202)

    Gate and up lie in one matrix, `[2I, D]`; which of them comes first differs from family to family.
    """

    def __init__(
        self,
        width: int,
        inner_width: int,
        activation: Activation,
        *,
        gate_first: bool = True,
        bias: bool = False,
        down_bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner_width, bias=bias)
        self.down = nn.Linear(inner_width, width, bias=down_bias)
        self._activation = activation
        self._gate_first = gate_first

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """`[T, D]`, before the residual."""
        first_TI, second_TI = self.gate_up(hidden_TD).chunk(2, dim=-1)
        gate_TI, up_TI = (first_TI, second_TI) if self._gate_first else (second_TI, first_TI)
        output_TD: Tensor = self.down(self._activation(gate_TI) * up_TI)
        return output_TD


class PostNormLayer(nn.Module):
    """Attention, add and normalise, feed-forward, add and normalise."""

    def __init__(
        self, width: int, attention: SelfAttention, feed_forward: nn.Module, norm_eps: float
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = AddLayerNorm(width, eps=norm_eps)
        self.feed_forward = feed_forward
        self.feed_forward_norm = AddLayerNorm(width, eps=norm_eps)

    def forward(self, hidden_TD: Tensor, attend: Attend, rotary_TH: Tensor | None = None) -> Tensor:
        """Hidden states `[T, D]` to hidden states `[T, D]`."""
        hidden_TD = self.attention_norm(self.attention(hidden_TD, attend, rotary_TH), hidden_TD)
        normed_TD: Tensor = self.feed_forward_norm(self.feed_forward(hidden_TD), hidden_TD)
        return normed_TD


class PreNormLayer(nn.Module):
    """Normalise, attention, add; normalise, feed-forward, add. The first norm may be an identity."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: SelfAttention,
        feed_forward_norm: nn.Module,
        feed_forward: nn.Module,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward

    def forward(self, hidden_TD: Tensor, attend: Attend, rotary_TH: Tensor | None = None) -> Tensor:
        """Hidden states `[T, D]` to hidden states `[T, D]`."""
        hidden_TD = hidden_TD + self.attention(self.attention_norm(hidden_TD), attend, rotary_TH)
        output_TD: Tensor = hidden_TD + self.feed_forward(self.feed_forward_norm(hidden_TD))
        return output_TD


class EncoderLayer(PostNormLayer):
    """The post-norm block of the BERT kind."""

    def __init__(
        self, width: int, inner_width: int, spec: AttentionSpec, activation: Activation, norm_eps: float
    ) -> None:
        feed_forward = FeedForward(width, inner_width, activation)
        super().__init__(width, SelfAttention(width, spec), feed_forward, norm_eps)
