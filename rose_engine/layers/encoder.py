"""The post-norm encoder block: attention, add and normalise, feed-forward, add and normalise.

Knows no attention backend: `attend` comes with each call. Shapes: T packed tokens, D model width, N heads,
H head width, I width of the feed-forward layer.
"""

from __future__ import annotations

from torch import Tensor, nn

from rose_engine.attention.base import Attend, AttentionSpec
from rose_engine.layers.activation import Activation


class SelfAttention(nn.Module):
    """Multi-head attention with the three input projections in one matrix."""

    def __init__(self, width: int, spec: AttentionSpec) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * spec.num_heads * spec.head_dim)
        self.output = nn.Linear(spec.num_heads * spec.head_dim, width)
        self._spec = spec

    def forward(self, hidden_TD: Tensor, attend: Attend) -> Tensor:
        """Attention's output `[T, D]`, projected, before the residual."""
        spec = self._spec
        qkv_T3NH = self.qkv(hidden_TD).unflatten(1, (3, spec.num_heads, spec.head_dim))
        q_TNH, k_TNH, v_TNH = qkv_T3NH.unbind(1)
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


class EncoderLayer(nn.Module):
    """One post-norm block."""

    def __init__(
        self, width: int, inner_width: int, spec: AttentionSpec, activation: Activation, norm_eps: float
    ) -> None:
        super().__init__()
        self.attention = SelfAttention(width, spec)
        self.attention_norm = nn.LayerNorm(width, eps=norm_eps)
        self.feed_forward = FeedForward(width, inner_width, activation)
        self.feed_forward_norm = nn.LayerNorm(width, eps=norm_eps)

    def forward(self, hidden_TD: Tensor, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` to hidden states `[T, D]`."""
        hidden_TD = self.attention_norm(hidden_TD + self.attention(hidden_TD, attend))
        normed_TD: Tensor = self.feed_forward_norm(hidden_TD + self.feed_forward(hidden_TD))
        return normed_TD
