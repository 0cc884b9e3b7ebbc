"""Rows on their way to the host: the handle that `Engine.step` returns instead of waiting.

Knows one completion and one buffer; nothing of models, devices' queues or event loops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[Any]  # [B, D] float32; where the model quantises, int8 with D codes and the packed sign bits


class Completion(Protocol):
    """The moment from which a step's rows can be read on the host."""

    def query(self) -> bool:
        """Whether the moment has passed; never waits."""
        ...

    def synchronize(self) -> None:
        """Wait for the moment, without holding up other threads."""
        ...

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call back once the moment has passed, from any thread; at once if it already has."""
        ...


class HostCompletion:
    """A completion that some thread of this process declares: the CPU's worker, or a test."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        """Declare the moment passed; a second call changes nothing."""
        with self._lock:
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def query(self) -> bool:
        """Whether `set` was called."""
        return self._done.is_set()

    def synchronize(self) -> None:
        """Wait for `set`."""
        self._done.wait()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call back from the thread that calls `set`, or here and now if that was already done."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback()


class LazyTensor:
    """Rows `[B, D]` of one step. `ready()` asks, `result()` waits for this step's copy and no other.

    `collect` is called once, after the completion: it hands over the rows (and gives the slot they
    arrived in back to the engine), or raises the `EngineError` that ended the step. Not thread-safe:
    one consumer per handle.
    """

    def __init__(self, completion: Completion, collect: Callable[[], Rows]) -> None:
        self._completion = completion
        self._collect: Callable[[], Rows] | None = collect
        self._rows: Rows | None = None
        self._error: Exception | None = None

    def ready(self) -> bool:
        """Whether `result()` would return without waiting."""
        return self._completion.query()

    def result(self) -> Rows:
        """The rows, `[B, D]`; waits until they are on the host. Raises what ended the step."""
        if self._collect is not None:
            collect, self._collect = self._collect, None
            self._completion.synchronize()
            try:
                self._rows = collect()
            except Exception as error:
                self._error = error
                raise
        if self._error is not None:
            raise self._error
        assert self._rows is not None
        return self._rows

    def add_done_callback(self, callback: Callable[[LazyTensor], None]) -> None:
        """Call `callback(self)` once `result()` no longer waits, from a thread of the engine's choosing.

        The callback must be short and must not raise: an event loop's `call_soon_threadsafe`, say.
        """
        self._completion.add_done_callback(lambda: callback(self))


def finite_rows(rows: Rows, dimensions: int) -> NDArray[np.bool_]:
    """Which rows hold an answer, `[R]`.

    A float row is none when any value is infinite or not a number. An int8 row is none when it holds
    -128, which no quantiser emits and which heads write where their input was not finite; only its
    `dimensions` codes count, not the bits behind them.
    """
    good_RD = np.not_equal(rows[:, :dimensions], -128) if rows.dtype == np.int8 else np.isfinite(rows)
    if np.count_nonzero(good_RD) == good_RD.size:  # nearly always, and cheaper to see than row by row
        return good_RD[:, 0]
    good_R: NDArray[np.bool_] = np.logical_and.reduce(good_RD, axis=1)
    return good_R
