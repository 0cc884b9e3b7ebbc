"""Attention of every packed sequence over itself, causal or full, without padding and without a key cache.

Online softmax (Milakov and Gimelshein, 2018, arXiv:1805.02867) over tiles of keys, as FlashAttention orders
it (Dao, 2023, arXiv:2307.08691). Made for small batches, where launches and latency decide; libraries are
faster from a few thousand tokens on.

T packed tokens, B sequences, N query heads, M key / value heads, H head width. Knows no window but these two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rose_engine.kernels.launch import (
    block_size,
    ceil_div,
    device_pdl,
    gdc_launch_dependents,
    gdc_wait,
    inline,
    jit,
    launch_options,
    runs_triton,
    tl,
)

_SMALLEST_DOT = 16  # Triton's least extent of a matrix product


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """How one program works: `rows` queries against `keys` keys at a time.

    `early` issues the next tile's q k^T before this tile's softmax and masks the last tile only, which is
    right only when no earlier tile reaches past the diagonal: `keys` must be a multiple of `rows`.
    """

    rows: int
    keys: int
    stages: int
    num_warps: int = 4
    early: bool = False

    def __post_init__(self) -> None:
        if self.early and self.keys % self.rows:
            raise ValueError(f"keys: {self.keys} is no multiple of rows ({self.rows}), which early needs")


@dataclass(frozen=True, slots=True, eq=False)
class DeferredNorm:
    """QK-norm's division, left to attention: q and k come multiplied by their norm weights only.

    `head_sums_TS` float32: sums of squares of each q, then k, then v head before those weights, one or more
    adjacent columns a head (S = (N + 2 M) times that many).
    """

    head_sums_TS: Tensor
    epsilon: float


# Fastest on an H200 for 16 / 8 heads of 128, causal, in microseconds: 4.35 at 1 x 128; 9.4 at 1 x 512, where
# the plain loop takes 11.9; 111 at 25 x 512, where the early one takes 163.
_SHORT_TILE = AttentionTile(rows=64, keys=128, stages=2)
_SMALL_BATCH_TILE = AttentionTile(rows=64, keys=64, stages=3, early=True)
_LARGE_BATCH_TILE = AttentionTile(rows=64, keys=64, stages=3)
# Float32, or heads wider than 128: three stages of 64 keys would not fit a multiprocessor's shared memory.
_WIDE_TILE = AttentionTile(rows=64, keys=32, stages=2)
_WIDE_HEAD_BYTES = 256
_SHORT_LENGTH = 128
_SMALL_BATCH_TOKENS = 2048


def choose_tile(num_tokens: int, max_length: int, head_bytes: int) -> AttentionTile:
    """The tile for about this many tokens in all and in the longest sequence, and heads of this size."""
    if head_bytes > _WIDE_HEAD_BYTES:
        return _WIDE_TILE
    if max_length <= _SHORT_LENGTH:
        return _SHORT_TILE
    return _SMALL_BATCH_TILE if num_tokens <= _SMALL_BATCH_TOKENS else _LARGE_BATCH_TILE


def ragged_attention(
    q_TNH: Tensor,
    k_TMH: Tensor,
    v_TMH: Tensor,
    cu_lengths: Tensor,
    max_length: int,
    scale: float,
    causal: bool,
    tile: AttentionTile | None = None,
    pdl: bool = False,
    norm: DeferredNorm | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v within each sequence, `[T, N, H]`; rows of spare tokens are undefined.

    q, k and v may be views of packed rows: heads adjacent, any distance from token to token.
    `max_length` is an upper bound of the lengths in `cu_lengths`, int32 `[B + 1]`. `norm`: q and k still lack
    their RMSNorm's division.
    """
    if not runs_triton(q_TNH):
        return ragged_attention_twin(q_TNH, k_TMH, v_TMH, cu_lengths, max_length, scale, causal, norm)
    _assert_adjacent_heads(q_TNH, k_TMH, v_TMH)
    T, N, H = q_TNH.shape
    tile = tile or choose_tile(T, max_length, H * q_TNH.element_size())
    num_blocks = ceil_div(max_length, tile.rows)
    sums_per_head = 0 if norm is None else norm.head_sums_TS.shape[1] // (N + 2 * k_TMH.shape[1])
    out_TNH = torch.empty(T, N, H, dtype=q_TNH.dtype, device=q_TNH.device)
    _ragged_attention[((cu_lengths.shape[0] - 1) * num_blocks, N)](
        q_TNH,
        k_TMH,
        v_TMH,
        out_TNH,
        cu_lengths,
        q_TNH if norm is None else norm.head_sums_TS,
        num_blocks,
        scale * math.log2(math.e),
        0.0 if norm is None else norm.epsilon,
        q_TNH.stride(0),
        k_TMH.stride(0),
        v_TMH.stride(0),
        N,
        N // k_TMH.shape[1],
        sums_per_head,
        H,
        max(_SMALLEST_DOT, block_size(H)),
        causal,
        tile.early,
        "ieee" if q_TNH.dtype == torch.float32 else "tf32",
        tile.rows,
        tile.keys,
        tile.stages,
        device_pdl(pdl),
        **launch_options(pdl, tile.num_warps, tile.stages),
    )
    return out_TNH


def ragged_attention_twin(
    q_TNH: Tensor,
    k_TMH: Tensor,
    v_TMH: Tensor,
    cu_lengths: Tensor,
    max_length: int,  # noqa: ARG001 - the launcher's signature
    scale: float,
    causal: bool,
    norm: DeferredNorm | None = None,
) -> Tensor:
    """`ragged_attention` in torch: one sequence after the other, in float32; spare rows are zero."""
    out_TNH = torch.zeros(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    group = q_TNH.shape[1] // k_TMH.shape[1]
    if norm is not None:
        q_TNH, k_TMH = _finish_norm(q_TNH, k_TMH, norm)
    bounds = cu_lengths.tolist()
    for first, end in pairwise(bounds):
        q = q_TNH[first:end].float()
        k, v = (x[first:end].float().repeat_interleave(group, dim=1) for x in (k_TMH, v_TMH))
        scores = torch.einsum("inh,jnh->nij", q, k) * scale
        if causal:
            future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        out_TNH[first:end] = torch.einsum("nij,jnh->inh", scores.softmax(-1), v).to(q_TNH.dtype)
    return out_TNH


def _finish_norm(q_TNH: Tensor, k_TMH: Tensor, norm: DeferredNorm) -> tuple[Tensor, Tensor]:
    N, M, H = q_TNH.shape[1], k_TMH.shape[1], q_TNH.shape[2]
    sums_TC = norm.head_sums_TS.reshape(len(q_TNH), N + 2 * M, -1).sum(-1)
    inverse_TC1 = torch.rsqrt(sums_TC / H + norm.epsilon)[..., None]
    return q_TNH * inverse_TC1[:, :N], k_TMH * inverse_TC1[:, N : N + M]


def _assert_adjacent_heads(*tensors: Tensor) -> None:
    for tensor in tensors:
        adjacent = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
        assert adjacent, "a token's heads must be adjacent"


@inline
def _load_rows(
    base: tl.tensor,
    row: tl.tensor,
    stride: tl.tensor,
    length: tl.tensor,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GUARD: tl.constexpr,
) -> tl.tensor:
    """Rows of one head, `[rows, BLOCK_H]`; without GUARD every row must lie inside the sequence."""
    column = tl.arange(0, BLOCK_H)
    at = base + row[:, None] * stride + column[None, :]
    if GUARD and BLOCK_H == H:
        return tl.load(at, mask=(row < length)[:, None], other=0.0)
    if GUARD:
        return tl.load(at, mask=(row < length)[:, None] & (column < H)[None, :], other=0.0)
    if BLOCK_H == H:
        return tl.load(at)
    return tl.load(at, mask=(column < H)[None, :], other=0.0)


@inline
def _inverse_rms(
    sums: tl.tensor,
    row: tl.tensor,
    stride: tl.tensor,
    length: tl.tensor,
    epsilon: tl.tensor,
    SUMS: tl.constexpr,
    H: tl.constexpr,
) -> tl.tensor:
    """What a deferred norm multiplies a head's rows by, from SUMS partial sums of squares each (0: ones)."""
    if SUMS == 0:
        return tl.full(row.shape, 1.0, tl.float32)
    total = tl.zeros_like(row).to(tl.float32)
    for part in tl.static_range(SUMS):
        total += tl.load(sums + row.to(tl.int64) * stride + part, mask=row < length, other=1.0)
    return tl.rsqrt(total / H + epsilon)


@inline
def _scale_scores(scores: tl.tensor, q_scale: tl.tensor, k_scale: tl.tensor, SUMS: tl.constexpr) -> tl.tensor:
    scores = scores * q_scale[:, None]
    if SUMS == 0:
        return scores
    return scores * k_scale[None, :]


@inline
def _accumulate(
    scores: tl.tensor,
    v: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of the online softmax, base 2."""
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    p = tl.exp2(scores - new_highest[:, None])
    decay = tl.exp2(highest - new_highest)
    total = total * decay + tl.sum(p, 1)
    out = tl.dot(p.to(v.dtype), v, out * decay[:, None], input_precision=PRECISION)
    return new_highest, total, out


@jit
def _ragged_attention(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    outputs: tl.tensor,
    cu_lengths: tl.tensor,
    head_sums: tl.tensor,
    num_blocks: tl.tensor,
    scale: tl.tensor,
    epsilon: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    SUMS: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CAUSAL: tl.constexpr,
    EARLY: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    sequence = tl.program_id(0) // num_blocks
    block = num_blocks - 1 - tl.program_id(0) % num_blocks  # the longest rows of a causal sequence first
    head = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    start = tl.load(cu_lengths + sequence).to(tl.int64)
    length = (tl.load(cu_lengths + sequence + 1) - start).to(tl.int32)
    if PDL:
        gdc_wait()
    if block * ROWS < length:
        row = block * ROWS + tl.arange(0, ROWS)
        queries += start * q_stride + head * H
        keys += start * k_stride + (head // GROUP) * H
        values += start * v_stride + (head // GROUP) * H
        q = _load_rows(queries, row, q_stride, length, H, BLOCK_H, True)
        end = tl.minimum((block + 1) * ROWS, length) if CAUSAL else length
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        out = tl.zeros((ROWS, BLOCK_H), tl.float32)
        column = tl.arange(0, KEYS)
        sums_stride = (N + 2 * (N // GROUP)) * SUMS
        head_sums += start * sums_stride
        key_sums = head_sums + (N + head // GROUP) * SUMS
        q_scale = _inverse_rms(head_sums + head * SUMS, row, sums_stride, length, epsilon, SUMS, H) * scale
        if EARLY:
            k = _load_rows(keys, column, k_stride, length, H, BLOCK_H, True)
            scores = tl.dot(q, k.T, input_precision=PRECISION)
            for first in tl.range(KEYS, end, KEYS, num_stages=STAGES):
                k = _load_rows(keys, first + column, k_stride, length, H, BLOCK_H, True)
                next_scores = tl.dot(q, k.T, input_precision=PRECISION)
                key = first - KEYS + column
                v = _load_rows(values, key, v_stride, length, H, BLOCK_H, False)
                k_scale = _inverse_rms(key_sums, key, sums_stride, length, epsilon, SUMS, H)
                scores = _scale_scores(scores, q_scale, k_scale, SUMS)
                highest, total, out = _accumulate(scores, v, highest, total, out, PRECISION)
                scores = next_scores
            key = (tl.cdiv(end, KEYS) - 1) * KEYS + column
            v = _load_rows(values, key, v_stride, length, H, BLOCK_H, True)
            k_scale = _inverse_rms(key_sums, key, sums_stride, length, epsilon, SUMS, H)
            scores = _scale_scores(scores, q_scale, k_scale, SUMS)
            visible = row[:, None] >= key[None, :] if CAUSAL else (key < length)[None, :]
            scores = tl.where(visible, scores, float("-inf"))
            highest, total, out = _accumulate(scores, v, highest, total, out, PRECISION)
        else:
            for first in tl.range(0, end, KEYS, num_stages=STAGES):
                key = first + column
                k = _load_rows(keys, key, k_stride, length, H, BLOCK_H, True)
                v = _load_rows(values, key, v_stride, length, H, BLOCK_H, True)
                scores = tl.dot(q, k.T, input_precision=PRECISION)
                k_scale = _inverse_rms(key_sums, key, sums_stride, length, epsilon, SUMS, H)
                scores = _scale_scores(scores, q_scale, k_scale, SUMS)
                visible = row[:, None] >= key[None, :] if CAUSAL else (key < length)[None, :]
                scores = tl.where(visible, scores, float("-inf"))
                highest, total, out = _accumulate(scores, v, highest, total, out, PRECISION)
        wide = tl.arange(0, BLOCK_H)
        at = outputs + (start + row[:, None]) * (N * H) + head * H + wide[None, :]
        here = (row < length)[:, None] & (wide < H)[None, :]
        tl.store(at, (out / total[:, None]).to(outputs.dtype.element_ty), mask=here)
