"""The fused decoder path on a Hopper card: every epilogue, every class of token counts, every early start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rose_engine.kernels.cute import toolchain
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
    record_property("comparisons", len(comparisons))
    record_property("worst_error_over_limit", max(c["error"] / c["limit"] for c in comparisons))
    worse = [c for c in comparisons if not c["error"] <= c["limit"]]  # NaN is worse
    assert not worse, worse
