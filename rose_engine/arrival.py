"""Rows on their way to the host, as an event in the device's stream: the CUDA side of `LazyTensor`.

Knows events and one view of page-locked memory; nothing of batches, models or what the rows mean.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from rose_engine.errors import DeviceLost, StepError
from rose_engine.lazy_tensor import Rows

log = logging.getLogger(__name__)


class Event(Protocol):
    """A point in the engine's stream."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def synchronize(self) -> None:
        """Wait until it has; other threads run on."""
        ...


class EventWatcher:
    """One thread that waits for completions in the order given and calls back; started when first needed."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Arrival, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._start = threading.Lock()

    def watch(self, arrival: Arrival, callback: Callable[[], None]) -> None:
        """Call `callback` from the watcher's thread once `arrival` has passed, or failed."""
        with self._start:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rose-events", daemon=True)
                self._thread.start()
        self._queue.put((arrival, callback))

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        with self._start:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            arrival, callback = item
            arrival.synchronize()
            try:
                callback()
            except Exception:  # one consumer's bug must not silence all later steps
                log.exception("a LazyTensor callback raised; callbacks must not")


class Arrival:
    """The completion of one step and the rows it brings: `rows` is a view of a slot's buffer until collected.

    The consumer collects, or the ring does it when it needs the slot again: a handle that nobody asks
    holds nothing up.
    """

    def __init__(self, event: Event, rows: Rows | None, watcher: EventWatcher) -> None:
        self._event = event
        self._rows = rows
        self._watcher = watcher
        self._error: StepError | None = None
        self._passed = False
        self._collected = False
        self._lock = threading.Lock()

    def query(self) -> bool:
        """Whether `synchronize` would return at once; an event that failed has passed."""
        if not self._passed:
            try:
                self._passed = self._event.query()
            except RuntimeError as error:
                self._fail(error)
        return self._passed

    def synchronize(self) -> None:
        """Wait for this step's copy. Never raises: `collect` says what went wrong."""
        if not self._passed:
            try:
                self._event.synchronize()
            except RuntimeError as error:
                self._fail(error)
            self._passed = True

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call back at once if the rows are here, otherwise from the watcher's thread."""
        if self.query():
            callback()
        else:
            self._watcher.watch(self, callback)

    def collect(self) -> Rows:
        """The rows, copied out of the slot; waits if need be. Raises `DeviceLost` if the device died."""
        self.settle()
        if self._error is not None:
            raise self._error
        assert self._rows is not None, "nothing was downloaded: this is a bug"
        return self._rows

    def settle(self) -> None:
        """Wait, and let go of the slot."""
        self.synchronize()
        with self._lock:
            if not self._collected and self._rows is not None and self._error is None:
                self._rows = self._rows.copy()
            self._collected = True

    def _fail(self, error: RuntimeError) -> None:
        # A failed event is how an asynchronous fault shows itself: the context does not survive those.
        self._error = DeviceLost(f"the device failed while a step ran: {error}")
        self._passed = True
