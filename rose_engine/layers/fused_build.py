"""Compiles the fused path's GEMMs side by side into the cache on disk, in a process beside the start.

Compiling needs no device. So one process imports torch and the toolchain, which takes longer than to compile
a GEMM, makes no CUDA call, and forks into one process for each few GEMMs. Knows shapes, not weights.

    python -m rose_engine.layers.fused_build '{"width": 1024, ...}'
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from rose_engine.attention.base import AttentionSpec
from rose_engine.build_process import (
    BuildProcess,
    BuildReport,
    log_report,
    process_seconds,
    run,
    side_by_side,
)
from rose_engine.kernels.cute import toolchain
from rose_engine.layers.decoder import DecoderShape, LayerWeights, StackWeights
from rose_engine.layers.fused import PARTS, FusedPath
from rose_engine.layers.fused_config import H200_EARLY_CONFIGS
from rose_engine.layers.rotary import RotarySpec
from rose_engine.stages import stage

_MOST_TOKENS = 2048  # what a class without a bound is compiled with; the compiled object serves any number


@dataclass(frozen=True, slots=True)
class GemmWidths:
    """What the compiled GEMMs depend on, apart from their configurations."""

    width: int
    inner_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float

    @classmethod
    def of(cls, shape: DecoderShape) -> GemmWidths:
        """Those of a decoder stack."""
        spec = shape.attention
        heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
        return cls(shape.width, shape.inner_width, *heads, shape.norm_eps)

    @property
    def misfit(self) -> str | None:
        """Why the configurations do not fit these widths; `None` when they do."""
        return next(
            filter(None, (config.qkv.refusal(self.head_dim) for _, config in H200_EARLY_CONFIGS)), None
        )

    @property
    def marker(self) -> Path:
        """A file whose presence says that everything is compiled: for these widths, by what is installed."""
        facts = (self, H200_EARLY_CONFIGS, toolchain.facts())
        return toolchain.cache_folder() / f"compiled-{sha256(repr(facts).encode()).hexdigest()[:16]}"

    def stack(self, device: torch.device) -> StackWeights:
        """A stack of one layer with weights of these widths; their values do not matter."""
        spec = AttentionSpec(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5, (-1, 0))
        rotary = RotarySpec(self.head_dim, theta=10_000.0, max_positions=1)
        shape = DecoderShape(self.width, self.inner_width, 1, 1, spec, rotary, self.norm_eps)

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.bfloat16, device=device)

        layer = LayerWeights(
            qkv_QD=zeros(shape.qkv_width, self.width),
            qk_norm_2H=zeros(2, self.head_dim),
            output_DV=zeros(self.width, self.num_heads * self.head_dim),
            gate_up_GD=zeros(2 * self.inner_width, self.width),
            down_DI=zeros(self.width, self.inner_width),
        )
        return StackWeights(shape, zeros(1, self.width), zeros(1, self.head_dim), (layer,), zeros(self.width))


class GemmBuilds:
    """The build under way, in a process that ends with this one. `wait` before the first launch.

    Does nothing where the toolchain is missing, or where an earlier start has compiled everything.
    """

    def __init__(self, shape: DecoderShape, device: torch.device) -> None:
        self.shape = shape
        widths = GemmWidths.of(shape)
        refused = widths.misfit or toolchain.refusal(device)
        wanted = refused is None and not widths.marker.exists()
        self._process = BuildProcess(build_command(widths)) if wanted else None

    def wait(self) -> None:
        """Wait until all are done. One that failed is reported: its GEMM is then compiled when first used."""
        if self._process is not None:
            with stage("waiting for GEMMs"):
                report = self._process.report()
            self._process = None
            log_report("GEMMs", report)


@cache
def gemm_builds(shape: DecoderShape, device: torch.device) -> GemmBuilds:
    """The compilations of this process for one shape, begun by whoever asks first."""
    return GemmBuilds(shape, device)


def build_command(widths: GemmWidths) -> list[str]:
    """What compiles the GEMMs of `widths` as a `BuildProcess`."""
    return [sys.executable, "-m", __name__, json.dumps(asdict(widths))]


def build(widths: GemmWidths) -> BuildReport:
    """Compile everything for `widths` into the cache, side by side, and say so by the marker.

    For a process of its own: it must have made no CUDA call yet, and compiles for Hopper ever after.
    """
    torch.set_num_threads(1)  # a forked process has none of the others, and would wait for them
    toolchain.compile_without_device()
    gemms = toolchain.gemms_module()
    imported = process_seconds()
    calls = gemms.objects_of(lambda noting: _launch_all(FusedPath(widths.stack(torch.device("cpu")), noting)))
    seconds, failures = side_by_side({str(call): call.compile for call in calls})
    if not failures:
        widths.marker.touch()
    return BuildReport(seconds, failures, imported, process_seconds())


def _launch_all(path: FusedPath) -> None:
    """Every part of every class of token counts, the largest first: those take the longest to compile."""
    for max_tokens, config in reversed(H200_EARLY_CONFIGS):
        for part in filter(config.launches, PARTS):
            path.launch(part, min(max_tokens, _MOST_TOKENS))


if __name__ == "__main__":
    run(lambda: build(GemmWidths(**json.loads(sys.argv[1]))))
