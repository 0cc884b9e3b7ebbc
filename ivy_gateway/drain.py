"""How far a gateway is on its way out. Set by whoever handles signals, read where requests come in."""

from __future__ import annotations


class Drain:
    """First not ready any more, for load balancers to see; then refusing whatever is new."""

    def __init__(self) -> None:
        self.begun = False
        self.refusing = False

    def begin(self) -> None:
        """Say that this gateway is about to go; everything is still served."""
        self.begun = True

    def refuse(self) -> None:
        """Take in nothing more; what was accepted is finished."""
        self.begun = self.refusing = True
