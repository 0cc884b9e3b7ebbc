"""The fused decoder path on a Hopper card: every epilogue, every class of token counts, every early start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.decoder_stack import QWEN3_06B
from rose_engine.build_process import BuildProcess
from rose_engine.kernels.cute import toolchain
from rose_engine.layers.fused_build import GemmWidths, build_command
from tests.gpu.fused_comparisons import STARTS

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 150  # compiling included; without a hang about half a minute

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if why := toolchain.refusal(torch.device("cuda")):
        pytest.skip(why)


@pytest.mark.parametrize("start", STARTS)
def test_fused_layers_agree_with_plain_torch_and_never_hang(start: str, record_property):
    """In a process of its own: a GEMM that waits for itself ends with the process, and fails this test."""
    comparisons = compared(start)
    record_property("comparisons", len(comparisons))
    record_property("worst_error_over_limit", max(c["error"] / c["limit"] for c in comparisons if c["limit"]))


def test_what_is_compiled_without_a_device_agrees_and_nothing_else_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path))
    report = BuildProcess(build_command(GemmWidths.of(QWEN3_06B))).report()
    assert report.failures == {}
    objects = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.o")}
    assert len(objects) == len(report.seconds)
    compared("tuned")
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.o")} == objects


def compared(start: str) -> list[dict[str, Any]]:
    """The comparisons for one kind of early start, every one within its limit."""
    command = [sys.executable, "-m", "tests.gpu.fused_comparisons", start]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            output, errors = child.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            output, errors = child.communicate()
            pytest.fail(f"hung after: {output.splitlines()[-1:]}\n{errors[-2000:]}")
    assert child.returncode == 0, errors[-4000:]
    comparisons = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert comparisons, errors
    worse = [c for c in comparisons if not c["error"] <= c["limit"]]  # NaN is worse
    assert not worse, worse
    return comparisons
