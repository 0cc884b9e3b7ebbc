"""Stacks as long as a block or a session lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ivy_gateway.local_stack import running_stack
from tests.cases.client import Stack

running: list[Stack] = []  # all that serve at the moment


@contextlib.contextmanager
def started(
    model: str | Path, *flags: str, scores: bool = False, key: str | None = None, **environment: str
) -> Iterator[Stack]:
    """A stack on the CPU for as long as the block lasts; watched by `alive` meanwhile."""
    # Threads that spin while they wait would take the cores from the other stacks.
    calm = {"TULIP_LOG_LEVEL": "warning", "IVY_LOG_LEVEL": "warning", "OMP_WAIT_POLICY": "PASSIVE"}
    settings = calm | environment
    with running_stack(str(model), "--device", "cpu", *flags, environment=settings) as local:
        stack = Stack(local, scores=scores, key=key)
        running.append(stack)
        try:
            yield stack
        finally:
            running.remove(stack)
            stack.close()


class Fleet:
    """Stacks that live as long as the session, each started once, whoever asks first.

    They are stopped together, since each of them mostly waits while it stops.
    """

    def __init__(self) -> None:
        self._stacks: dict[str, Stack] = {}
        self._blocks: list[contextlib.ExitStack] = []

    def start(
        self, name: str, model: str | Path, *flags: str, scores: bool = False, **environment: str
    ) -> Stack:
        """The stack called `name`; started with these flags unless it runs already."""
        if name not in self._stacks:
            block = contextlib.ExitStack()
            self._stacks[name] = block.enter_context(started(model, *flags, scores=scores, **environment))
            self._blocks.append(block)
        return self._stacks[name]

    def stop(self) -> None:
        """Stop all. Raises what one of them raises. A second call finds nothing to stop."""
        blocks, self._blocks, self._stacks = self._blocks, [], {}
        with ThreadPoolExecutor(max(1, len(blocks))) as threads:
            list(threads.map(contextlib.ExitStack.close, blocks))


FLEET = Fleet()  # one for all folders of tests: each has a fixture that stops it when the session ends

E_FLAGS = ("--alias", "e-alias", "--prompt", "title=title: ")  # of the stack that all folders share
