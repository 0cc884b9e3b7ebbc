"""An engine of fixed token rate: it takes time as one device would, and leaves the processor to others.

For tests and measurements of what happens around an engine that is busy. Knows nothing of models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from rose_engine.batch import Batch
from rose_engine.errors import StepError
from rose_engine.fake import FAKE_LIMITS, FakeEngine, fake_rows
from rose_engine.lazy_tensor import HostCompletion, LazyTensor, Rows
from rose_engine.limits import EngineLimits


class FixedRateEngine(FakeEngine):
    """`FakeEngine` whose steps, one after the other, take a time of their own and a time for each token.

    `compute` makes the rows `[R, dimensions]` on the thread that stands for the device, inside the step's
    time. What it raises fails the step.
    """

    def __init__(
        self,
        tokens_per_second: float,
        overhead_seconds: float = 0.0,
        dimensions: int = 8,
        limits: EngineLimits = FAKE_LIMITS,
        compute: Callable[[Batch, int], Rows] = fake_rows,
    ) -> None:
        super().__init__(dimensions, limits)
        self._tokens_per_second = tokens_per_second
        self._overhead_seconds = overhead_seconds
        self._compute = compute
        self._device = ThreadPoolExecutor(1, "fixed-rate")
        self._free_at = 0.0  # on the device's thread: when the step before was to end

    def step(self, batch: Batch) -> LazyTensor:
        """Queue `batch`; its rows, or a `StepError`, arrive when its time is over."""
        self.counters.eager += 1
        completion = HostCompletion()
        rows = self._device.submit(self._run, batch, time.monotonic())
        rows.add_done_callback(lambda _: completion.set())
        return LazyTensor(completion, lambda: _collect(rows))

    def step_seconds(self, num_tokens: int) -> float:
        """What a step of `num_tokens` takes."""
        return self._overhead_seconds + num_tokens / self._tokens_per_second

    def close(self) -> None:
        """Finish what was queued and refuse further steps."""
        self._device.shutdown(wait=True)
        super().close()

    def _run(self, batch: Batch, launched: float) -> Rows:
        # Counted from when the device could begin, not from when this thread woke: sleeping long by a little
        # again and again must not lower the rate.
        end = max(launched, self._free_at) + self.step_seconds(batch.num_tokens)
        rows = self._compute(batch, self.description.dimensions)
        time.sleep(max(0.0, end - time.monotonic()))
        self._free_at = end
        return rows


def _collect(rows: Future[Rows]) -> Rows:
    try:
        return rows.result()
    except Exception as error:
        raise StepError(f"the step failed: {error}") from error
