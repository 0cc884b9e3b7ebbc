"""The kernels in Triton's interpreter against their twins.

`test_without_a_device.py` runs this file in a process of its own: Triton decides when a kernel is defined
whether it will be interpreted.
"""

from __future__ import annotations

import pytest
import torch
from triton.runtime import interpreter

from rose_engine.kernels.launch import INTERPRETED
from rose_engine.kernels.ragged_attention import AttentionTile
from tests.rose_engine.kernels import kernel_comparisons as compare

DTYPES = (torch.float32, torch.bfloat16)
EARLY = AttentionTile(rows=16, keys=32, stages=2, early=True)
PLAIN = AttentionTile(rows=16, keys=16, stages=2)


@pytest.fixture(autouse=True)
def _scalars_as_loop_bounds(monkeypatch: pytest.MonkeyPatch):
    """Triton 3.6 calls `int()` on arrays of one element, which NumPy 2.4 refuses."""
    set_attr = interpreter._LangPatchScope.set_attr

    def set_attr_for_numpy(scope: object, target: object, name: str, value: object) -> None:
        by_item = name == "__index__"
        set_attr(scope, target, name, (lambda self: self.handle.data.item()) if by_item else value)

    monkeypatch.setattr(interpreter._LangPatchScope, "set_attr", set_attr_for_numpy)


def on_cpu(tokens: int, dtype: torch.dtype = torch.float32) -> compare.Setting:
    return compare.Setting("cpu", dtype, tokens)


def test_the_interpreter_is_on():
    assert INTERPRETED


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 24), (7, 64)])
def test_norms(tokens: int, width: int, dtype: torch.dtype):
    setting = on_cpu(tokens, dtype)
    compare.compare_rms_norm(setting, width)
    compare.compare_add_rms_norm(setting, width)
    compare.compare_row_sum_of_squares(setting, width)
    compare.compare_add_layer_norm(setting, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2, 16), (3, 1, 24), (8, 8, 8)])
def test_qk_norm_rotary(heads: tuple[int, int, int], dtype: torch.dtype):
    compare.compare_qk_norm_rotary(on_cpu(5, dtype), *heads)
    compare.compare_rotate_heads(on_cpu(5, dtype), *heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(3, 1100), (2, 24)])
def test_activations(tokens: int, width: int, dtype: torch.dtype):
    compare.compare_silu_mul(on_cpu(tokens, dtype), width)
    compare.compare_gelu_mul(on_cpu(tokens, dtype), width)


@pytest.mark.parametrize("num_partials", [1, 3])
def test_embed_gather(num_partials: int):
    compare.compare_embed_gather(on_cpu(5), width=24, head_dim=16, num_partials=num_partials)


# The interpreter multiplies bfloat16 matrices as the integers it keeps them in: float16 stands in.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tile", [EARLY, PLAIN], ids=["early", "plain"])
@pytest.mark.parametrize("tokens", [4, 75])
def test_ragged_attention(tokens: int, tile: AttentionTile, causal: bool, dtype: torch.dtype):
    compare.compare_ragged_attention(on_cpu(tokens, dtype), (2, 1, 16), causal, tile)


@pytest.mark.parametrize("heads", [(4, 2, 32), (1, 1, 24), (2, 2, 8)])
def test_ragged_attention_with_other_heads(heads: tuple[int, int, int]):
    for tile in (EARLY, PLAIN, None):
        compare.compare_ragged_attention(on_cpu(40), heads, True, tile)


@pytest.mark.parametrize("tile", [EARLY, PLAIN], ids=["early", "plain"])
@pytest.mark.parametrize("sums_per_head", [1, 2])
def test_ragged_attention_with_a_deferred_norm(sums_per_head: int, tile: AttentionTile):
    for causal in (True, False):
        compare.compare_ragged_attention(on_cpu(75), (4, 2, 16), causal, tile, sums_per_head)


@pytest.mark.parametrize("tokens", [1, 6, 620])
def test_pool_normalize(tokens: int):
    compare.compare_pool_normalize(on_cpu(tokens), 24)


@pytest.mark.parametrize("width", [24, 21])
def test_quantize_rows(width: int):
    compare.compare_quantize_rows(on_cpu(3), width)
