"""Rotary position embedding of query and key heads, in place on packed qkv rows.

    (a, b) -> (a cos - b sin, b cos + a sin)     a, b: the two halves of a head
                                                 (Su et al., 2021, arXiv:2104.09864, half-split layout)

T packed tokens, H head width, X heads of a row (query, key, value), Q = X * H. A rotary row is H elements:
H / 2 cosines, then H / 2 sines, of one token's position. Knows nothing of norms; `qk_norm_rotary` does both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose_engine.kernels.launch import (
    assert_rows,
    block_size,
    ceil_div,
    device_pdl,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    launch_options,
    runs_triton,
    tl,
)

_TOKENS, _HEADS = 2, 8  # a program, as for `qk_norm_rotary`


def rotate_heads(qkv_TQ: Tensor, rotary_TH: Tensor, num_rotated: int, pdl: bool = False) -> None:
    """Rotate the first `num_rotated` heads of every row of `qkv_TQ`, `[T, X * H]`, in place."""
    if not runs_triton(qkv_TQ):
        rotate_heads_twin(qkv_TQ, rotary_TH, num_rotated)
        return
    assert_rows(qkv_TQ, rotary_TH)
    T, H = rotary_TH.shape
    _rotate_heads[(ceil_div(T, _TOKENS), ceil_div(num_rotated, _HEADS))](
        qkv_TQ,
        rotary_TH,
        T,
        qkv_TQ.shape[1],
        num_rotated,
        H // 2,
        _TOKENS,
        _HEADS,
        block_size(H // 2),
        device_pdl(pdl),
        **launch_options(pdl, num_warps=4),
    )


def rotate_heads_twin(qkv_TQ: Tensor, rotary_TH: Tensor, num_rotated: int) -> None:
    """`rotate_heads` in torch."""
    heads_TXH = qkv_TQ.view(len(qkv_TQ), -1, rotary_TH.shape[1])[:, :num_rotated]
    a, b = heads_TXH.float().chunk(2, dim=-1)
    cos, sin = rotary_TH.float()[:, None].chunk(2, dim=-1)
    heads_TXH.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))


@jit
def _rotate_heads(
    qkv: tl.tensor,
    rotary: tl.tensor,
    T: tl.tensor,
    Q: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    pair = tl.arange(0, TOKENS * HEADS)
    token = (tl.program_id(0) * TOKENS + pair // HEADS).to(tl.int64)[:, None]
    head = (tl.program_id(1) * HEADS + pair % HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    here = (token < T) & (head < ROTATED) & (column < HALF)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = qkv + token * Q + head * (2 * HALF) + column
    a = tl.load(at, mask=here, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=here, other=0.0).to(tl.float32)
    cos = tl.load(rotary + token * (2 * HALF) + column, mask=here, other=0.0).to(tl.float32)
    sin = tl.load(rotary + token * (2 * HALF) + HALF + column, mask=here, other=0.0).to(tl.float32)
    tl.store(at, (a * cos - b * sin).to(qkv.dtype.element_ty), mask=here)
    tl.store(at + HALF, (b * cos + a * sin).to(qkv.dtype.element_ty), mask=here)
