"""The start of a forward pass in one launch: embedding rows, their sums of squares, rotary rows.

T packed tokens, V vocabulary entries, P positions, D model width, H head width. What a rotary row holds is
the caller's choice; it is copied as it is. Knows nothing of norms or attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose_engine.kernels.launch import (
    assert_rows,
    block_size,
    device_pdl,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    launch_options,
    runs_triton,
    tl,
)


def embed_gather(
    token_ids_T: Tensor,
    position_ids_T: Tensor,
    embedding_VD: Tensor,
    rotary_PH: Tensor,
    num_partials: int = 1,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's embedding row, its sum of squares, and its position's rotary row.

    Returns hidden `[T, D]` in the embedding's dtype, sums float32 `[T, num_partials]` (the sum in the first
    column, zeros after it: the form in which a GEMM hands its partial sums to the next), rotary `[T, H]`.
    """
    if not runs_triton(embedding_VD):
        return embed_gather_twin(token_ids_T, position_ids_T, embedding_VD, rotary_PH, num_partials)
    assert_rows(token_ids_T, position_ids_T, embedding_VD, rotary_PH)
    T, D, H = token_ids_T.shape[0], embedding_VD.shape[1], rotary_PH.shape[1]
    hidden_TD = embedding_VD.new_empty(T, D)
    sums_TP = torch.empty(T, num_partials, dtype=torch.float32, device=embedding_VD.device)
    rotary_TH = rotary_PH.new_empty(T, H)
    _embed_gather[(T,)](
        token_ids_T,
        position_ids_T,
        embedding_VD,
        rotary_PH,
        hidden_TD,
        sums_TP,
        rotary_TH,
        D,
        H,
        num_partials,
        block_size(D),
        block_size(H),
        block_size(num_partials),
        device_pdl(pdl),
        **launch_options(pdl, num_warps=4),
    )
    return hidden_TD, sums_TP, rotary_TH


def embed_gather_twin(
    token_ids_T: Tensor,
    position_ids_T: Tensor,
    embedding_VD: Tensor,
    rotary_PH: Tensor,
    num_partials: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """`embed_gather` in torch."""
    hidden_TD = embedding_VD[token_ids_T]
    sums_TP = torch.zeros(len(hidden_TD), num_partials, dtype=torch.float32, device=hidden_TD.device)
    sums_TP[:, 0] = hidden_TD.float().pow(2).sum(-1)
    return hidden_TD, sums_TP, rotary_PH[position_ids_T]


@jit
def _embed_gather(
    token_ids: tl.tensor,
    position_ids: tl.tensor,
    embedding: tl.tensor,
    rotary: tl.tensor,
    hidden: tl.tensor,
    sums: tl.tensor,
    token_rotary: tl.tensor,
    D: tl.constexpr,
    H: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    wide = tl.arange(0, BLOCK_H)
    partial = tl.arange(0, BLOCK_P)
    if PDL:
        gdc_launch_dependents()
    row = tl.load(token_ids + token).to(tl.int64)
    position = tl.load(position_ids + token).to(tl.int64)
    x = tl.load(embedding + row * D + column, mask=column < D, other=0.0)
    angles = tl.load(rotary + position * H + wide, mask=wide < H, other=0.0)
    squares = tl.sum(x.to(tl.float32) * x.to(tl.float32), 0)
    if PDL:
        gdc_wait()
    tl.store(hidden + token * D + column, x, mask=column < D)
    tl.store(token_rotary + token * H + wide, angles, mask=wide < H)
    spread = tl.where(partial == 0, squares, 0.0)
    tl.store(sums + token * PARTIALS + partial, spread, mask=partial < PARTIALS)
