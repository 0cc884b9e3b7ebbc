"""RMSNorm of every query and key head, then rotary position embedding, in place on packed qkv rows.

    (a, b) -> (a cos - b sin, b cos + a sin)     a, b: the two halves of a head
                                                 (Su et al., 2021, arXiv:2104.09864, half-split layout)

T packed tokens, N query heads, M key / value heads, H head width. A rotary row is H elements: H / 2 cosines,
then H / 2 sines, of one token's position. Knows nothing of sequences.
"""

from __future__ import annotations

import math

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

_HEADS_PER_PROGRAM = (
    8  # with two tokens and four warps: 16 bytes a thread and access; 42 us for 12,800 tokens
)
_ROWS_PER_PROGRAM = 16  # tokens x heads


def qk_norm_rotary(
    qkv_TQ: Tensor,
    qk_norm_2H: Tensor,
    rotary_TH: Tensor,
    num_heads: int,
    num_kv_heads: int,
    epsilon: float,
    residual_TD: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Normalise and rotate the query and key heads of `qkv_TQ`, `[T, (N + 2M) * H]`, in place.

    `qk_norm_2H` holds the query heads' norm weight, then the key heads'. With `residual_TD`, qkv was computed
    from that residual without its RMSNorm: every row, value heads included, is first multiplied by its
    residual's inverse root mean square.
    """
    if not runs_triton(qkv_TQ):
        qk_norm_rotary_twin(qkv_TQ, qk_norm_2H, rotary_TH, num_heads, num_kv_heads, epsilon, residual_TD)
        return
    assert_rows(qkv_TQ, qk_norm_2H, rotary_TH, residual_TD)
    T, H = rotary_TH.shape
    scaled = residual_TD is not None
    heads = math.gcd(math.gcd(num_heads, num_kv_heads), _HEADS_PER_PROGRAM)
    tokens = _ROWS_PER_PROGRAM // heads
    width = qkv_TQ.shape[1] if residual_TD is None else residual_TD.shape[1]
    num_groups = (num_heads + num_kv_heads * (2 if scaled else 1)) // heads
    _qk_norm_rotary[(ceil_div(T, tokens), num_groups)](
        qkv_TQ,
        qk_norm_2H,
        rotary_TH,
        qkv_TQ if residual_TD is None else residual_TD,
        T,
        epsilon,
        num_heads,
        num_kv_heads,
        H // 2,
        width,
        scaled,
        tokens,
        heads,
        block_size(H // 2),
        block_size(width),
        device_pdl(pdl),
        **launch_options(pdl, num_warps=4),
    )


def qk_norm_rotary_twin(
    qkv_TQ: Tensor,
    qk_norm_2H: Tensor,
    rotary_TH: Tensor,
    num_heads: int,
    num_kv_heads: int,
    epsilon: float,
    residual_TD: Tensor | None = None,
) -> None:
    """`qk_norm_rotary` in torch."""
    T, H = rotary_TH.shape
    heads = qkv_TQ.view(T, num_heads + 2 * num_kv_heads, H)
    values = heads.float()
    if residual_TD is not None:
        mean_square_T = residual_TD.float().pow(2).mean(-1)
        values = values * torch.rsqrt(mean_square_T + epsilon)[:, None, None]
        heads.copy_(values)
    for first, count, norm_H in ((0, num_heads, qk_norm_2H[0]), (num_heads, num_kv_heads, qk_norm_2H[1])):
        part = values[:, first : first + count]
        normalised = part * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + epsilon) * norm_H.float()
        heads[:, first : first + count].copy_(_rotate(normalised, rotary_TH.float()[:, None]))


def _rotate(heads: Tensor, rotary: Tensor) -> Tensor:
    a, b = heads.chunk(2, dim=-1)
    cos, sin = rotary.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@jit
def _qk_norm_rotary(
    qkv: tl.tensor,
    qk_norm: tl.tensor,
    rotary: tl.tensor,
    residual: tl.tensor,
    T: tl.tensor,
    epsilon: tl.tensor,
    N: tl.constexpr,
    M: tl.constexpr,
    HALF: tl.constexpr,
    D: tl.constexpr,
    SCALED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    first_token = tl.program_id(0) * TOKENS
    first_head = tl.program_id(1) * HEADS  # HEADS divides N and M: a program's heads are of one kind
    pair = tl.arange(0, TOKENS * HEADS)
    token = (first_token + pair // HEADS).to(tl.int64)[:, None]
    head = (first_head + pair % HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < HALF
    here = (token < T) & inside
    norm = qk_norm + (first_head // N) * (2 * HALF) + column
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = qkv + token * ((N + 2 * M) * 2 * HALF) + head * (2 * HALF) + column
    a = tl.load(at, mask=here, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=here, other=0.0).to(tl.float32)
    if SCALED:
        row = (first_token + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
        wide = tl.arange(0, BLOCK_D)[None, :]
        x = tl.load(residual + row * D + wide, mask=(row < T) & (wide < D), other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + epsilon)
        scale = tl.reshape(tl.broadcast_to(scale[:, None], (TOKENS, HEADS)), (TOKENS * HEADS,))[:, None]
        a *= scale
        b *= scale
    if first_head < N + M:
        inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + epsilon)[:, None]
        a = a * inverse * tl.load(norm, mask=inside, other=0.0).to(tl.float32)
        b = b * inverse * tl.load(norm + HALF, mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(rotary + token * (2 * HALF) + column, mask=here, other=0.0).to(tl.float32)
        sin = tl.load(rotary + token * (2 * HALF) + HALF + column, mask=here, other=0.0).to(tl.float32)
        a, b = a * cos - b * sin, b * cos + a * sin
    tl.store(at, a.to(qkv.dtype.element_ty), mask=here)
    tl.store(at + HALF, b.to(qkv.dtype.element_ty), mask=here)
