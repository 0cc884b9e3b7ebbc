"""Compiles the fused path's GEMMs side by side, in processes of their own, into the cache on disk.

A first start would compile a dozen GEMMs one after the other, about two seconds each; this does it while the
start goes on with other things. Knows shapes, not weights.

    python -m rose_engine.layers.fused_build '{"width": 1024, ...}' PART:MAX_TOKENS ...
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rose_engine.attention.base import AttentionSpec
from rose_engine.kernels.cute import toolchain
from rose_engine.layers.decoder import DecoderShape, LayerWeights, StackWeights
from rose_engine.layers.fused import PARTS, FusedPath
from rose_engine.layers.fused_config import H200_EARLY_CONFIGS
from rose_engine.layers.rotary import RotarySpec

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 120.0
# A process takes as long to start as to compile three GEMMs, and more of them slow the start they help.
_MOST_PROCESSES = 6
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
    """The compilations under way. `wait` before the first launch, or it compiles a second time.

    Does nothing where the toolchain is missing, or where an earlier start has compiled everything.
    """

    def __init__(self, shape: DecoderShape, device: torch.device) -> None:
        self._widths = GemmWidths.of(shape)
        parts = [] if toolchain.refusal(device) else list(_missing(self._widths))
        processes = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 2) // 2))
        self._pool = ThreadPoolExecutor(processes, "gemm-build")
        self._builds: list[Future[str | None]] = [
            self._pool.submit(_run, self._widths, share)
            for share in (parts[first::processes] for first in range(processes))
            if share
        ]

    def wait(self) -> None:
        """Wait until all are done. One that failed is reported: its GEMM is then compiled when first used."""
        failures = [why for build in self._builds if (why := build.result()) is not None]
        self._pool.shutdown()
        for why in failures:
            log.warning("a GEMM was not compiled ahead: %s", why)
        if self._builds and not failures:
            _marker(self._widths).touch()


@cache
def gemm_builds(shape: DecoderShape, device: torch.device) -> GemmBuilds:
    """The compilations of this process for one shape, begun by whoever asks first."""
    return GemmBuilds(shape, device)


def _missing(widths: GemmWidths) -> Iterator[tuple[str, int]]:
    """The parts of every class of token counts, unless an earlier start has compiled them all."""
    if not _marker(widths).exists():
        for max_tokens, config in H200_EARLY_CONFIGS:
            yield from ((part, min(max_tokens, _MOST_TOKENS)) for part in PARTS if config.launches(part))


def _marker(widths: GemmWidths) -> Path:
    """A file whose presence says that every part was compiled: for these widths, by these sources."""
    facts = (widths, H200_EARLY_CONFIGS, toolchain.PINNED, toolchain.sources_hash())
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return toolchain.cache_folder() / f"compiled-{name}"


def _run(widths: GemmWidths, parts: Sequence[tuple[str, int]]) -> str | None:
    """Compile parts in one process; why that failed, if it did."""
    names = [f"{part}:{max_tokens}" for part, max_tokens in parts]
    command = [sys.executable, "-m", __name__, json.dumps(asdict(widths)), *names]
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{', '.join(names)}: {error}"
    last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"{', '.join(names)}: {last_line}" if done.returncode else None


def main() -> None:
    """Compile the parts named on the command line."""
    widths, *names = sys.argv[1:]
    path = FusedPath(GemmWidths(**json.loads(widths)).stack(torch.device("cuda", 0)))
    for part, max_tokens in (name.split(":") for name in names):
        path.launch(part, int(max_tokens))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
