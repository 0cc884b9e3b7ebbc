"""Which Triton kernels are compiled ahead: those of a calibration, in the same variants."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rose_engine import triton_ahead
from rose_engine.attention.choice import ShapeClass
from rose_engine.attention.triton import TritonBackend
from rose_engine.build_process import BuildReport
from rose_engine.calibrate import PLAN_TOKENS, probe_lengths
from rose_engine.cuda_timing import CudaTimer
from rose_engine.kernels import launch
from rose_engine.layers.decoder import FoldedPath, PlainPath
from rose_engine.layers.fused import FusedPath
from rose_engine.layers.fused_build import GemmWidths
from rose_engine.triton_ahead import CPU, NoGemms, NoProducts, TritonBuild, jobs
from tests.rose_engine.test_fused_layout import SHAPE

triton = pytest.importorskip("triton")
WIDTHS = GemmWidths(64, 96, 2, 1, 64, 1e-6)


def variant(value: object) -> object:
    """What of an argument Triton compiles for; constants, which it compiles in, are among the numbers."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        return value if value < 1024 else "a multiple of 16" if value % 16 == 0 else "a number"
    return value


@pytest.fixture
def launched(monkeypatch):
    """Kernels are noted where they would be launched."""
    seen: set[tuple[object, ...]] = set()

    def noting(kernel, grid):
        return lambda *arguments, **options: seen.add(
            (kernel.fn.__name__, *map(variant, arguments), *sorted(options.items()))
        )

    monkeypatch.setattr(triton.runtime.JITFunction, "__getitem__", noting)
    monkeypatch.setattr(launch, "COMPILING", [(9, 0)])
    return seen


def test_what_is_compiled_is_what_a_calibration_launches(launched):
    weights = WIDTHS.stack(CPU)
    for job in jobs(weights, fused=True).values():
        job()
    ahead = set(launched)
    launched.clear()
    timer = CudaTimer(CPU, vocabulary_size=1)
    for path in (PlainPath(weights), FoldedPath(weights), FusedPath(weights, NoGemms())):
        for tokens in PLAN_TOKENS:
            batch = timer.random_batch(probe_lengths(tokens, 32_768))
            with NoProducts():
                path(batch, triton_ahead._no_attention)
    for kind in ShapeClass:
        attend, spec = TritonBackend().bind(timer._layout(kind.example)), weights.shape.attention
        rows = torch.empty(sum(kind.example), spec.num_heads, spec.head_dim, dtype=torch.bfloat16)
        heads = torch.empty(sum(kind.example), spec.num_kv_heads, spec.head_dim, dtype=torch.bfloat16)
        attend(rows, heads, heads.clone(), spec)
    assert {name for name, *_ in ahead} > {"_embed_gather", "_add_rms_norm", "_qk_norm_rotary", "_silu_mul"}
    assert ahead == launched


def test_without_a_fused_path_its_kernels_are_left_out(launched):
    for job in jobs(WIDTHS.stack(CPU), fused=False).values():
        job()
    assert launched
    assert not any(("launch_pdl", True) in kernel for kernel in launched)


COMPILE_ONE = """
import torch
from rose_engine.kernels.compile_only import compile_only
from rose_engine.kernels.silu_mul import silu_mul
compile_only((9, 0))
silu_mul(torch.zeros(16, 64, dtype=torch.bfloat16))
"""


def test_a_kernel_is_compiled_without_a_device(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", COMPILE_ONE], env=environment, check=True)
    assert [file.name for file in tmp_path.rglob("*.cubin")] == ["_silu_mul.cubin"]


class FakeProcess:
    def __init__(self, command: list[str]) -> None:
        started.append(command)

    def report(self, seconds: float) -> BuildReport:
        return BuildReport({"plain": 1.0}, {"folded": "broken"})


started: list[list[str]] = []


def test_a_build_is_started_once_and_reported(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    started.clear()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_ahead, "BuildProcess", FakeProcess)
    begun = TritonBuild(SHAPE, CPU)
    begun.end()
    begun.end()
    assert [command[-1] for command in started] == ["9.0"]
    assert caplog.text.count("Triton kernels: 1 compiled") == 1
    assert "Triton kernels: not compiled ahead: folded: broken" in caplog.text
    triton_ahead._marker(GemmWidths.of(SHAPE), (9, 0)).touch()
    TritonBuild(SHAPE, CPU).end()
    assert len(started) == 1


@pytest.mark.parametrize(("broken", "marked"), [(False, True), (True, False)])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_build_sets_the_marker_when_everything_is_compiled(monkeypatch, tmp_path, broken, marked):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(triton_ahead, "compile_only", lambda capability: None)
    monkeypatch.setattr(triton_ahead, "jobs", lambda weights, fused: {"a": fail if broken else int})
    report = triton_ahead.build(WIDTHS, (9, 0))
    assert list(report.failures) == (["a"] if broken else [])
    assert triton_ahead._marker(WIDTHS, (9, 0)).exists() is marked


def fail() -> None:
    raise ValueError("broken")
