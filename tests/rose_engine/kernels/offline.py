"""Every kernel compiled for a Hopper card, without one: the interpreter accepts what the compiler refuses.

`test_without_a_device.py` runs this file in a process of its own, because Triton has one driver per process.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from rose_engine.kernels import (
    embed_gather,
    gelu_mul,
    layer_norm,
    pool_normalize,
    qk_norm_rotary,
    quantize_rows,
    ragged_attention,
    rms_norm,
    rotary,
    silu_mul,
)
from rose_engine.kernels.ragged_attention import AttentionTile
from rose_engine.layers.rotary import RotarySpec

MODULES = (
    embed_gather,
    gelu_mul,
    layer_norm,
    pool_normalize,
    qk_norm_rotary,
    quantize_rows,
    ragged_attention,
    rms_norm,
    rotary,
    silu_mul,
)
HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY_BYTES = 232_448  # of one thread block, CUDA programming guide, compute capability 9.0
T, D, I, B = 128, 1024, 3072, 2  # noqa: E741
N, M, H = 16, 8, 128
EPSILON = 1e-6


class NoDevice:
    """As much of a Triton driver as compiling needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[triton.compiler.CompiledKernel]:
    """What launches from here on compile, instead of launching."""
    kernels: list[triton.compiler.CompiledKernel] = []
    driver.set_active(NoDevice())

    def compile_only(kernel: triton.JITFunction, grid: object) -> Callable[..., None]:
        return lambda *args, **options: kernels.append(kernel.warmup(*args, grid=grid, **options))

    monkeypatch.setattr(triton.JITFunction, "__getitem__", compile_only)
    for module in MODULES:
        monkeypatch.setattr(module, "runs_triton", lambda tensor: True)
    return kernels


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attend(tile: AttentionTile | None, causal: bool, sums_per_head: int) -> None:
    q, k, v = rows(T, N + 2 * M, H).split([N, M, M], dim=1)
    sums_TS = torch.ones(T, (N + 2 * M) * max(1, sums_per_head))
    norm = ragged_attention.DeferredNorm(sums_TS, EPSILON) if sums_per_head else None
    ragged_attention.ragged_attention(q, k, v, ints(0, 128), 128, H**-0.5, causal, tile, True, norm)


def pool(pooling: pool_normalize.Pooling) -> None:
    pool_normalize.pool_normalize(rows(T, D), ints(0, 3, T), T, pooling, rows(D), EPSILON, True, pdl=True)


def rotate_alone() -> None:
    rotary_TH = RotarySpec(H, 1e6, T).table(torch.bfloat16, torch.device("cpu"))
    rotary.rotate_heads(rows(T, (N + 2 * M) * H), rotary_TH, N + M, pdl=True)


def rotate(residual_TD: torch.Tensor | None) -> None:
    rotary_TH = RotarySpec(H, 1e6, T).table(torch.bfloat16, torch.device("cpu"))
    qkv_TQ = rows(T, (N + 2 * M) * H)
    qk_norm_rotary.qk_norm_rotary(qkv_TQ, rows(2, H), rotary_TH, N, M, EPSILON, residual_TD, pdl=True)


EARLY = AttentionTile(rows=64, keys=64, stages=3, early=True)
PLAIN = AttentionTile(rows=64, keys=64, stages=3)
LAUNCHES: dict[str, Callable[[], object]] = {
    "rms_norm": lambda: rms_norm.rms_norm(rows(T, D), rows(D), EPSILON, pdl=True),
    "add_rms_norm": lambda: rms_norm.add_rms_norm(rows(T, D), rows(T, D), None, EPSILON, pdl=True),
    "row_sum_of_squares": lambda: rms_norm.row_sum_of_squares(rows(T, D), pdl=True),
    "qk_norm_rotary": lambda: rotate(None),
    "qk_norm_rotary scaled": lambda: rotate(rows(T, D)),
    "rotate_heads": rotate_alone,
    "silu_mul": lambda: silu_mul.silu_mul(rows(T, 2 * I), pdl=True),
    "silu_mul scaled": lambda: silu_mul.silu_mul(rows(T, 2 * I), rows(T, D), EPSILON, pdl=True),
    "embed_gather": lambda: embed_gather.embed_gather(ints(1), ints(2), rows(9, D), rows(9, H), 16, pdl=True),
    "add_layer_norm": lambda: layer_norm.add_layer_norm(
        rows(T, 384), rows(T, 384), rows(384), rows(384), EPSILON, pdl=True
    ),
    "gelu_mul": lambda: gelu_mul.gelu_mul(rows(T, 2 * I), pdl=True),
    "pool last": lambda: pool("last"),
    "pool first": lambda: pool("first"),
    "pool mean": lambda: pool("mean"),
    "quantize_rows": lambda: quantize_rows.quantize_rows(torch.zeros(B, D), pdl=True),
    "attention default": lambda: attend(None, True, 0),
    "attention plain": lambda: attend(PLAIN, False, 0),
    "attention early": lambda: attend(EARLY, True, 0),
    "attention early full": lambda: attend(EARLY, False, 0),
    "attention plain deferred": lambda: attend(PLAIN, True, 2),
    "attention early deferred": lambda: attend(EARLY, True, 1),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_compiles_fits_and_takes_part_in_dependent_launches(name: str, compiled: list):
    LAUNCHES[name]()
    assert compiled
    for kernel in compiled:
        assert kernel.metadata.shared <= SHARED_MEMORY_BYTES
        assert kernel.metadata.launch_pdl
        assert "griddepcontrol.wait" in kernel.asm["ptx"]
        assert "griddepcontrol.launch_dependents" in kernel.asm["ptx"]
        assert name.startswith("attention") == ("wgmma" in kernel.asm["ptx"])
