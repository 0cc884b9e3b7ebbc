"""Compiles the Triton kernels that a decoder's calibration launches, beside a start and without its card.

Runs the decoder's paths, and attention, over one layer on the CPU, with batches like the calibration's, where
every launch is a compilation (`kernels.compile_only`) and products are left out. What it misses, or compiles
in vain, costs time alone. Nobody waits for it: a kernel that is wanted sooner is compiled where it is wanted.

    python -m rose_engine.triton_ahead '{"width": 1024, ...}' 9.0
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rose_engine.attention.base import RaggedLayout
from rose_engine.attention.choice import ShapeClass
from rose_engine.attention.triton import TritonBackend
from rose_engine.batch import PackedLayout
from rose_engine.build_process import (
    BuildProcess,
    BuildReport,
    log_report,
    process_seconds,
    run,
    side_by_side,
)
from rose_engine.calibrate import PLAN_TOKENS, key_of, probe_lengths
from rose_engine.kernels import launch
from rose_engine.kernels.compile_only import compile_only
from rose_engine.kernels.cute import toolchain
from rose_engine.layers.decoder import DecoderPath, DecoderShape, FoldedPath, PlainPath, StackWeights
from rose_engine.layers.fused import FusedPath
from rose_engine.layers.fused_build import GemmWidths
from rose_engine.layers.fused_config import H200_EARLY_CONFIGS
from rose_engine.staging import DeviceBatch

CPU = torch.device("cpu")


class TritonBuild:
    """The build under way, in a process that ends with this one. Nothing where an earlier one did all."""

    def __init__(self, shape: DecoderShape, device: torch.device) -> None:
        widths, capability = GemmWidths.of(shape), torch.cuda.get_device_capability(device)
        wanted = launch.triton is not None and not _marker(widths, capability).exists()
        self._process = BuildProcess(build_command(widths, capability)) if wanted else None

    def end(self) -> None:
        """Report what was compiled; what is not compiled by now is no longer of use."""
        if self._process is not None:
            log_report("Triton kernels", self._process.report(seconds=0.1))
            self._process = None


@cache
def triton_build(shape: DecoderShape, device: torch.device) -> TritonBuild:
    """The build of this process for one shape, begun by whoever asks first."""
    return TritonBuild(shape, device)


def build_command(widths: GemmWidths, capability: tuple[int, int]) -> list[str]:
    """What compiles the kernels as a `BuildProcess`."""
    major, minor = capability
    return [sys.executable, "-m", __name__, json.dumps(asdict(widths)), f"{major}.{minor}"]


def build(widths: GemmWidths, capability: tuple[int, int]) -> BuildReport:
    """Compile the kernels for cards of `capability`, side by side, and say so by a marker beside them.

    For a process of its own: it launches no kernel ever after.
    """
    torch.set_num_threads(1)  # a forked process has none of the others, and would wait for them
    compile_only(capability)
    imported = process_seconds()
    fused = capability == toolchain.HOPPER and widths.misfit is None
    seconds, failures = side_by_side(jobs(widths.stack(CPU), fused=fused))
    if not failures:
        _marker(widths, capability).touch()
    return BuildReport(seconds, failures, imported, process_seconds())


def jobs(weights: StackWeights, *, fused: bool) -> dict[str, Callable[[], None]]:
    """What the calibration times, in its order, in parts that have few kernels in common.

    `fused`: whether there is a fused path.
    """
    made: dict[str, Callable[[], None]] = {}
    for kind in ShapeClass:
        made[f"attention of {kind.value}"] = partial(_attend, weights, kind.example)
    made["plain"] = partial(_run_path, PlainPath(weights), PLAN_TOKENS)
    made["folded"] = partial(_run_path, FoldedPath(weights), PLAN_TOKENS)
    bounds = [0, *(most for most, _ in H200_EARLY_CONFIGS)] if fused else []
    for low, high in pairwise(bounds):
        counts = [tokens for tokens in PLAN_TOKENS if low < tokens <= high]
        made[f"fused from {low + 1} tokens"] = partial(_run_path, FusedPath(weights, NoGemms()), counts)
    return made


def _run_path(path: DecoderPath, counts: Iterable[int]) -> None:
    with NoProducts():
        for tokens in counts:
            layout = _layout(probe_lengths(tokens, max(PLAN_TOKENS)))
            ids_T = torch.zeros(tokens, dtype=torch.int32)
            path(DeviceBatch(ids_T, ids_T, ids_T, layout), _no_attention)


def _attend(weights: StackWeights, lengths: tuple[int, ...]) -> None:
    spec, attend = weights.shape.attention, TritonBackend().bind(_layout(lengths))
    q_TNH, k_TMH, v_TMH = (
        torch.empty(sum(lengths), heads, spec.head_dim, dtype=weights.embedding_VD.dtype)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    attend(q_TNH, k_TMH, v_TMH, spec)


def _layout(lengths: tuple[int, ...]) -> RaggedLayout:
    packed = PackedLayout.of(np.array(lengths, np.int32))
    return RaggedLayout(torch.from_numpy(packed.cu_lengths), packed.max_length, packed.num_sequences, lengths)


def _no_attention(q_TNH: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q_TNH, memory_format=torch.contiguous_format)


class NoGemms:
    """`FusedGemms` that leave their outputs as they are."""

    def project_qkv(self, *_: object) -> None:
        """Nothing."""

    def project_gate_up(self, *_: object) -> None:
        """Nothing."""

    def add_projection(self, *_: object) -> None:
        """Nothing."""


class NoProducts(TorchFunctionMode):
    """Matrix products give their outputs' shapes, and nothing in them."""

    def __torch_function__(
        self,
        function: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """See `TorchFunctionMode`."""
        if function is functional.linear:
            rows, weight = args
            return rows.new_empty(len(rows), len(weight))
        if function is Tensor.addmm_:
            return args[0]
        return function(*args, **(kwargs or {}))


def _marker(widths: GemmWidths, capability: tuple[int, int]) -> Path:
    """A file whose presence says that everything is compiled: for this, by what is installed."""
    sources = sorted(Path(launch.__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    key = key_of((widths, H200_EARLY_CONFIGS, PLAN_TOKENS, digest), f"sm_{capability}")
    return Path(launch.triton.knobs.cache.dir) / f"bouquet-{key}"


if __name__ == "__main__":
    major, _, minor = sys.argv[2].partition(".")
    run(lambda: build(GemmWidths(**json.loads(sys.argv[1])), (int(major), int(minor))))
