"""The torch twins against the plain formulas, and what holds of the kernels' modules without any device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rose_engine.kernels.embed_gather import embed_gather
from rose_engine.kernels.gelu_mul import gelu_mul
from rose_engine.kernels.layer_norm import add_layer_norm
from rose_engine.kernels.pool_normalize import pool_normalize
from rose_engine.kernels.qk_norm_rotary import qk_norm_rotary
from rose_engine.kernels.ragged_attention import AttentionTile, DeferredNorm, choose_tile, ragged_attention
from rose_engine.kernels.rms_norm import add_rms_norm, rms_norm, row_sum_of_squares
from rose_engine.kernels.rotary import rotate_heads
from rose_engine.kernels.silu_mul import silu_mul
from rose_engine.layers.norm import AddLayerNorm, RMSNorm
from rose_engine.layers.rotary import RotarySpec

EPSILON = 1e-5
CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_rms_norm():
    hidden_TD, weight_D = random(5, 12), random(12, seed=1)
    close(rms_norm(hidden_TD, weight_D, EPSILON), functional.rms_norm(hidden_TD, (12,), weight_D, EPSILON))
    close(rms_norm(hidden_TD, None, EPSILON), functional.rms_norm(hidden_TD, (12,), None, EPSILON))


def test_add_rms_norm_keeps_the_sum():
    hidden_TD, residual_TD, weight_D = random(5, 12), random(5, 12, seed=1), random(12, seed=2)
    total_TD = hidden_TD + residual_TD
    normalised_TD = add_rms_norm(hidden_TD, residual_TD, weight_D, EPSILON)
    close(normalised_TD, functional.rms_norm(total_TD, (12,), weight_D, EPSILON))
    assert torch.equal(residual_TD, total_TD)


def test_row_sum_of_squares():
    hidden_TD = random(3, 7)
    close(row_sum_of_squares(hidden_TD), torch.linalg.vector_norm(hidden_TD, dim=1) ** 2)


def test_add_layer_norm():
    hidden_TD, residual_TD, weight_D, bias_D = (
        random(4, 9),
        random(4, 9, seed=1),
        random(9, seed=2),
        random(9, seed=3),
    )
    wanted = functional.layer_norm(hidden_TD + residual_TD, (9,), weight_D, bias_D, EPSILON)
    close(add_layer_norm(hidden_TD, residual_TD, weight_D, bias_D, EPSILON), wanted)


def test_the_layer_holds_a_layer_norms_parameters():
    plain, fused = torch.nn.LayerNorm(9, eps=EPSILON), AddLayerNorm(9, eps=EPSILON)
    plain.weight.data, plain.bias.data = random(9, seed=2), random(9, seed=3)
    fused.load_state_dict(plain.state_dict())
    hidden_TD, residual_TD = random(4, 9), random(4, 9, seed=1)
    with torch.no_grad():
        close(fused(hidden_TD, residual_TD), plain(hidden_TD + residual_TD))


def test_folding_a_norm_changes_nothing_but_where_its_weight_is():
    norm, matrix_OD, hidden_TD = RMSNorm(9, EPSILON), random(5, 9), random(4, 9, seed=1)
    norm.weight.data = random(9, seed=2)
    with torch.no_grad():
        before = functional.linear(norm(hidden_TD), matrix_OD)
        norm.fold_into(matrix_OD)
        close(functional.linear(norm(hidden_TD), matrix_OD), before)
        assert torch.equal(norm.weight, torch.ones(9))
        close(functional.linear(rms_norm(hidden_TD, None, EPSILON), matrix_OD), before)


def test_activations():
    rows = random(3, 8)
    close(silu_mul(rows), functional.silu(rows[:, :4]) * rows[:, 4:])
    close(gelu_mul(rows), functional.gelu(rows[:, :4], approximate="tanh") * rows[:, 4:])


def test_a_residual_stands_for_the_missing_norm():
    """Projecting a residual and scaling the rows is projecting the normalised residual."""
    residual_TD, matrix_GD = random(6, 10) * 3, random(16, 10, seed=1)
    wanted = silu_mul(functional.linear(rms_norm(residual_TD, None, EPSILON), matrix_GD))
    close(silu_mul(functional.linear(residual_TD, matrix_GD), residual_TD, EPSILON), wanted)


def test_embed_gather():
    token_ids, positions = (
        torch.tensor([3, 0, 3], dtype=torch.int32),
        torch.tensor([0, 1, 2], dtype=torch.int32),
    )
    embedding_VD, rotary_PH = random(5, 6), random(4, 8, seed=1)
    hidden_TD, sums_TP, rotary_TH = embed_gather(
        token_ids, positions, embedding_VD, rotary_PH, num_partials=3
    )
    assert torch.equal(hidden_TD, embedding_VD[[3, 0, 3]])
    assert torch.equal(rotary_TH, rotary_PH[:3])
    close(sums_TP.sum(1), embedding_VD[[3, 0, 3]].pow(2).sum(1))


def test_rotation_keeps_inner_products_of_equal_distances_and_other_heads():
    """q and k at positions (0, 2) and at (3, 5) make the same product; value heads stay as they are."""
    T, H = 6, 8
    heads = random(1, 3, H).expand(T, 3, H)  # query, key, value: the same in every row
    qkv_TQ = heads.reshape(T, -1).clone()
    rotate_heads(qkv_TQ, RotarySpec(H, 100.0, T).table(torch.float32, CPU), num_rotated=2)
    q_TH, k_TH, v_TH = qkv_TQ.view(T, 3, H).unbind(1)
    assert torch.equal(v_TH, heads[:, 2])
    close(q_TH[0], heads[0, 0])
    close(q_TH[0] @ k_TH[2], q_TH[3] @ k_TH[5])
    assert (q_TH[0] @ k_TH[2] - q_TH[0] @ k_TH[3]).abs() > 1e-3


@pytest.mark.parametrize("with_residual", [False, True])
def test_qk_norm_rotary(with_residual: bool):
    """The rotation as a product of complex numbers (a + ib) e^(i angle), of heads normalised by torch."""
    T, N, M, H, theta = 5, 4, 2, 8, 100.0
    heads, norms_2H = random(T, N + 2 * M, H), random(2, H, seed=1)
    residual_TD = random(T, 6, seed=2) * 2 if with_residual else None
    qkv_TQ = heads.reshape(T, -1).clone()
    rotary_TH = RotarySpec(H, theta, T).table(torch.float32, CPU)
    qk_norm_rotary(qkv_TQ, norms_2H, rotary_TH, N, M, EPSILON, residual_TD)

    if residual_TD is not None:
        heads = heads * (residual_TD.pow(2).mean(1) + EPSILON).rsqrt()[:, None, None]
    weights = torch.cat((norms_2H[0].expand(N, H), norms_2H[1].expand(M, H)))
    rotated = functional.rms_norm(heads[:, : N + M], (H,), None, EPSILON) * weights
    angles = torch.arange(T)[:, None] * theta ** (-torch.arange(0, H, 2) / H)
    turned = (
        torch.complex(rotated[..., :4], rotated[..., 4:])
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    wanted = torch.cat((torch.cat((turned.real, turned.imag), -1), heads[:, N + M :]), 1)
    close(qkv_TQ, wanted.reshape(T, -1))


@pytest.mark.parametrize("causal", [True, False])
def test_ragged_attention(causal: bool):
    lengths, (N, M, H) = (4, 1, 0, 7), (4, 2, 8)
    q, k, v = random(12, N + 2 * M, H).split([N, M, M], dim=1)
    cu_lengths = torch.tensor([0, 4, 5, 5, 12], dtype=torch.int32)
    got = ragged_attention(q, k, v, cu_lengths, 7, 0.3, causal)
    for got_LNH, *qkv in zip(*(x.split(lengths) for x in (got, q, k, v)), strict=True):
        q_NLH, k_MLH, v_MLH = (x.transpose(0, 1)[None] for x in qkv)
        wanted = functional.scaled_dot_product_attention(
            q_NLH, k_MLH, v_MLH, is_causal=causal, scale=0.3, enable_gqa=True
        )
        close(got_LNH, wanted[0].transpose(0, 1))


def test_a_deferred_norm_is_the_norm():
    N, M, H = 4, 2, 8
    q, k, v = random(6, N + 2 * M, H).split([N, M, M], dim=1)
    where = (torch.tensor([0, 6], dtype=torch.int32), 6, 0.3, True)
    sums_TS = torch.cat((q, k, v), 1).unflatten(2, (2, -1)).pow(2).sum(-1).flatten(1)
    wanted = ragged_attention(rms_norm(q, None, EPSILON), rms_norm(k, None, EPSILON), v, *where)
    close(ragged_attention(q, k, v, *where, norm=DeferredNorm(sums_TS, EPSILON)), wanted)


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("unit_length", [True, False])
def test_pool_normalize(pooling: str, with_norm: bool, unit_length: bool):
    hidden_TD, weight_D = random(9, 6), random(6, seed=1)
    hidden_TD[7:] = float("nan")  # spare tokens
    cu_lengths = torch.tensor([0, 1, 7, 7], dtype=torch.int32)
    got_BD = pool_normalize(
        hidden_TD, cu_lengths, 6, pooling, weight_D if with_norm else None, EPSILON, unit_length
    )
    pick = {"first": lambda x: x[0], "last": lambda x: x[-1], "mean": lambda x: x.mean(0)}[pooling]
    for row, (first, end) in zip(got_BD, ((0, 1), (1, 7)), strict=False):
        states = hidden_TD[first:end]
        wanted = pick(functional.rms_norm(states, (6,), weight_D, EPSILON) if with_norm else states)
        close(row, functional.normalize(wanted, dim=0) if unit_length else wanted)
    assert got_BD[2].isfinite().all()  # the empty slot


def test_an_early_tile_must_cover_whole_rows_of_blocks():
    with pytest.raises(ValueError, match=r"keys: 64 is no multiple of rows \(128\)"):
        AttentionTile(rows=128, keys=64, stages=2, early=True)


def test_tiles_follow_the_shape():
    assert choose_tile(128, 128, head_bytes=256).keys == 128
    assert choose_tile(512, 512, head_bytes=256).early
    assert not choose_tile(12_800, 512, head_bytes=256).early
    assert choose_tile(128, 128, head_bytes=512).keys < 64


def test_kernels_import_and_run_without_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch
from rose_engine.kernels import embed_gather, layer_norm, pool_normalize, qk_norm_rotary
from rose_engine.kernels import quantize_rows, ragged_attention, rms_norm, silu_mul
print(silu_mul.silu_mul(torch.ones(1, 4)).shape == (1, 2))
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert child.stdout.strip() == "True", child.stderr
