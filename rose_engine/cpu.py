"""Steps on the CPU: one worker thread computes them in the order they were handed in.

The same seam as on a GPU (upload, run, download), so that the caller of `step` never computes. Knows nothing
of model families or files.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rose_engine.attention.base import AttentionBackend, RaggedLayout
from rose_engine.batch import Batch, Int32Array, PackedLayout, RowLayout
from rose_engine.config import ResolvedConfig
from rose_engine.errors import StepError
from rose_engine.lazy_tensor import HostCompletion, LazyTensor, Rows
from rose_engine.models.base import Model
from rose_engine.staging import DeviceBatch
from rose_engine.step_counters import StepCounters


class CpuRunner:
    """A model, and the thread that runs it."""

    polled = False  # the thread calls back when it is done

    def __init__(self, model: Model, settings: ResolvedConfig) -> None:
        self._model = model
        self._settings = settings
        self.counters = StepCounters()
        self._attention: AttentionBackend = settings.attention.backend
        # The number of threads is a property of the thread that starts a parallel region: set it there.
        self._worker = ThreadPoolExecutor(
            1, "rose-cpu", initializer=torch.set_num_threads, initargs=(settings.threads,)
        )

    @property
    def attention_summary(self) -> str:
        """The attention backend in use, and why."""
        return str(self._settings.attention)

    @property
    def batch_tokens(self) -> int:
        """Where batches are cut: as the settings say."""
        return self._settings.max_batch_tokens

    def step(self, batch: Batch) -> LazyTensor:
        """Queue `batch`; its rows `[R, D]`, or a `StepError`, arrive later."""
        completion = HostCompletion()
        rows = self._worker.submit(self._compute, batch)
        rows.add_done_callback(lambda _: completion.set())
        return LazyTensor(completion, lambda: _collect(rows))

    def would_block(self, batch: Batch) -> bool:  # noqa: ARG002 - other devices have cold shapes
        """Never: queueing is all that `step` does."""
        return False

    def may_compile(self, batch: Batch) -> bool:  # noqa: ARG002 - other devices have cold shapes
        """Never."""
        return False

    def step_seconds(self, num_tokens: int) -> float | None:  # noqa: ARG002 - other devices are calibrated
        """Not measured: the processor is shared with whatever else runs."""
        return None

    def close(self) -> None:
        """Finish what was queued and end the thread."""
        self._worker.shutdown(wait=True)

    def _compute(self, batch: Batch) -> Rows:
        self.counters.eager += 1
        with torch.inference_mode():
            upload = Upload.of(batch)
            return upload.download(self._run(upload.inputs))

    def _run(self, inputs: DeviceBatch) -> Tensor:
        return self._model(inputs, self._attention.bind(inputs.layout))


def _collect(rows: Future[Rows]) -> Rows:
    try:
        return rows.result()
    except Exception as error:
        raise StepError(f"the forward pass failed: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class Upload:
    """A batch as tensors, sorted so that sequences of equal length lie side by side for attention."""

    inputs: DeviceBatch
    row_R: Int32Array  # row i of the model is row row_R[i] of the batch

    @classmethod
    def of(cls, batch: Batch) -> Upload:
        """Sort `batch` and wrap it in tensors."""
        order_B = np.argsort(batch.layout.lengths, kind="stable").astype(np.int32)
        layout, token_T = batch.layout.reordered(order_B)
        rows, row_R = (None, order_B) if batch.rows is None else batch.rows.reordered(order_B)
        segment_ids_T = batch.segment_ids_T
        inputs = DeviceBatch(
            token_ids_T=torch.from_numpy(batch.token_ids_T[token_T]),
            position_ids_T=torch.from_numpy(batch.position_ids_T[token_T]),
            segment_ids_T=None if segment_ids_T is None else torch.from_numpy(segment_ids_T[token_T]),
            layout=_ragged(layout, rows),
            per_token=rows is not None and rows.spans_R2 is None,
        )
        return cls(inputs, row_R)

    def download(self, rows_RD: Tensor) -> Rows:
        """Rows as the caller's array, in the batch's own order."""
        sorted_RD = rows_RD.numpy()
        rows: Rows = np.empty_like(sorted_RD)
        rows[self.row_R] = sorted_RD
        return rows


def _ragged(layout: PackedLayout, rows: RowLayout | None) -> RaggedLayout:
    spans_R2 = None if rows is None else rows.packed_spans(layout)
    return RaggedLayout(
        cu_lengths=torch.from_numpy(layout.cu_lengths),
        max_length=layout.max_length,
        num_sequences=layout.num_sequences,
        lengths=tuple(layout.lengths.tolist()),
        spans_R2=None if spans_R2 is None else torch.from_numpy(spans_R2),
    )
