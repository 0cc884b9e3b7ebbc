"""Every Triton kernel, interpreted on the CPU against its twin, and compiled for a card that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


def run_in_a_process_of_its_own(file: str, **environment: str) -> None:
    alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.run(
        [sys.executable, "-m", "pytest", str(HERE / file), "-p", "no:cacheprovider"],
        env=os.environ | alone | environment,
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]


def test_kernels_agree_with_their_twins_in_the_interpreter():
    run_in_a_process_of_its_own("interpreted.py", TRITON_INTERPRET="1")


def test_kernels_compile_for_hopper(tmp_path: Path):
    run_in_a_process_of_its_own("offline.py", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
