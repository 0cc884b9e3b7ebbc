"""What is known of the request that is being answered, wherever its task goes: id, lane, trace.

Set once, where the request comes in; read by whoever writes logs or speaks to servers for it.
"""

from __future__ import annotations

import contextvars
from dataclasses import dataclass

from ivy_gateway.jobs import Lane


@dataclass(slots=True)
class RequestContext:
    """One request's. `lane` is what its client asked for, `None` where its size decides."""

    request_id: str = ""
    traceparent: str = ""  # W3C trace context to pass on; empty: none
    lane_header: bytes | None = None  # as it came
    lane: Lane | None = None


_NOBODY = RequestContext()
_current: contextvars.ContextVar[RequestContext] = contextvars.ContextVar("request", default=_NOBODY)


def current() -> RequestContext:
    """The request that this task works for; an empty one where it works for none."""
    return _current.get()


def enter(context: RequestContext) -> contextvars.Token[RequestContext]:
    """Let this task, and those it starts, work for `context`; `leave` ends it."""
    return _current.set(context)


def leave(token: contextvars.Token[RequestContext]) -> None:
    """Work again for whom this task worked before `enter`."""
    _current.reset(token)
