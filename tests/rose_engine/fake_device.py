"""A device whose stream is the caller's thread: copies are done when queued, events pass when a test says."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from rose_engine.attention.base import AttentionSpec
from rose_engine.attention.sdpa import SdpaBackend
from rose_engine.batch import Batch, Sequence

VOCABULARY, WIDTH, HEADS = 97, 16, 2
SPEC = AttentionSpec(HEADS, HEADS, WIDTH // HEADS, scale=0.5)


class FakeEvent:
    def __init__(self, passed: bool) -> None:
        self.gate = threading.Event()
        self.waited = threading.Event()
        self.error: RuntimeError | None = None
        if passed:
            self.gate.set()

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.gate.is_set()

    def synchronize(self) -> None:
        self.waited.set()
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error

    def fail(self, message: str) -> None:
        self.error = RuntimeError(message)
        self.gate.set()


class FakeDevice:
    def __init__(self, *, manual: bool = False) -> None:
        self.manual = manual
        self.events: list[FakeEvent] = []
        self.released = 0

    def enter_stream(self) -> None:
        """The caller's thread is the stream."""

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.full((size,), 55, dtype=dtype)  # what no step wrote is a valid id, and not zero

    def page_locked(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, 77, dtype=dtype)

    def record(self) -> FakeEvent:
        self.events.append(FakeEvent(not self.manual))
        return self.events[-1]

    def release_cached(self) -> None:
        self.released += 1


class FakeGraph:
    def __init__(self, run, num_bytes: int) -> None:
        self._run = run
        self.rows_BD = run()
        self.num_bytes = num_bytes
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch.inference_mode():
            self.rows_BD.copy_(self._run())


class FakeRecorder:
    def __init__(self, num_bytes: int = 100) -> None:
        self.num_bytes = num_bytes
        self.graphs: list[FakeGraph] = []
        self.error: Exception | None = None

    def capture(self, run) -> FakeGraph:
        if self.error is not None:
            raise self.error
        self.graphs.append(FakeGraph(run, self.num_bytes))
        return self.graphs[-1]


class TinyEncoder:
    """Embedding, one attention layer, mean pooling: enough for a spare token to show where it must not."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.positions = torch.randn(5000, WIDTH, generator=generator)
        self.segments = torch.randn(2, WIDTH, generator=generator)
        self.calls = 0

    def __call__(self, batch) -> Tensor:
        self.calls += 1
        x_TD = self.tokens[batch.token_ids_T] + self.positions[batch.position_ids_T]
        x_TD = x_TD + self.segments[batch.segment_ids_T]
        x_TNH = x_TD.view(-1, HEADS, WIDTH // HEADS)
        x_TD = SdpaBackend().bind(batch.layout)(x_TNH, x_TNH, x_TNH, SPEC).reshape(-1, WIDTH)
        cu = batch.layout.cu_lengths.long()
        sequence_T = torch.searchsorted(cu[1:], torch.arange(len(x_TD)), right=True)
        sums = x_TD.new_zeros(len(cu), WIDTH).index_add_(0, sequence_T, x_TD)[:-1]
        return sums / cu.diff().clamp(min=1)[:, None]

    def alone(self, sequence: Sequence) -> np.ndarray:
        """The row of one sequence by the plainest route."""
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
        x = self.tokens[ids] + self.positions[: len(ids)]
        kinds = np.zeros(len(ids), np.int64) if sequence.segment_ids is None else sequence.segment_ids
        x = (x + self.segments[torch.from_numpy(kinds.astype(np.int64))]).view(len(ids), HEADS, -1)
        x = x.transpose(0, 1)
        return ((x @ x.mT * SPEC.scale).softmax(-1) @ x).transpose(0, 1).reshape(len(ids), -1).mean(0).numpy()


def sequences(lengths, seed: int = 0, segments: bool = False) -> list[Sequence]:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(1, VOCABULARY, length, dtype=np.int32) for length in lengths]
    return [Sequence(i, rng.integers(0, 2, len(i), dtype=np.int32) if segments else None) for i in ids]


def batch_of(*lengths: int, seed: int = 0, segments: bool = False) -> Batch:
    return Batch.pack(sequences(lengths, seed, segments))
