"""Every Triton kernel, compiled, agrees with its torch twin on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from rose_engine.kernels.ragged_attention import AttentionTile
from tests.rose_engine.kernels import kernel_comparisons as compare

pytestmark = pytest.mark.gpu

QWEN3_HEADS = (16, 8, 128)
HEADS = [QWEN3_HEADS, (16, 16, 64), (12, 12, 32), (3, 1, 80)]
PLACES = [(torch.float32, False), (torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)]
TILES = [
    None,
    AttentionTile(rows=64, keys=128, stages=2),
    AttentionTile(rows=64, keys=64, stages=3),
    AttentionTile(rows=64, keys=64, stages=3, early=True),
    AttentionTile(rows=64, keys=128, stages=2, early=True),
]


@pytest.fixture(params=[1, 7, 64, 128, 300, 512, 2560], ids=lambda tokens: f"{tokens}-tokens")
def tokens(request) -> int:
    return request.param


@pytest.fixture(params=PLACES, ids=["float32", "float16", "bfloat16", "bfloat16-pdl"])
def setting(request, tokens: int) -> compare.Setting:
    dtype, pdl = request.param
    if pdl and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    return compare.Setting("cuda", dtype, tokens, pdl)


@pytest.mark.parametrize("width", [384, 1000, 1024, 2560])
def test_norms(setting: compare.Setting, width: int):
    compare.compare_rms_norm(setting, width)
    compare.compare_add_rms_norm(setting, width)
    compare.compare_row_sum_of_squares(setting, width)
    compare.compare_add_layer_norm(setting, width)


@pytest.mark.parametrize("heads", HEADS)
def test_qk_norm_rotary(setting: compare.Setting, heads: tuple[int, int, int]):
    compare.compare_qk_norm_rotary(setting, *heads)
    compare.compare_rotate_heads(setting, *heads)


@pytest.mark.parametrize("width", [1536, 3072, 1000])
def test_activations(setting: compare.Setting, width: int):
    compare.compare_silu_mul(setting, width)
    compare.compare_gelu_mul(setting, width)


@pytest.mark.parametrize("num_partials", [1, 16])
def test_embed_gather(setting: compare.Setting, num_partials: int):
    compare.compare_embed_gather(setting, width=1024, head_dim=128, num_partials=num_partials)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("heads", HEADS)
def test_ragged_attention(setting: compare.Setting, heads: tuple[int, int, int], causal: bool):
    compare.compare_ragged_attention(setting, heads, causal)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("tokens", [300, 2560], indirect=True)
@pytest.mark.parametrize("setting", PLACES[2:], indirect=True)
def test_ragged_attention_tiles(setting: compare.Setting, tile: AttentionTile | None, causal: bool):
    for sums_per_head in (0, 1, 2):
        compare.compare_ragged_attention(setting, QWEN3_HEADS, causal, tile, sums_per_head)


@pytest.mark.parametrize("width", [384, 1024, 2560])
def test_pool_normalize(setting: compare.Setting, width: int):
    compare.compare_pool_normalize(setting, width)


@pytest.mark.parametrize("width", [1024, 1000])
def test_quantize_rows(setting: compare.Setting, width: int):
    compare.compare_quantize_rows(setting, width)
