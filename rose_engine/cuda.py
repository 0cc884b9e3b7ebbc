"""CUDA as staging and graphs ask for it: one stream, page-locked memory, events, captures.

Knows nothing of models or batches.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rose_engine.arrival import Event


class CudaDevice:
    """One CUDA device and the stream that every step runs on. Create it once the weights are in place.

    `blocking_sync` lets waiting threads sleep instead of spin: less CPU, some tens of microseconds later.
    """

    def __init__(self, device: torch.device, *, blocking_sync: bool = False) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._blocking_sync = blocking_sync
        self._threads = threading.local()

    def enter_stream(self) -> None:
        """Make the engine's stream, and its device, current in this thread, and leave them so.

        A context manager that restores what was current costs more than all of a hot step's copies.
        """
        if not getattr(self._threads, "entered", False):
            torch.cuda.set_stream(self._stream)
            self._threads.entered = True

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Device memory `[size]` that outlives every graph."""
        with torch.cuda.stream(self._stream):
            return torch.empty(size, dtype=dtype, device=self.device)

    def page_locked(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Page-locked host memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def record(self) -> Event:
        """A new event behind everything queued on the engine's stream."""
        event = torch.cuda.Event(blocking=self._blocking_sync)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def release_cached(self) -> None:
        """Return the allocator's unused blocks to the device."""
        torch.cuda.empty_cache()


class CudaGraphRecorder:
    """Captures on a stream of its own into one memory pool.

    Capture mode is thread-local: other threads may go on asking and awaiting events meanwhile, which the
    default mode would turn into a failed capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._live: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._pool = torch.cuda.graph_pool_handle()
        self._create_workspaces()

    def capture(self, run: Callable[[], Tensor]) -> ReplayableGraph:
        """Record what `run` queues. The caller has run it before, so that nothing compiles meanwhile."""
        free_before = torch.cuda.mem_get_info(self._device)[0]
        graph = torch.cuda.CUDAGraph()
        pool = self._shared_pool()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                rows_BD = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # ending a broken capture fails too
                    graph.capture_end()
                raise
            graph.capture_end()
        self._live.add(graph)
        return ReplayableGraph(graph, rows_BD, max(0, free_before - torch.cuda.mem_get_info(self._device)[0]))

    def _shared_pool(self) -> Any:  # noqa: ANN401  torch keeps its handle's type to itself
        if not self._live:  # a pool ends with its last graph; its handle is not to be used again
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _create_workspaces(self) -> None:
        # cuBLAS keeps one workspace a stream; made during a capture it would sit in the graphs' pool.
        with torch.cuda.stream(self._stream):
            ones = torch.ones(64, 64, dtype=torch.bfloat16, device=self._device)
            torch.mm(ones, ones)


@dataclass(frozen=True, slots=True, eq=False)
class ReplayableGraph:
    """A captured forward pass and where it leaves its rows."""

    graph: torch.cuda.CUDAGraph
    rows_BD: Tensor
    num_bytes: int

    def replay(self) -> None:
        """Queue the whole pass on the current stream."""
        self.graph.replay()
