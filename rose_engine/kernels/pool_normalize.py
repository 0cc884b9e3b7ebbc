"""Packed hidden states to one float32 row per sequence: final RMSNorm, pooling, unit length.

T packed tokens (spare ones behind the last sequence are never read), B sequences, D model width. A sequence
of no tokens (a spare slot of a captured graph) gets zeros or a neighbour's row. Knows nothing of models.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from rose_engine.kernels.launch import (
    assert_rows,
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

Pooling = Literal["first", "last", "mean"]

_CHUNK = 256  # tokens that one program sums
_ELEMENTS_PER_PROGRAM = 4096
_SMALLEST_NORM = 1e-12  # as `torch.nn.functional.normalize`


def pool_normalize(
    hidden_TD: Tensor,
    cu_lengths: Tensor,
    max_length: int,
    pooling: Pooling,
    norm_weight_D: Tensor | None = None,
    epsilon: float = 0.0,
    unit_length: bool = True,
    pdl: bool = False,
) -> Tensor:
    """float32 `[B, D]`: the first, the last or the mean of each sequence's rows.

    With `norm_weight_D`, rows pass through RMSNorm (weight, `epsilon`) before they are pooled.
    """
    if not runs_triton(hidden_TD):
        return pool_normalize_twin(
            hidden_TD, cu_lengths, max_length, pooling, norm_weight_D, epsilon, unit_length
        )
    assert_rows(hidden_TD, cu_lengths, norm_weight_D)
    T, D = hidden_TD.shape
    B = cu_lengths.shape[0] - 1
    block = block_size(D)
    weight = hidden_TD if norm_weight_D is None else norm_weight_D
    norm = (epsilon, D, norm_weight_D is not None, block)
    options = launch_options(pdl, num_warps=4 if block <= _ELEMENTS_PER_PROGRAM else 8)
    pooled_BD = torch.empty(B, D, dtype=torch.float32, device=hidden_TD.device)
    if pooling != "mean":
        last = pooling == "last"
        _pool_token[(B,)](
            hidden_TD, weight, cu_lengths, pooled_BD, *norm, last, unit_length, device_pdl(pdl), **options
        )
        return pooled_BD
    # Chunk c of sequence b has slot cu_lengths[b] // _CHUNK + b + c: no two share one, and no slot depends on
    # the batch's longest sequence.
    slots = torch.empty(T // _CHUNK + B + 1, D, dtype=torch.float32, device=hidden_TD.device)
    rows = max(1, min(8, _ELEMENTS_PER_PROGRAM // block))
    _sum_chunk[(B, ceil_div(max_length, _CHUNK))](
        hidden_TD, weight, cu_lengths, slots, *norm, rows, _CHUNK, device_pdl(pdl), **options
    )
    _mean_of_chunks[(B,)](
        slots, cu_lengths, pooled_BD, D, block, _CHUNK, unit_length, device_pdl(pdl), **options
    )
    return pooled_BD


def pool_normalize_twin(
    hidden_TD: Tensor,
    cu_lengths: Tensor,
    max_length: int,  # noqa: ARG001 - the launcher's signature
    pooling: Pooling,
    norm_weight_D: Tensor | None = None,
    epsilon: float = 0.0,
    unit_length: bool = True,
) -> Tensor:
    """`pool_normalize` in torch."""
    first_B, end_B = cu_lengths[:-1].long(), cu_lengths[1:].long()
    if pooling == "mean":
        tokens_TD = _normalise(hidden_TD[: int(end_B[-1])].float(), norm_weight_D, epsilon)
        pooled_BD = torch.segment_reduce(tokens_TD, "mean", lengths=end_B - first_B, axis=0, initial=0)
        pooled_BD = torch.where((end_B > first_B)[:, None], pooled_BD, 0)
    else:
        token_B = torch.minimum(first_B, end_B - 1) if pooling == "first" else end_B - 1
        picked_BD = hidden_TD[token_B.clamp(min=0)].float()
        pooled_BD = _normalise(picked_BD, norm_weight_D, epsilon)
    return functional.normalize(pooled_BD, dim=-1, eps=_SMALLEST_NORM) if unit_length else pooled_BD


def _normalise(hidden: Tensor, weight_D: Tensor | None, epsilon: float) -> Tensor:
    if weight_D is None:
        return hidden
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon) * weight_D.float()


@inline
def _load_normalised(
    hidden: tl.tensor,
    weight: tl.tensor,
    row: tl.tensor,
    here: tl.tensor,
    epsilon: tl.tensor,
    D: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    column = tl.arange(0, BLOCK)[None, :]
    inside = here[:, None] & (column < D)
    x = tl.load(hidden + row[:, None] * D + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 1) / D + epsilon)[:, None] * w
    return x


@inline
def _to_unit_length(x: tl.tensor) -> tl.tensor:
    return x / tl.maximum(tl.sqrt(tl.sum(x * x, 0)), 1e-12)


@jit
def _pool_token(
    hidden: tl.tensor,
    weight: tl.tensor,
    cu_lengths: tl.tensor,
    pooled: tl.tensor,
    epsilon: tl.tensor,
    D: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    first = tl.load(cu_lengths + sequence)
    end = tl.load(cu_lengths + sequence + 1)
    if PDL:
        gdc_wait()
    token = end - 1 if LAST else tl.minimum(first, end - 1)
    row = tl.maximum(token, 0).to(tl.int64) + tl.arange(0, 1)
    x = _load_normalised(hidden, weight, row, row >= 0, epsilon, D, NORM, BLOCK)
    x = tl.sum(x, 0)
    if UNIT:
        x = _to_unit_length(x)
    column = tl.arange(0, BLOCK)
    tl.store(pooled + sequence.to(tl.int64) * D + column, x, mask=column < D)


@jit
def _sum_chunk(
    hidden: tl.tensor,
    weight: tl.tensor,
    cu_lengths: tl.tensor,
    slots: tl.tensor,
    epsilon: tl.tensor,
    D: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    chunk = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    start = tl.load(cu_lengths + sequence)
    length = tl.load(cu_lengths + sequence + 1) - start
    if PDL:
        gdc_wait()
    first = chunk * CHUNK
    if first < length:
        sums = tl.zeros((BLOCK,), tl.float32)
        end = tl.minimum(first + CHUNK, length)
        for token in range(first, end, ROWS):
            inside = token + tl.arange(0, ROWS)
            row = (start + inside).to(tl.int64)
            x = _load_normalised(hidden, weight, row, inside < end, epsilon, D, NORM, BLOCK)
            sums += tl.sum(x, 0)
        slot = (start // CHUNK + sequence + chunk).to(tl.int64)
        column = tl.arange(0, BLOCK)
        tl.store(slots + slot * D + column, sums, mask=column < D)


@jit
def _mean_of_chunks(
    slots: tl.tensor,
    cu_lengths: tl.tensor,
    pooled: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
    start = tl.load(cu_lengths + sequence)
    length = tl.load(cu_lengths + sequence + 1) - start
    if PDL:
        gdc_wait()
    sums = tl.zeros((BLOCK,), tl.float32)
    first_slot = (start // CHUNK + sequence).to(tl.int64)
    for chunk in range(tl.cdiv(length, CHUNK)):
        sums += tl.load(slots + (first_slot + chunk) * D + column, mask=column < D, other=0.0)
    mean = sums / tl.maximum(length, 1)
    if UNIT:
        mean = _to_unit_length(mean)
    tl.store(pooled + sequence.to(tl.int64) * D + column, mean, mask=column < D)
