"""How long steps take here, and how long one may take before the device counts as stuck.

Knows steps as a number of tokens and a moment; nothing of batches, queues or devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# A step is stuck when it is older than both; anything younger may be a busy neighbour.
SHORTEST_ALLOWANCE = 2.0
TIMES_EXPECTED = 5.0
# Of the worst time seen, each further step of the size forgets a tenth: the first step's own slowness, or one
# that hung and came back, is gone after some thirty steps.
_MEMORY = 0.9
_LARGEST_SIZE = 32  # of sizes as powers of two


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A batch that is with the engine."""

    num_tokens: int
    launched: float  # on the batcher's clock
    cold: bool  # it may compile or capture


class StepClock:
    """What a step may take: what the engine has measured, or what the steps of this process took.

    `measured` gives an engine's own seconds for so many tokens, `None` where it has none. `cold_seconds` is
    what a step may take that compiles, or whose size was never seen.
    """

    def __init__(self, measured: Callable[[int], float | None], cold_seconds: float) -> None:
        self._measured = measured
        self._cold_seconds = cold_seconds
        self._worst: dict[int, float] = {}  # by size: the exponent of the power of two above

    def expected(self, num_tokens: int) -> float | None:
        """Seconds of a step of so many tokens: measured, or the worst of its size, or of the next larger one.

        `None` where nothing of the kind was ever seen.
        """
        if (seconds := self._measured(num_tokens)) is not None:
            return seconds
        sizes = range(num_tokens.bit_length(), _LARGEST_SIZE)
        return next((self._worst[size] for size in sizes if size in self._worst), None)

    def allowance(self, step: Step) -> float:
        """Seconds after which `step` counts as stuck."""
        expected = None if step.cold else self.expected(step.num_tokens)
        if expected is None:
            return max(SHORTEST_ALLOWANCE, self._cold_seconds)
        return max(SHORTEST_ALLOWANCE, TIMES_EXPECTED * expected)

    def finished(self, step: Step, seconds: float) -> None:
        """Learn from a step that came back. One that was late teaches no more than what it was allowed."""
        if step.cold:
            return
        if seconds > SHORTEST_ALLOWANCE:
            seconds = min(seconds, self.allowance(step))
        size = step.num_tokens.bit_length()
        self._worst[size] = max(seconds, _MEMORY * self._worst.get(size, 0.0))
