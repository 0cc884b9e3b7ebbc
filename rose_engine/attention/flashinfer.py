"""FlashInfer's ragged prefill, with its `fa2` and `fa3` kernels.

Unlike the others it plans on the host before every step: 85 to 220 us, with work lists copied from a
page-locked buffer of the wrapper. So there is one wrapper for each padded shape, planned again only once
its last copy is over. Its kernels are compiled by nvcc (23 s for fa2, 103 s for fa3 on 16 cores): never
during serving, but, before a model's first start, by

    python -m rose_engine.attention.flashinfer --head-dim 128
"""

from __future__ import annotations

import argparse
import logging
import os
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rose_engine.attention.base import Attend, AttentionSpec, RaggedLayout
from rose_engine.attention.flash import HALF_PRECISION, cuda_refusal
from rose_engine.batch import Int32Array

log = logging.getLogger(__name__)

Kernels = Literal["fa2", "fa3"]

HEAD_DIMS = (64, 128, 256)
NOT_BUILT = "its library is not built yet (python -m rose_engine.attention.flashinfer)"
# Split-KV partial results; 256 MiB were too few for 8 x 4096 tokens.
WORKSPACE_BYTES = 384 << 20
WrapperKey = tuple[AttentionSpec, int, int, int]


class RaggedWrapper(Protocol):
    """What is used of `flashinfer.BatchPrefillWithRaggedKVCacheWrapper`."""

    plan: Any
    run: Any


class Library(Protocol):
    """What is used of FlashInfer's build description (`JitSpec`)."""

    @property
    def is_compiled(self) -> bool:
        """Whether the shared library is there."""
        ...

    def build_and_load(self) -> object:
        """Compile with nvcc, if need be, and load."""
        ...


@dataclass(eq=False)
class PlannedWrapper:
    """A wrapper over fixed buffers, and the end of its last plan's copy."""

    wrapper: RaggedWrapper
    copied: torch.cuda.Event | None = None

    def plan(self, cu_lengths: Tensor, spec: AttentionSpec, dtype: torch.dtype) -> None:
        """Plan `spec` over host `cu_lengths` `[B + 1]`, the last of which is the padded token count."""
        if self.copied is not None:
            self.copied.synchronize()
        left, right = spec.window
        self.wrapper.plan(
            cu_lengths,
            cu_lengths,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            causal=right == 0,
            window_left=left,
            sm_scale=spec.scale,
            q_data_type=dtype,
        )
        self.copied = _record()


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(eq=False)
class FlashInferBackend:
    """`BatchPrefillWithRaggedKVCacheWrapper`: planned for each step, in graph mode where graphs may be."""

    kernels: Kernels
    name: str = field(init=False)
    _workspace: Tensor | None = None
    _fixed: dict[WrapperKey, PlannedWrapper] = field(default_factory=dict)
    _shared: dict[AttentionSpec, PlannedWrapper] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = f"flashinfer-{self.kernels}"
        if find_spec("flashinfer") is None:
            raise ImportError("the package flashinfer is not installed")

    def refusal(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        """Needs a known head width, no bound to the right but the causal one, and a library already built."""
        needed = (9, 0) if self.kernels == "fa3" else (8, 0)
        if refusal := cuda_refusal(spec, dtype, device, HALF_PRECISION, needed):
            return refusal
        if spec.head_dim not in HEAD_DIMS:
            return f"heads of width {spec.head_dim}; it takes {', '.join(map(str, HEAD_DIMS))}"
        if spec.window[1] > 0:
            return "it has no windows with a bound to the right"
        return self._build_refusal(spec, dtype)

    def plan(
        self,
        layout: RaggedLayout,
        cu_lengths: Int32Array,
        spec: AttentionSpec,
        dtype: torch.dtype,
        *,
        captured: bool,
    ) -> None:
        """Prepare one step of `layout`'s shape, before its launch or replay and never inside a capture.

        `cu_lengths` is the host's copy. `captured` says whether the shape has, or may get, a graph: then
        its buffers stay for good; all other shapes share one wrapper.
        """
        if captured:
            planned = self._fixed.get(_key(spec, layout)) or self._add_fixed(spec, layout)
        else:
            planned = self._shared.get(spec) or self._add_shared(spec, layout)
        planned.plan(torch.from_numpy(cu_lengths), spec, dtype)

    def bind(self, layout: RaggedLayout) -> Attend:
        """Attention over `layout`, for every spec that was planned for it."""

        def attend(q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, spec: AttentionSpec) -> Tensor:
            planned = self._fixed.get(_key(spec, layout)) or self._shared[spec]
            out_TNH: Tensor = planned.wrapper.run(q_TNH, k_TMH, v_TMH)
            return out_TNH

        return attend

    def _build_refusal(self, spec: AttentionSpec, dtype: torch.dtype) -> str | None:
        if not _anything_built():
            return NOT_BUILT
        try:
            built = library(self.kernels, dtype, spec.head_dim, spec.window[0] >= 0).is_compiled
        except Exception as error:  # noqa: BLE001  it may look for a compiler, and miss it in its own ways
            return f"its library cannot be described: {error}"
        return None if built else NOT_BUILT

    def _add_fixed(self, spec: AttentionSpec, layout: RaggedLayout) -> PlannedWrapper:
        bounds = torch.zeros_like(layout.cu_lengths)
        wrapper = self._wrapper(
            layout, use_cuda_graph=True, qo_indptr_buf=bounds, kv_indptr_buf=bounds.clone()
        )
        return self._fixed.setdefault(_key(spec, layout), PlannedWrapper(wrapper))

    def _add_shared(self, spec: AttentionSpec, layout: RaggedLayout) -> PlannedWrapper:
        return self._shared.setdefault(spec, PlannedWrapper(self._wrapper(layout)))

    def _wrapper(self, layout: RaggedLayout, **graph_mode: object) -> RaggedWrapper:
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=layout.cu_lengths.device)
        make = import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper
        wrapper: RaggedWrapper = make(self._workspace, "NHD", backend=self.kernels, **graph_mode)
        return wrapper


def _anything_built() -> bool:
    """Whether FlashInfer's cache holds any library: importing it to ask takes seconds of a start."""
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    return any((base / ".cache" / "flashinfer").rglob("*.so"))


def fa2_kernels() -> FlashInferBackend:
    """The backend with FlashInfer's own kernels."""
    return FlashInferBackend("fa2")


def fa3_kernels() -> FlashInferBackend:
    """The backend with FlashInfer's Hopper kernels."""
    return FlashInferBackend("fa3")


@cache
def library(kernels: Kernels, dtype: torch.dtype, head_dim: int, sliding: bool) -> Library:
    """FlashInfer's build description of the library that serves these arguments; builds nothing."""
    describe = import_module("flashinfer.jit.attention.modules").gen_batch_prefill_module
    # ..., no positional encoding, sliding window, no soft cap, no float16 accumulation
    features = (0, sliding, False, False)
    built: Library = describe(kernels, dtype, dtype, dtype, torch.int32, head_dim, head_dim, *features)
    return built


def _key(spec: AttentionSpec, layout: RaggedLayout) -> WrapperKey:
    # Every padded shape keeps its cumulative lengths at an address of its own; so the address tells shapes
    # of different token counts apart, which the layout itself does not.
    return spec, layout.cu_lengths.data_ptr(), layout.num_sequences, layout.max_length


def main() -> None:
    """Build the libraries for one head width, so that the backend can be chosen."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--kernels", choices=("fa2", "fa3"), nargs="+", default=("fa2", "fa3"))
    parser.add_argument("--sliding", action="store_true", help="for windows with a bound to the left")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for kernels in args.kernels:
        log.info("building FlashInfer's %s kernels, heads of %d", kernels, args.head_dim)
        library(kernels, getattr(torch, args.dtype), args.head_dim, args.sliding).build_and_load()


if __name__ == "__main__":
    main()
