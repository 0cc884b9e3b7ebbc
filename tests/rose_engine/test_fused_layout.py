"""The fused decoder layer on the CPU: prepared weights, the reference of its GEMMs, its configurations."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rose_engine.attention.base import AttentionSpec, RaggedLayout
from rose_engine.errors import EngineConfigError
from rose_engine.kernels.cute import reference, toolchain
from rose_engine.kernels.cute.config import Early, GemmConfig, JoinedQkv, SplitQkv
from rose_engine.kernels.ragged_attention import AttentionTile, ragged_attention
from rose_engine.layers import fused
from rose_engine.layers.decoder import DecoderShape, LayerWeights, StackWeights, load_path
from rose_engine.layers.fused import FusedPath
from rose_engine.layers.fused_config import H200_CONFIGS, H200_EARLY_CONFIGS, LayerConfig
from rose_engine.layers.rotary import RotarySpec
from rose_engine.staging import DeviceBatch

EPS = 1e-6
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=64**-0.5, window=(-1, 0))
WIDTH, INNER, VOCABULARY, LENGTHS = 96, 160, 50, (1, 7, 33)
TILE = AttentionTile(rows=64, keys=64, stages=2)
GEMM = GemmConfig(64, 64)

CONFIGS = {
    "joined": LayerConfig(JoinedQkv(GEMM), TILE, GEMM, GEMM, GEMM),
    "deferred norm, a head a tile": LayerConfig(JoinedQkv(GEMM, deferred_norm=True), TILE, GEMM, GEMM, GEMM),
    "deferred norm, half a head a tile": LayerConfig(
        JoinedQkv(GemmConfig(64, 32), deferred_norm=True), TILE, GEMM, GEMM, GEMM
    ),
    "split, cuBLAS": LayerConfig(SplitQkv(GEMM, GEMM), None, None, GEMM, None),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


SHAPE = DecoderShape(WIDTH, INNER, 3, VOCABULARY, SPEC, RotarySpec(SPEC.head_dim, 1e4, 64), EPS)


def random_layer() -> LayerWeights:
    return LayerWeights(
        qkv_QD=torch.randn(SHAPE.qkv_width, WIDTH) * 0.2,
        qk_norm_2H=1 + 0.3 * torch.randn(2, SPEC.head_dim),
        output_DV=torch.randn(WIDTH, SPEC.num_heads * SPEC.head_dim) * 0.1,
        gate_up_GD=torch.randn(2 * INNER, WIDTH) * 0.2,
        down_DI=torch.randn(WIDTH, INNER) * 0.1,
    )


def random_stack() -> StackWeights:
    return StackWeights(
        shape=SHAPE,
        embedding_VD=torch.randn(VOCABULARY, WIDTH),
        rotary_PH=rotary_table(SHAPE.rotary.max_positions),
        layers=tuple(random_layer() for _ in range(SHAPE.num_layers)),
        final_norm_D=1 + 0.3 * torch.randn(WIDTH),
    )


def packed(lengths: tuple[int, ...]) -> DeviceBatch:
    ids_T = torch.randint(0, VOCABULARY, (sum(lengths),), dtype=torch.int32)
    positions_T = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
    return DeviceBatch(ids_T, positions_T, None, ragged(lengths))


def rotary_table(max_positions: int) -> Tensor:
    return RotarySpec(SPEC.head_dim, 1e4, max_positions).table(torch.float32, torch.device("cpu"))


def ragged(lengths: tuple[int, ...]) -> RaggedLayout:
    cu_lengths = torch.tensor((0, *torch.tensor(lengths).cumsum(0).tolist()), dtype=torch.int32)
    return RaggedLayout(cu_lengths, max(lengths), len(lengths), lengths)


def normalised(rows: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS) * weight


def rotated(heads_TNH: Tensor, table_PH: Tensor) -> Tensor:
    cos, sin = table_PH[: len(heads_TNH), None].double().chunk(2, dim=-1)
    a, b = heads_TNH.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def plain_layer(hidden_TD: Tensor, layer: LayerWeights, table_PH: Tensor) -> Tensor:
    """One sequence through one layer in float64, with the weights as they are."""
    rows = normalised(hidden_TD) @ layer.qkv_QD.double().T
    heads = rows.unflatten(1, (-1, SPEC.head_dim))
    q, k, v = heads.split((SPEC.num_heads, SPEC.num_kv_heads, SPEC.num_kv_heads), 1)
    q = rotated(normalised(q, layer.qk_norm_2H[0]), table_PH)
    k = rotated(normalised(k, layer.qk_norm_2H[1]), table_PH)
    group = SPEC.num_heads // SPEC.num_kv_heads
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SPEC.scale)
    hidden_TD = hidden_TD + attended.transpose(0, 1).flatten(1) @ layer.output_DV.double().T
    gate_up = normalised(hidden_TD) @ layer.gate_up_GD.double().T
    gate, up = gate_up.chunk(2, -1)
    return hidden_TD + (F.silu(gate) * up) @ layer.down_DI.double().T


@pytest.mark.parametrize("name", CONFIGS)
def test_the_fused_path_computes_what_plain_layers_compute(name):
    stack, batch = random_stack(), packed(LENGTHS)

    def attend(q, k, v, spec):
        layout = batch.layout
        return ragged_attention(q, k, v, layout.cu_lengths, layout.max_length, spec.scale, spec.causal)

    path = FusedPath(stack, reference, configs=((1 << 31, CONFIGS[name]),))
    got_TD = path(batch, attend)

    expected = []
    for ids in batch.token_ids_T.split(LENGTHS):
        hidden_TD = stack.embedding_VD[ids].double()
        for layer in stack.layers:
            hidden_TD = plain_layer(hidden_TD, layer, stack.rotary_PH)
        expected.append(normalised(hidden_TD, stack.final_norm_D.double()))
    # Without the row scale QK-norm's eps weighs a little differently: the split configuration's only liberty.
    torch.testing.assert_close(got_TD.double(), torch.cat(expected), rtol=2e-4, atol=2e-4)


def test_partial_sums_add_up_to_the_rows_that_were_stored():
    hidden_TD, sums_TP = torch.randn(5, 100), torch.empty(5, 4)
    config = GemmConfig(64, 32)
    assert config.column_tiles(100) == 4
    reference.add_projection(config, torch.randn(5, 24), torch.randn(100, 24), hidden_TD, sums_TP)
    torch.testing.assert_close(sums_TP.sum(1), hidden_TD.square().sum(1))


def test_interleaving_makes_partners_neighbours():
    rows = torch.arange(8.0)[:, None]
    assert fused.interleave_halves(rows).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    table = fused.interleave_rotary(torch.tensor([[1.0, 2.0, 10.0, 20.0]]))
    assert table.tolist() == [[1, 10, 2, 20]]


def test_rotation_of_interleaved_heads_keeps_every_score():
    """q.k is the same whether heads are stored half by half or interleaved."""
    table_PH = rotary_table(9)
    q, k = torch.randn(2, 9, 4, 64).double().unbind(0)
    plain = torch.einsum("inh,jnh->nij", rotated(q, table_PH), rotated(k, table_PH))
    mixed = [fused.interleave_halves(x.movedim(-1, 0)).movedim(0, -1) for x in (q, k)]
    turned = [reference.rotate_pairs(x, fused.interleave_rotary(table_PH)) for x in mixed]
    torch.testing.assert_close(torch.einsum("inh,jnh->nij", *turned), plain)


def test_prepared_weights_are_contiguous_and_only_the_reordered_ones_are_copies():
    layer = random_layer()
    prepared = fused.prepare_layer(layer, SPEC)
    assert prepared.output_DV is layer.output_DV
    assert prepared.down_DI is layer.down_DI
    assert prepared.qkv.weight_QD.is_contiguous()
    assert prepared.gate_up_GD.is_contiguous()
    assert prepared.qkv.rotated_columns == prepared.qkv.selector_1Q.sum()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"pingpong": True, "early": Early.RELEASE}, "hang"),
        ({"pingpong": True, "early": Early.EPILOGUE}, "hang"),
        ({"early": Early.WEIGHTS}, "release"),
        ({"tile_m": 96}, "multiples"),
        ({"tile_n": 40}, "multiples"),
        ({"cluster_m": 3}, "cluster"),
    ],
)
def test_configurations_that_would_hang_or_be_wrong_do_not_exist(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(GemmConfig(64, 64), **settings)


def test_a_deferred_norm_needs_the_attention_kernel_that_finishes_it():
    with pytest.raises(ValueError, match="deferred norm"):
        LayerConfig(JoinedQkv(GEMM, deferred_norm=True), None, GEMM, GEMM, GEMM)


@pytest.mark.parametrize("table", [H200_CONFIGS, H200_EARLY_CONFIGS], ids=["stock", "early"])
def test_the_tables_serve_every_token_count_and_fit_heads_of_128(table):
    path = FusedPath(random_stack(), reference, table)
    served = [path.config_for(num_tokens) for num_tokens in (1, 128, 129, 1024, 1025, 65536)]
    assert served[0] is served[1]
    assert served[2] is served[3]
    assert served[4] is served[5]
    assert len({id(config) for config in served}) == 3
    assert [config.qkv.refusal(128) for config in served] == [None] * 6


def test_early_starts_leave_pingpong_tiles_alone():
    few, many = H200_CONFIGS[0][1], H200_CONFIGS[-1][1]
    assert many.starting(Early.ALL) == many
    assert few.starting(Early.ALL).qkv.gemm.early is Early.ALL
    assert few.starting(Early.ALL).starting(Early.NONE) == few


def test_heads_that_do_not_fit_the_tiles_are_refused_with_the_reason():
    assert "whole heads of 96" in (JoinedQkv(GEMM).refusal(96) or "")
    assert "divide a head of 96" in (JoinedQkv(GEMM, deferred_norm=True).refusal(96) or "")


def test_a_stack_that_cannot_run_fused_is_refused_with_the_reason():
    with pytest.raises(EngineConfigError, match="bfloat16, not"):
        FusedPath(random_stack())


def test_a_cpu_is_refused():
    assert "cpu" in (toolchain.refusal(torch.device("cpu")) or "")


def test_another_version_of_the_toolchain_is_refused(monkeypatch):
    monkeypatch.setattr(toolchain, "PINNED", {"torch": "0.0.1"})
    assert (toolchain.missing_packages() or "").startswith("needs torch 0.0.1, found ")
    monkeypatch.setattr(toolchain, "PINNED", {"no-such-package-anywhere": "1"})
    assert toolchain.missing_packages() == "needs no-such-package-anywhere 1, found none"


@pytest.mark.parametrize(
    ("origin", "complaint"),
    [
        ("/opt/lib/site-packages/quack/__init__.py", None),
        ("/usr/lib/python3/dist-packages/quack/__init__.py", None),
        ("/opt/extra/quack/__init__.py", "site-packages"),
        (None, "cannot be imported"),
    ],
)
def test_the_toolchain_must_lie_where_packages_are_installed(monkeypatch, origin, complaint):
    spec = None if origin is None else ModuleSpec("quack", None, origin=origin)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    why = toolchain._misplaced()
    assert why is None if complaint is None else complaint in why


class ToolchainCache:
    """What the toolchain's cache module offers."""

    def __init__(self):
        self.EXTRA_SOURCE_DIRS, self.CACHE_DIR, self.CACHE_ENABLED = [], None, True


def test_compiled_gemms_are_kept_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = ToolchainCache()
    toolchain._keep_compiled(cache)
    toolchain._keep_compiled(cache)
    assert str(tmp_path / "bouquet" / "gemms") == cache.CACHE_DIR
    assert (tmp_path / "bouquet" / "gemms").is_dir()
    assert len(cache.EXTRA_SOURCE_DIRS) == 1
    assert cache.CACHE_ENABLED


def test_without_a_place_to_write_gemms_are_compiled_in_every_process(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache = ToolchainCache()
    toolchain._keep_compiled(cache)
    assert not cache.CACHE_ENABLED


def test_a_stack_finds_the_fused_path_by_name_and_hears_why_it_is_refused():
    with pytest.raises(EngineConfigError, match="fused path cannot run"):
        load_path("fused", random_stack())


def test_importing_the_layer_imports_no_toolchain():
    check = (
        "import rose_engine.layers.fused, sys; sys.exit('quack' in sys.modules or 'cutlass' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_the_toolchain_s_decorators_import_no_compiler_and_are_put_back():
    found, function = (torch.compile, torch.compiler.disable), reference.rotate_pairs
    with toolchain._compile_decorators_idle():
        assert torch.compile(function) is function
        assert torch.compile(dynamic=True, recompile_limit=64)(function) is function
        assert "recompile_limit" in inspect.signature(torch.compile).parameters
        assert torch.compiler.disable(function) is function
    assert (torch.compile, torch.compiler.disable) == found
