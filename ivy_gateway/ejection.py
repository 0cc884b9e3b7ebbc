"""When a replica that answers with failures is left alone for a while, and when it is tried again.

Knows nothing of streams or of chunks.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_FAILURES = 5  # in a row
WINDOW_SECONDS = 30.0  # failures further apart than this are not in a row
FIRST_EJECTION_SECONDS = 1.0
LAST_EJECTION_SECONDS = 30.0


class FailureRecord:
    """A replica's failures. `MAX_FAILURES` in a row eject it, each time for twice as long, up to a limit.

    Afterwards it is on probation: its next answer decides.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_a_row = 0
        self._last_failure = 0.0
        self._seconds = FIRST_EJECTION_SECONDS
        self._until: float | None = None

    @property
    def ejected(self) -> bool:
        """Whether it should get no work now."""
        return self._until is not None and self._clock() < self._until

    @property
    def on_probation(self) -> bool:
        """Whether it was ejected, may be tried again, and has not answered yet."""
        return self._until is not None and self._clock() >= self._until

    def failed(self) -> None:
        """Note a failure that is the replica's own."""
        now = self._clock()
        again = self._in_a_row if now - self._last_failure <= WINDOW_SECONDS else 0
        self._in_a_row, self._last_failure = again + 1, now
        if self.on_probation or (self._until is None and self._in_a_row >= MAX_FAILURES):
            self._until = now + self._seconds
            self._seconds = min(2 * self._seconds, LAST_EJECTION_SECONDS)

    def succeeded(self) -> None:
        """Note an answer: all is well again, unless the replica still has to wait."""
        self._in_a_row = 0
        if self.on_probation:
            self.clear()

    def clear(self) -> None:
        """Forget everything: it is a new process."""
        self._in_a_row, self._seconds, self._until = 0, FIRST_EJECTION_SECONDS, None
