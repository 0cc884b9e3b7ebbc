"""The reference backend: PyTorch's scaled dot-product attention, for every spec, dtype and device.

Sequences of equal length that lie side by side are computed in one call, without padding. Where the host
does not know the lengths (inside a captured graph) one call computes all T x T scores under a mask: right,
and for small T only.

Shapes: T packed tokens, R sequences of equal length L side by side, N query heads, M key / value heads,
H head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from rose_engine.attention.base import Attend, AttentionSpec, RaggedLayout


class SdpaBackend:
    """`torch.nn.functional.scaled_dot_product_attention` over packed sequences."""

    name = "sdpa"

    def refusal(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:  # noqa: ARG002
        """Never refuses."""
        return None

    def bind(self, layout: RaggedLayout) -> Attend:
        """Attention over the sequences of `layout`."""
        if layout.lengths is None:
            return partial(_attend_masked, layout.cu_lengths)
        return partial(_attend_runs, tuple(_runs(layout.lengths)))


@dataclass(frozen=True, slots=True)
class Run:
    """Sequences of equal length, side by side."""

    start: int  # first token
    count: int  # R
    length: int  # L

    def of(self, packed_TNH: Tensor) -> Tensor:
        """View this run as `[R, N, L, H]`."""
        run_TNH = packed_TNH[self.start : self.start + self.count * self.length]
        return run_TNH.view(self.count, self.length, *packed_TNH.shape[1:]).transpose(1, 2)


def _runs(lengths: tuple[int, ...]) -> Iterator[Run]:
    start = 0
    for length, sequences in groupby(lengths):
        run = Run(start, sum(1 for _ in sequences), length)
        start += run.count * length
        if length:
            yield run


def _attend_runs(
    runs: tuple[Run, ...], q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, spec: AttentionSpec
) -> Tensor:
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    for run in runs:
        mask = _run_mask(run, spec, q_TNH.device)
        attended_RNLH = F.scaled_dot_product_attention(
            run.of(q_TNH),
            run.of(k_TMH),
            run.of(v_TMH),
            attn_mask=mask,
            is_causal=spec.causal and mask is None,
            scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )
        run.of(out_TNH).copy_(attended_RNLH)
    return out_TNH


def _run_mask(run: Run, spec: AttentionSpec, device: torch.device) -> Tensor | None:
    """What must be said as a mask: a bias, a local window; no bias and a causal or full window: `None`."""
    local = not (spec.causal or spec.full)
    if spec.bias is None:
        return _window_mask(run.length, spec.window, device) if local else None
    bias_RNLL = spec.bias.between(run.start, run.count, run.length)
    return bias_RNLL if spec.full else _hide(bias_RNLL, _window_mask(run.length, spec.window, device))


def _attend_masked(
    cu_lengths: Tensor, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, spec: AttentionSpec
) -> Tensor:
    num_tokens = q_TNH.shape[0]
    tokens_T = torch.arange(num_tokens, dtype=cu_lengths.dtype, device=cu_lengths.device)
    # Spare tokens lie behind the last bound and form a sequence of their own.
    sequence_T = torch.searchsorted(cu_lengths[1:], tokens_T, right=True)
    mask_TT = sequence_T[:, None] == sequence_T[None, :]
    if not spec.full:
        mask_TT = mask_TT & _window_mask(num_tokens, spec.window, cu_lengths.device)
    mask = mask_TT if spec.bias is None else _hide(spec.bias.between(0, 1, num_tokens), mask_TT)
    q_NTH, k_MTH, v_MTH = (x.transpose(0, 1)[None] for x in (q_TNH, k_TMH, v_TMH))
    out_NTH = F.scaled_dot_product_attention(
        q_NTH,
        k_MTH,
        v_MTH,
        attn_mask=mask,
        scale=spec.scale,
        enable_gqa=spec.num_heads != spec.num_kv_heads,
    )
    return out_NTH[0].transpose(0, 1)


def _window_mask(length: int, window: tuple[int, int], device: torch.device) -> Tensor:
    """Which keys each query sees, `[L, L]`: `left` tokens back, `right` ahead; -1 is without bound."""
    left, right = window
    tokens_L = torch.arange(length, device=device)
    ahead_LL = tokens_L[None, :] - tokens_L[:, None]
    mask_LL = torch.ones_like(ahead_LL, dtype=torch.bool)
    if left >= 0:
        mask_LL &= ahead_LL >= -left
    if right >= 0:
        mask_LL &= ahead_LL <= right
    return mask_LL


def _hide(bias_RNLL: Tensor, visible_LL: Tensor) -> Tensor:
    """The bias where a key is visible, minus infinity elsewhere."""
    return bias_RNLL.masked_fill(~visible_LL, float("-inf"))
