"""An event loop that goes on turning for a moment after work passed by, instead of going to sleep.

A thread that sleeps in the kernel is woken late, by 50 to 100 us on virtual machines, and finds its caches
cold; one that looks by itself finds the next bytes at once. The price is a core for as long as it looks,
and 0.1 ms whenever another thread has to wait for the interpreter. Knows nothing of what the work is.
"""

from __future__ import annotations

import asyncio
import time


class Wakefulness:
    """Keeps the running loop awake for `seconds` after each `touch`; 0: never."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = 0.0  # on the monotonic clock: the loop's own stands still within a turn
        self._turning = False

    def touch(self) -> None:
        """Work has passed by, or is about to."""
        if not self._seconds:
            return
        self._until = time.monotonic() + self._seconds
        if not self._turning:
            self._turning = True
            self._turn()

    def _turn(self) -> None:
        """Let the loop turn once more: everything else that is ready comes first, sockets included."""
        self._turning = time.monotonic() < self._until
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)


ASLEEP = Wakefulness(0.0)
