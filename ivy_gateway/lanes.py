"""Who waits in front of whom: a queue for each lane, and when a bulk item has waited long enough.

Knows nothing of what waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from ivy_gateway.jobs import Lane


class Waiting(Protocol):
    """Something that waits, compared by identity."""

    @property
    def lane(self) -> Lane:
        """The lane it waits in."""
        ...

    @property
    def arrival(self) -> float:
        """When it came, in seconds."""
        ...


W = TypeVar("W", bound=Waiting)


class LaneQueue(Generic[W]):
    """What waits, first come, first served inside each lane.

    Between lanes the earlier virtual start goes first: the arrival, and for bulk `patience` seconds later.
    So a bulk item steps back behind what comes up to `patience` after it, and behind nothing later.
    """

    def __init__(self, patience: float) -> None:
        self._delays = {Lane.INTERACTIVE: 0.0, Lane.BULK: patience}
        self._items: dict[Lane, dict[W, None]] = {lane: {} for lane in Lane}

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def push(self, item: W) -> None:
        """Add `item` at the end of its lane."""
        self._items[item.lane][item] = None

    def discard(self, item: W) -> bool:
        """Take `item` out, wherever it stands; whether it was there."""
        waiting = self._items[item.lane]
        if item not in waiting:
            return False
        del waiting[item]
        return True

    def heads(self) -> list[W]:
        """The first of each lane that is not empty, whoever is to go first in front."""
        return sorted(self._firsts(), key=lambda item: item.arrival + self._delays[item.lane])

    def _firsts(self) -> Iterator[W]:
        for items in self._items.values():
            if items:
                yield next(iter(items))
