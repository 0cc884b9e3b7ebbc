"""Timing on a CUDA device: what the calibration asks for.

Device time is taken with the launches hidden behind a sleeping kernel, so that a slow host does not count
as a slow device. Runs on the current stream, at start, while nothing else does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rose_engine.attention.base import AttentionBackend, AttentionSpec, RaggedLayout
from rose_engine.attention.flashinfer import FlashInferBackend
from rose_engine.batch import PackedLayout
from rose_engine.calibrate import Timing, median
from rose_engine.graphs import Forward
from rose_engine.staging import DeviceBatch

CLOCK_HZ = 2e9  # an upper bound of the multiprocessors' clock: the sleep is never too short
LAYERS = 24  # of a typical model: one plan on the host serves that many calls
CALLS = 10  # attention calls timed together, as a model's layers follow each other


@dataclass(frozen=True, slots=True)
class CudaTimer:
    """Times forward passes and attention calls on one device."""

    device: torch.device
    vocabulary_size: int

    def forward(self, forward: Forward, batch: DeviceBatch, repeats: int = 3) -> Timing:
        """One eager forward pass."""
        return self._timing(lambda: forward(batch), repeats)

    def attention(
        self, backend: AttentionBackend, spec: AttentionSpec, lengths: tuple[int, ...], dtype: torch.dtype
    ) -> float:
        """Seconds of one attention call over sequences of `lengths`, its share of host planning included."""
        layout = self._layout(lengths)
        planning = _plan_seconds(backend, layout, spec, dtype)
        attend = backend.bind(layout)
        q_TNH, k_TMH, v_TMH = (
            torch.randn(sum(lengths), heads, spec.head_dim, device=self.device, dtype=dtype)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )

        def calls() -> None:
            for _ in range(CALLS):
                attend(q_TNH, k_TMH, v_TMH, spec)

        return self._timing(calls, 5).device_seconds / CALLS + planning / LAYERS

    def random_batch(self, lengths: tuple[int, ...]) -> DeviceBatch:
        """Random token ids, on the device."""
        packed = PackedLayout.of(np.array(lengths, np.int32))
        ids_T = torch.randint(
            self.vocabulary_size, (packed.num_tokens,), dtype=torch.int32, device=self.device
        )
        positions_T = torch.from_numpy(packed.positions()).to(self.device)
        return DeviceBatch(ids_T, positions_T, torch.zeros_like(ids_T), self._layout(lengths))

    def _layout(self, lengths: tuple[int, ...]) -> RaggedLayout:
        packed = PackedLayout.of(np.array(lengths, np.int32))
        cu_lengths = torch.from_numpy(packed.cu_lengths).to(self.device)
        return RaggedLayout(cu_lengths, packed.max_length, packed.num_sequences, lengths)

    @torch.inference_mode()
    def _timing(self, run: Callable[[], Tensor | None], repeats: int) -> Timing:
        run()  # compiles
        launches = [self._launch_seconds(run) for _ in range(repeats)]
        launch = median(launches)
        return Timing(median([self._device_seconds(run, launch) for _ in range(repeats)]), launch)

    def _launch_seconds(self, run: Callable[[], Tensor | None]) -> float:
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def _device_seconds(self, run: Callable[[], Tensor | None], launch_seconds: float) -> float:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda._sleep(int(CLOCK_HZ * (2 * launch_seconds + 1e-3)))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3


def _plan_seconds(
    backend: AttentionBackend, layout: RaggedLayout, spec: AttentionSpec, dtype: torch.dtype
) -> float:
    """Plan twice, for the backend that plans; the second time counts."""
    if not isinstance(backend, FlashInferBackend):
        return 0.0
    cu_lengths = layout.cu_lengths.cpu().numpy()
    backend.plan(layout, cu_lengths, spec, dtype, captured=False)
    start = time.perf_counter()
    backend.plan(layout, cu_lengths, spec, dtype, captured=False)
    return time.perf_counter() - start
