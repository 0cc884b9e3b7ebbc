"""Batches on the device, and the way there and back: a ring of page-locked slots, one copy each way.

Up: a slot holds token ids, positions, segments and cumulative lengths in one int32 buffer, padded to a
`PaddedShape`, so that one copy fills the inputs that every captured graph reads. Down: the rows go to the
slot's page-locked buffer on the same stream, and one event stands for the forward pass and that copy.
Knows nothing of models, graphs or attention, and of the device only what `Device` says.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rose_engine.arrival import Arrival, Event, EventWatcher
from rose_engine.attention.base import RaggedLayout
from rose_engine.batch import Batch, Int32Array, PackedLayout, RowLayout
from rose_engine.lazy_tensor import Rows


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """A `Batch` as the model sees it: int32 tensors over T packed tokens, on the device."""

    token_ids_T: Tensor
    position_ids_T: Tensor  # inside each sequence, from 0; a family adds its own offset
    segment_ids_T: Tensor | None
    layout: RaggedLayout
    per_token: bool = False  # the rows are the tokens' hidden states; else the head's


class PaddedShape(NamedTuple):
    """What a step is padded to, and the key of its graph. `max_length` bounds every sequence."""

    num_sequences: int
    num_tokens: int
    max_length: int


@dataclass(frozen=True, slots=True, eq=False)
class StagedBatch:
    """A step's inputs: padded tensors on the device, what they were padded from, the slot it borrows."""

    inputs: DeviceBatch  # `layout.lengths` is None: the tensors belong to the shape, not to the step
    shape: PaddedShape
    layout: PackedLayout
    slot: Slot
    end: int  # int32 values in the slot; the last are the cumulative lengths
    rows: RowLayout | None = None
    spans_R2: Tensor | None = None  # on the device, of `rows` that have spans

    @property
    def cu_lengths(self) -> Int32Array:
        """The cumulative lengths as they were uploaded, `[B + 1]` of the padded shape, in the slot."""
        return self.slot.array[self.end - self.shape.num_sequences - 1 : self.end]

    def eager_inputs(self) -> DeviceBatch:
        """The inputs with the lengths the host knows, those of spare sequences included."""
        lengths = tuple(np.diff(self.cu_lengths).tolist())
        layout = dataclasses.replace(self.inputs.layout, lengths=lengths, spans_R2=self.spans_R2)
        per_token = self.rows is not None and self.spans_R2 is None
        return dataclasses.replace(self.inputs, layout=layout, per_token=per_token)


class Device(Protocol):
    """What staging asks of a device; a test supplies its own."""

    def enter_stream(self) -> None:
        """Make the engine's stream the current one of this thread, for good."""
        ...

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised device memory, `[size]`."""
        ...

    def page_locked(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory that the device copies from and to without the host's help."""
        ...

    def record(self) -> Event:
        """An event behind everything the engine's stream holds now."""
        ...

    def release_cached(self) -> None:
        """Hand memory that nothing uses back to the device; may wait for it. Never on the hot path."""
        ...


class Slot:
    """Page-locked memory of one step in flight: its packed inputs and, once the width is known, its rows."""

    def __init__(self, device: Device, num_inputs: int) -> None:
        self._device = device
        self._inputs = device.page_locked((num_inputs,), torch.int32)
        self.array: Int32Array = self._inputs.numpy()
        self._inputs_of: dict[int, Tensor] = {}
        self._rows: Tensor | None = None
        self._rows_of: dict[tuple[torch.Size, torch.dtype], tuple[Tensor, Rows]] = {}
        self.arrival: Arrival | None = None

    def free(self) -> None:
        """Wait until the step that used the slot last is over and its rows are safe."""
        if self.arrival is not None:
            self.arrival.settle()
            self.arrival = None

    def inputs(self, size: int) -> Tensor:
        """The first `size` input values, as a tensor made once: views are a good part of a hot step."""
        if (view := self._inputs_of.get(size)) is None:
            view = self._inputs_of[size] = self._inputs[:size]
        return view

    def rows_like(self, rows_BD: Tensor, max_sequences: int) -> tuple[Tensor, Rows]:
        """Room for rows of this shape and dtype, as a tensor and as an array `[B, D]`, made once."""
        key = rows_BD.shape, rows_BD.dtype
        if (views := self._rows_of.get(key)) is None:
            views = self._rows_of[key] = self._view_rows(*key, max_sequences)
        return views

    def _view_rows(self, shape: torch.Size, dtype: torch.dtype, max_sequences: int) -> tuple[Tensor, Rows]:
        num_rows, *width = shape
        if self._rows is None or list(self._rows.shape[1:]) != width or self._rows.dtype != dtype:
            self._rows = self._device.page_locked((max_sequences, *width), dtype)
            self._rows_of.clear()
        view = self._rows[:num_rows]
        return view, view.numpy()


class Stager:
    """The ring of slots and the device buffer all steps share: the stream keeps one step's from the next's.

    `slots` = steps in flight + 1 that is being filled. Not thread-safe; call it on the engine's stream.
    """

    def __init__(self, device: Device, max_tokens: int, max_sequences: int, slots: int = 3) -> None:
        assert slots > 0
        self._device = device
        self._max_sequences = max_sequences
        size = 3 * max_tokens + max_sequences + 1
        self._device_inputs = device.empty(size, torch.int32)
        self._slots = [Slot(device, size) for _ in range(slots)]
        self._next = 0
        self._views: dict[PaddedShape, DeviceBatch] = {}
        self._prefixes: dict[int, Tensor] = {}
        self._watcher = EventWatcher()

    def upload(self, batch: Batch, shape: PaddedShape) -> StagedBatch:
        """Queue one copy that puts `batch`, padded to `shape`, where the device reads it.

        Spare tokens have id, position and segment 0, lie behind the last real sequence and form the last
        spare one; other spare sequences are empty and lie between. Waits only if every slot is in flight.
        """
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.free()
        size = self._fill(slot.array, batch, shape)
        self._device_inputs_of(size).copy_(slot.inputs(size), non_blocking=True)
        staged = StagedBatch(self.inputs(shape), shape, batch.layout, slot, size)
        return staged if batch.rows is None else self._with_rows(staged, batch.rows)

    def inputs(self, shape: PaddedShape) -> DeviceBatch:
        """The device tensors that steps of `shape` read; the same memory every time."""
        if (views := self._views.get(shape)) is None:
            if len(self._views) >= 4096:
                self._views.clear()
            views = self._views[shape] = self._view(shape)
        return views

    def download(self, staged: StagedBatch, rows_BD: Tensor) -> Arrival:
        """Queue the copy of all rows, the spare ones too, to the host and mark its end."""
        if staged.rows is None:
            target, array = staged.slot.rows_like(rows_BD, self._max_sequences)
            array = array[: staged.layout.num_sequences]
        else:  # there may be one for every token: memory of their own, which the allocator keeps for the next
            rows_BD = rows_BD[: staged.rows.num_rows]
            target = self._device.page_locked(tuple(rows_BD.shape), rows_BD.dtype)
            array = target.numpy()
        target.copy_(rows_BD, non_blocking=True)
        arrival = Arrival(self._device.record(), array, self._watcher)
        staged.slot.arrival = arrival
        return arrival

    def abandon(self, staged: StagedBatch) -> None:
        """Give the slot back after a step that failed; its upload may still be under way."""
        staged.slot.arrival = Arrival(self._device.record(), None, self._watcher)

    def close(self) -> None:
        """Wait for every step in flight and end the watcher."""
        for slot in self._slots:
            slot.free()
        self._watcher.close()

    def _with_rows(self, staged: StagedBatch, rows: RowLayout) -> StagedBatch:
        """`staged` with its own rows; where these are pooled from spans, the spans are on their way too."""
        spans_R2 = rows.packed_spans(staged.layout)
        if spans_R2 is None:
            return dataclasses.replace(staged, rows=rows)
        host = self._device.page_locked((spans_R2.size,), torch.int32)
        host.numpy()[:] = spans_R2.reshape(-1)
        on_device = self._device.empty(spans_R2.size, torch.int32)
        on_device.copy_(host, non_blocking=True)
        return dataclasses.replace(staged, rows=rows, spans_R2=on_device.view(-1, 2))

    def _device_inputs_of(self, size: int) -> Tensor:
        if (prefix := self._prefixes.get(size)) is None:
            prefix = self._prefixes[size] = self._device_inputs[:size]
        return prefix

    def _fill(self, host: Int32Array, batch: Batch, shape: PaddedShape) -> int:
        """Pack a batch into `host`; returns the int32 values used."""
        real, padded = batch.num_tokens, shape.num_tokens
        offset = 3 * padded
        host_3T = host[:offset].reshape(3, padded)
        host_3T[0, :real] = batch.token_ids_T
        host_3T[1, :real] = batch.position_ids_T
        host_3T[2, :real] = 0 if batch.segment_ids_T is None else batch.segment_ids_T
        starts = offset + batch.num_sequences + 1
        host[offset:starts] = batch.layout.cu_lengths
        end = offset + shape.num_sequences + 1
        if end > starts:  # spare sequences, of the spare tokens if there are any
            host_3T[:, real:] = 0
            host[starts:end] = real
            host[end - 1] = padded
        return end

    def _view(self, shape: PaddedShape) -> DeviceBatch:
        end = 3 * shape.num_tokens
        rows_3T = self._device_inputs[:end].view(3, shape.num_tokens)
        cu_lengths = self._device_inputs[end : end + shape.num_sequences + 1]
        layout = RaggedLayout(cu_lengths, shape.max_length, shape.num_sequences, None)
        return DeviceBatch(rows_3T[0], rows_3T[1], rows_3T[2], layout)
