"""Every kernel against its torch twin, as functions of a device, a dtype and a token count.

`test_compiled.py` runs them on CUDA, `interpreted.py` in Triton's interpreter; the reference is the twin's
output on the same device and in the same dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rose_engine.kernels.embed_gather import embed_gather, embed_gather_twin
from rose_engine.kernels.gelu_mul import gelu_mul, gelu_mul_twin
from rose_engine.kernels.layer_norm import add_layer_norm, add_layer_norm_twin
from rose_engine.kernels.pool_normalize import pool_normalize, pool_normalize_twin
from rose_engine.kernels.qk_norm_rotary import qk_norm_rotary, qk_norm_rotary_twin
from rose_engine.kernels.quantize_rows import quantize_rows, quantize_rows_twin
from rose_engine.kernels.ragged_attention import (
    AttentionTile,
    DeferredNorm,
    ragged_attention,
    ragged_attention_twin,
)
from rose_engine.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_twin,
    rms_norm,
    rms_norm_twin,
    row_sum_of_squares,
    row_sum_of_squares_twin,
)
from rose_engine.kernels.rotary import rotate_heads, rotate_heads_twin
from rose_engine.kernels.silu_mul import silu_mul, silu_mul_twin
from rose_engine.layers.rotary import RotarySpec

EPSILON = 1e-6
# One rounding of the output apart, and a little more where float32 sums run in another order.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Setting:
    """Where and how a comparison runs."""

    device: str
    dtype: torch.dtype
    tokens: int
    pdl: bool = False

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape) * 7 + len(shape))
        return (torch.randn(*shape, generator=generator) * scale).to(self.dtype).to(self.device)

    def ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def cu_lengths(self, spare: int = 0) -> Tensor:
        """A one-token sequence, a long one, an empty slot, the rest; `spare` tokens behind the last."""
        left = self.tokens - spare
        first, long = min(1, left), (left * 2) // 3
        second = min(left, first + long)
        return self.ints(0, first, second, second, left, left)

    def assert_close(self, got: Tensor, wanted: Tensor, tolerance: float | None = None) -> None:
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        assert got.isfinite().all()
        tolerance = TOLERANCE[self.dtype] if tolerance is None else tolerance
        torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=tolerance)


def compare_rms_norm(setting: Setting, width: int) -> None:
    hidden_TD, weight_D = setting.random(setting.tokens, width), setting.random(width)
    got = rms_norm(hidden_TD, weight_D, EPSILON, setting.pdl)
    setting.assert_close(got, rms_norm_twin(hidden_TD, weight_D, EPSILON))
    setting.assert_close(rms_norm(hidden_TD, None, EPSILON), rms_norm_twin(hidden_TD, None, EPSILON))


def compare_add_rms_norm(setting: Setting, width: int) -> None:
    hidden_TD, weight_D = setting.random(setting.tokens, width), setting.random(width)
    residual_TD = setting.random(setting.tokens, width, scale=3)
    expected_residual_TD = residual_TD.clone()
    expected = add_rms_norm_twin(hidden_TD, expected_residual_TD, weight_D, EPSILON)
    setting.assert_close(add_rms_norm(hidden_TD, residual_TD, weight_D, EPSILON, setting.pdl), expected)
    setting.assert_close(residual_TD, expected_residual_TD)


def compare_row_sum_of_squares(setting: Setting, width: int) -> None:
    hidden_TD = setting.random(setting.tokens, width)
    got_T = row_sum_of_squares(hidden_TD, setting.pdl)
    setting.assert_close(got_T, row_sum_of_squares_twin(hidden_TD), tolerance=1e-5)


def compare_qk_norm_rotary(setting: Setting, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    qkv_TQ = setting.random(setting.tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    norms_2H = setting.random(2, head_dim)
    rotary_TH = RotarySpec(head_dim, 1e6, setting.tokens).table(setting.dtype, torch.device(setting.device))
    for residual_TD in (None, setting.random(setting.tokens, 48, scale=2)):
        got_TQ, wanted_TQ = qkv_TQ.clone(), qkv_TQ.clone()
        heads = (num_heads, num_kv_heads, EPSILON, residual_TD)
        qk_norm_rotary(got_TQ, norms_2H, rotary_TH, *heads, setting.pdl)
        qk_norm_rotary_twin(wanted_TQ, norms_2H, rotary_TH, *heads)
        setting.assert_close(got_TQ, wanted_TQ)


def compare_rotate_heads(setting: Setting, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    got_TQ = setting.random(setting.tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    wanted_TQ = got_TQ.clone()
    rotary_TH = RotarySpec(head_dim, 1e6, setting.tokens).table(setting.dtype, torch.device(setting.device))
    rotate_heads(got_TQ, rotary_TH, num_heads + num_kv_heads, setting.pdl)
    rotate_heads_twin(wanted_TQ, rotary_TH, num_heads + num_kv_heads)
    setting.assert_close(got_TQ, wanted_TQ)


def compare_gelu_mul(setting: Setting, width: int) -> None:
    gate_up_TG = setting.random(setting.tokens, 2 * width, scale=3)
    # On a card to where exp() overflows; the interpreter's NumPy would warn.
    gate_up_TG[0, :4] = torch.tensor([9.0, -9.0, 0.0, -9.0 if setting.device == "cpu" else -300.0])
    setting.assert_close(gelu_mul(gate_up_TG, setting.pdl), gelu_mul_twin(gate_up_TG))


def compare_silu_mul(setting: Setting, width: int) -> None:
    gate_up_TG = setting.random(setting.tokens, 2 * width)
    setting.assert_close(silu_mul(gate_up_TG, pdl=setting.pdl), silu_mul_twin(gate_up_TG))
    residual_TD = setting.random(setting.tokens, 40, scale=2)
    got = silu_mul(gate_up_TG, residual_TD, EPSILON, setting.pdl)
    setting.assert_close(got, silu_mul_twin(gate_up_TG, residual_TD, EPSILON))


def compare_embed_gather(setting: Setting, width: int, head_dim: int, num_partials: int) -> None:
    embedding_VD, rotary_PH = setting.random(31, width), setting.random(17, head_dim)
    token_ids_T = (torch.arange(setting.tokens, dtype=torch.int32) * 5 % 31).to(setting.device)
    positions_T = (torch.arange(setting.tokens, dtype=torch.int32) % 17).to(setting.device)
    inputs = (token_ids_T, positions_T, embedding_VD, rotary_PH, num_partials)
    got, wanted = embed_gather(*inputs, setting.pdl), embed_gather_twin(*inputs)
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[2], wanted[2])
    setting.assert_close(got[1], wanted[1], tolerance=1e-5)


def compare_ragged_attention(
    setting: Setting,
    heads: tuple[int, int, int],
    causal: bool,
    tile: AttentionTile | None = None,
    sums_per_head: int = 0,
) -> None:
    """`sums_per_head`: q and k come with a deferred norm, in so many partial sums of squares a head."""
    num_heads, num_kv_heads, head_dim = heads
    spare = min(3, setting.tokens - 1)
    cu_lengths = setting.cu_lengths(spare)
    packed_TXH = setting.random(setting.tokens, num_heads + 2 * num_kv_heads, head_dim)
    packed_TXH[setting.tokens - spare :] = float("nan")  # spare tokens must touch nothing
    qkv = packed_TXH.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    inputs = (*qkv, cu_lengths, int(cu_lengths.diff().max()) + 5, head_dim**-0.5, causal)
    norm = _deferred_norm(packed_TXH, sums_per_head) if sums_per_head else None
    real = setting.tokens - spare
    got = ragged_attention(*inputs, tile, setting.pdl, norm)[:real]
    wanted = ragged_attention_twin(*inputs, norm)[:real]
    # The kernel rounds the probabilities to the values' dtype; the twin keeps float32.
    setting.assert_close(got, wanted, tolerance=TOLERANCE[setting.dtype] * 2)


def _deferred_norm(packed_TXH: Tensor, sums_per_head: int) -> DeferredNorm:
    parts = packed_TXH.float().unflatten(2, (sums_per_head, -1))
    return DeferredNorm(parts.pow(2).sum(-1).flatten(1).contiguous(), EPSILON)


def compare_add_layer_norm(setting: Setting, width: int) -> None:
    hidden_TD, residual_TD = (
        setting.random(setting.tokens, width),
        setting.random(setting.tokens, width, scale=3),
    )
    parameters = (setting.random(width), setting.random(width, scale=0.5), 1e-12)
    got = add_layer_norm(hidden_TD, residual_TD, *parameters, setting.pdl)
    setting.assert_close(got, add_layer_norm_twin(hidden_TD, residual_TD, *parameters))


def compare_pool_normalize(setting: Setting, width: int) -> None:
    spare = min(3, setting.tokens - 1)
    hidden_TD, weight_D = setting.random(setting.tokens, width, scale=2), setting.random(width)
    hidden_TD[setting.tokens - spare :] = float("nan")
    cu_lengths = setting.cu_lengths(spare)
    max_length = int(cu_lengths.diff().max()) + 5
    for pooling in ("first", "last", "mean"):
        for weight, unit_length in ((weight_D, True), (weight_D, False), (None, True)):
            inputs = (hidden_TD, cu_lengths, max_length, pooling, weight, EPSILON, unit_length)
            got_BD, wanted_BD = pool_normalize(*inputs, setting.pdl), pool_normalize_twin(*inputs)
            setting.assert_close(got_BD, wanted_BD, tolerance=1e-5)


def compare_quantize_rows(setting: Setting, width: int) -> None:
    values_BD = setting.random(setting.tokens, width).float()
    specials = (0.0, -0.0, float("nan"), float("inf"), float("-inf"), -0.003, 100.0, -100.0, 0.003)
    count = min(width, len(specials))
    values_BD[0, :count] = torch.tensor(specials[:count], device=setting.device)
    got, wanted = quantize_rows(values_BD, setting.pdl), quantize_rows_twin(values_BD)
    assert got.dtype == torch.int8
    assert torch.equal(got[:, width:], wanted[:, width:])
    # Two float32 tanh differ by an ulp: a value on the edge between two codes may fall on either side.
    difference = (got[:, :width].int() - wanted[:, :width].int()).abs()
    assert difference.max() <= 1
    assert difference.sum() <= max(1, values_BD.numel() // 10_000)
    assert torch.equal(got[0, :count], wanted[0, :count])
