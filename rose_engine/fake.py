"""An engine without a model, for tests and for measuring everything around one.

Same surface as `Engine`; numpy only, so that nobody waits for torch. Rows follow from the ids alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rose_engine.batch import Batch, Int32Array
from rose_engine.description import ModelDescription
from rose_engine.lazy_tensor import HostCompletion, LazyTensor, Rows
from rose_engine.limits import EngineLimits
from rose_engine.step_counters import StepCounters

FAKE_LIMITS = EngineLimits(
    max_length=512, vocabulary_size=30_522, num_segments=2, max_batch_tokens=4096, max_batch_sequences=256
)


class FakeStep:
    """One call of `FakeEngine.step` in manual mode: the test says when, and how, it ends."""

    def __init__(self, batch: Batch, dimensions: int) -> None:
        self.batch = batch
        self._dimensions = dimensions
        self._completion = HostCompletion()
        self._error: Exception | None = None
        self.lazy_tensor = LazyTensor(self._completion, self._collect)

    def complete(self) -> None:
        """Let the rows arrive."""
        self._completion.set()

    def fail(self, error: Exception) -> None:
        """Let `result()` raise `error`."""
        self._error = error
        self._completion.set()

    def _collect(self) -> Rows:
        if self._error is not None:
            raise self._error
        return fake_rows(self.batch, self._dimensions)


class FakeEngine:
    """`Engine` with made-up rows: at once, or (`manual`) when the test completes `steps[i]`.

    `blocks` is what `would_block` answers. `steps` stays empty unless `manual`.
    """

    polled = False

    def __init__(
        self,
        dimensions: int = 8,
        limits: EngineLimits = FAKE_LIMITS,
        manual: bool = False,
        blocks: bool = False,
    ) -> None:
        self.description = _describe(dimensions)
        self.limits = limits
        self.steps: list[FakeStep] = []
        self.blocks = blocks
        self.closed = False
        self.counters = StepCounters()
        self._manual = manual

    def step(self, batch: Batch) -> LazyTensor:
        """Rows `[R, D]` of `fake_rows`, on their way or already there."""
        assert not self.closed, "step after close: this is a bug of the caller"
        step = FakeStep(batch, self.description.dimensions)
        self.counters.eager += 1
        if self._manual:
            self.steps.append(step)
        else:
            step.complete()
        return step.lazy_tensor

    def would_block(self, batch: Batch) -> bool:  # noqa: ARG002 - the engine's signature
        """Whether `step` would hold up its caller."""
        return self.blocks

    def may_compile(self, batch: Batch) -> bool:  # noqa: ARG002 - the engine's signature
        """Whether a step that would block may compile."""
        return self.blocks

    def step_seconds(self, num_tokens: int) -> float | None:  # noqa: ARG002 - the engine's signature
        """Not measured."""
        return None

    def close(self) -> None:
        """Refuse further steps; those that were handed out can still be completed."""
        self.closed = True


def fake_rows(batch: Batch, dimensions: int) -> NDArray[np.float32]:
    """Rows `[R, dimensions]` of unit length, each a function of its own tokens' ids and their places."""
    weights_T = _mix(batch.position_ids_T.astype(np.uint64)) | np.uint64(1)
    terms_T = (batch.token_ids_T.astype(np.uint64) + np.uint64(1)) * weights_T
    sums_T = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms_T, dtype=np.uint64)])
    starts_R, ends_R = _row_bounds(batch)
    seeds_R = sums_T[ends_R] - sums_T[starts_R]
    columns_D = _mix(np.arange(dimensions, dtype=np.uint64))
    bits_RD = _mix(seeds_R[:, None] ^ columns_D)
    rows_RD = (bits_RD >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
    norms_R = np.linalg.norm(rows_RD, axis=1, keepdims=True)
    unit_RD: NDArray[np.float32] = rows_RD / np.maximum(norms_R, np.float32(1e-12))
    return unit_RD


def _row_bounds(batch: Batch) -> tuple[Int32Array, Int32Array]:
    """The first token of every row, and the one behind its last."""
    if batch.rows is None:
        return batch.layout.cu_lengths[:-1], batch.layout.cu_lengths[1:]
    spans_R2 = batch.rows.packed_spans(batch.layout)
    if spans_R2 is not None:
        return spans_R2[:, 0], spans_R2[:, 1]
    tokens_T = np.arange(batch.num_tokens, dtype=np.int32)
    return tokens_T, tokens_T + 1


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64 bits so that neighbours have nothing in common.

    The finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
    """
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _describe(dimensions: int) -> ModelDescription:
    return ModelDescription(
        model_id="fake",
        task="embed",
        dimensions=dimensions,
        hidden_size=dimensions,
        row_dtype="float32",
        pooling="mean",
        normalized=True,
        dtype="float32",
        device="none",
        attention_backend="none",
        weights_hash="0123456789abcdef",
        tokenizer_file=None,
    )
