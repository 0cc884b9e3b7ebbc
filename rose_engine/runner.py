"""The asynchronous runner: upload, replay a graph or launch eagerly, download; and what to do if that fails.

A hot step is a few numpy copies, two asynchronous copies, one graph launch and one event. Knows the model
only as a `Forward` and the device only as a `Device`: `cuda.py` supplies both, a test its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from rose_engine.arrival import Arrival
from rose_engine.batch import Batch, PackedLayout
from rose_engine.errors import DeviceLost, OutOfDeviceMemory, StepError
from rose_engine.graphs import Buckets, Forward, GraphCache, Recorder, padded_room
from rose_engine.lazy_tensor import HostCompletion, LazyTensor
from rose_engine.staging import Device, StagedBatch, Stager
from rose_engine.step_counters import StepCounters

log = logging.getLogger(__name__)

# The faults after which every further call of the context fails (CUDA runtime API, cudaError, those whose
# text ends "The process must be terminated"), as they read in error messages of torch, Triton and cuBLAS.
STICKY_FAULTS = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "illegal address space",
    "invalid program counter",
    "invalid pc",
    "hardware stack error",
    "uncorrectable ecc",
    "uncorrectable nvlink",
    "launch timed out",
    "launch timeout",
)


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What the runner is told, in tokens, sequences and bytes."""

    max_batch_tokens: int
    max_batch_sequences: int
    graph_tokens: int  # the inflection point; 0 runs everything eagerly
    graph_budget_bytes: int = 8 << 30
    slots: int = 3  # two steps in flight, one being filled


def no_plan(staged: StagedBatch) -> None:
    """Host work before each step: none."""


class AsyncRunner:
    """Runs batches on one device, in the order given. `step` may come from any thread, one at a time runs.

    `plan` is the host work that an attention backend wants done between the upload and the launch.
    """

    polled = True  # nothing calls back but a thread that waits for an event

    def __init__(
        self,
        forward: Forward,
        device: Device,
        recorder: Recorder,
        options: RunnerOptions,
        plan: Callable[[StagedBatch], None] = no_plan,
    ) -> None:
        self._forward = forward
        self._device = device
        self._plan = plan
        self._buckets = Buckets(options.graph_tokens)
        self._graphs = GraphCache(self._buckets, recorder, forward, options.graph_budget_bytes)
        room = padded_room(options.max_batch_tokens, options.max_batch_sequences)
        self._stager = Stager(device, *room, slots=options.slots)
        self._lock = threading.Lock()
        self._lost: DeviceLost | None = None

    @property
    def counters(self) -> StepCounters:
        """What became of the steps so far, and what the graphs hold."""
        return self._graphs.counters

    def would_block(self, batch: Batch) -> bool:
        """Whether `step` would hold its caller for milliseconds: compiling, capturing, launching eagerly."""
        # Who asks here asks for results too, perhaps before it ever launches, and on this device: a thread
        # that has chosen none would open a context on the first one.
        self._device.enter_stream()
        return batch.rows is not None or self._graphs.would_block(self._buckets.shape(batch.layout))

    def may_compile(self, batch: Batch) -> bool:
        """Whether a step that would block may compile or capture: seconds, where others take milliseconds."""
        return batch.rows is not None or self._graphs.may_compile(batch.layout)

    def step(self, batch: Batch) -> LazyTensor:
        """Queue one batch; its rows `[R, D]`, or what failed, arrive later.

        `result()` raises `OutOfDeviceMemory` if a single sequence of the batch does not fit on an otherwise
        empty device, `DeviceLost` from the first fault on that the context does not survive, `StepError` for
        any other failure: it concerns this batch alone.
        """
        with self._lock:
            try:
                return _arriving(self._launch_or_fail(batch))
            except StepError as error:
                return _failed(error)

    def close(self) -> None:
        """Wait for the steps in flight and let go of the graphs."""
        with self._lock:
            self._device.enter_stream()
            self._stager.close()
            self._graphs.drop_all()

    def _launch_or_fail(self, batch: Batch) -> list[Arrival]:
        """Launch; every failure is a `StepError`, and a lost device stays lost."""
        if self._lost is not None:
            raise self._lost
        try:
            return self._launch_within_memory(batch)
        except StepError:
            raise
        except Exception as error:
            self._lost = device_lost(error)
            if self._lost is None:
                log.exception("a step of %d tokens failed", batch.num_tokens)
            raise self._lost or StepError(f"the step failed: {error}") from error

    def _launch(self, batch: Batch) -> Arrival:
        shape = self._buckets.shape(batch.layout)
        self._device.enter_stream()
        staged = self._stager.upload(batch, shape)
        try:
            self._plan(staged)
            run = self._graphs.find(staged) or self._eager
            return self._stager.download(staged, run(staged))
        except BaseException:
            with contextlib.suppress(RuntimeError):  # on a lost device even recording an event fails
                self._stager.abandon(staged)
            raise

    def _eager(self, staged: StagedBatch) -> Tensor:
        with torch.inference_mode():
            rows_RD = self._forward(staged.eager_inputs())
        self._graphs.ran_eagerly(staged)
        return rows_RD

    def _launch_within_memory(self, batch: Batch) -> list[Arrival]:
        """Launch; without memory drop all graphs and try again; then by halves."""
        if (arrival := self._try_launch(batch)) is not None:
            return [arrival]
        self._graphs.drop_all()
        self._device.release_cached()
        if (arrival := self._try_launch(batch)) is not None:
            return [arrival]
        if batch.num_sequences == 1:
            raise OutOfDeviceMemory(f"no device memory for one sequence of {batch.num_tokens} tokens")
        return [arrival for half in halves(batch) for arrival in self._launch_within_memory(half)]

    def _try_launch(self, batch: Batch) -> Arrival | None:
        try:
            return self._launch(batch)
        except torch.OutOfMemoryError:
            return None  # leaving the handler frees what the failed launch still held


def device_lost(error: Exception) -> DeviceLost | None:
    """What `error` means if it is a fault that ends the device context, else `None`."""
    text = str(error).lower()
    if any(fault in text for fault in STICKY_FAULTS):
        return DeviceLost(f"the device context is dead: {str(error).splitlines()[0]}")
    return None


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Split a batch of at least two sequences in the middle of its sequences."""
    middle = batch.num_sequences // 2
    return _part(batch, 0, middle), _part(batch, middle, batch.num_sequences)


def _part(batch: Batch, first: int, last: int) -> Batch:
    start, end = (int(batch.layout.cu_lengths[i]) for i in (first, last))
    segments_T = None if batch.segment_ids_T is None else batch.segment_ids_T[start:end]
    layout = PackedLayout.of(batch.layout.lengths[first:last])
    rows = None if batch.rows is None else batch.rows.part(first, last)
    return Batch(batch.token_ids_T[start:end], batch.position_ids_T[start:end], segments_T, layout, rows)


def _failed(error: StepError) -> LazyTensor:
    def collect() -> NoReturn:
        raise error

    completion = HostCompletion()
    completion.set()
    return LazyTensor(completion, collect)


def _arriving(arrivals: list[Arrival]) -> LazyTensor:
    last = arrivals[-1]  # one stream: when the last part is here, all are
    if len(arrivals) == 1:
        return LazyTensor(last, last.collect)
    return LazyTensor(last, lambda: np.concatenate([arrival.collect() for arrival in arrivals]))
