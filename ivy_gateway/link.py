"""What a link is: one open connection to a server, chunks out and replies in, however they are carried.

Knows nothing of who waits for a reply, nor of what it means when none comes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn

from ivy_gateway.wire import Dispatch
from protos.tulip.v1 import inference_pb2 as pb

DESCRIBE_SECONDS = 5.0  # a server that cannot say what it serves within this is not ready

Deliver = Callable[[pb.StreamReply], None]


class LinkLost(Exception):
    """The link cannot be made or has ended; the message says why."""


class Link(ABC):
    """One connection, open while the block that gave it lasts. Ids are the caller's, one for each chunk."""

    @abstractmethod
    async def describe(self) -> pb.DescribeReply:
        """What the server serves: asked for once, before `carry`.

        Raises `LinkLost`, also where there is no answer within `DESCRIBE_SECONDS`.
        """

    @abstractmethod
    async def carry(self, deliver: Deliver) -> NoReturn:
        """Hand each reply, failure and heartbeat to `deliver`, and let chunks out, until the link ends.

        Raises `LinkLost`, and what `deliver` raises, which ends the link too.
        """

    @abstractmethod
    def send(self, correlation_id: int, dispatch: Dispatch) -> None:
        """Send a chunk, without waiting for anything; on a link that has ended nothing happens."""

    @abstractmethod
    def cancel(self, correlation_id: int) -> None:
        """Say that nobody waits for a chunk any more; otherwise as `send`."""
