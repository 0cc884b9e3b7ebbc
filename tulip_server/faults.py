"""Faults on demand, for tests of what comes after one.

`BOUQUET_FAULTS` names a folder; without it nothing here is called. A file in it acts once, and is gone then:

* `forward.<anything>`: the next forward pass raises.
* `hang.<anything>`: the next one blocks until a file `hang-release` is there, for at most 60 s.
* `nan.<anything>`: the next one yields a NaN in its first token's hidden state.
* `shape.<anything>`: the next rows that are sent lack the last one.
* `width.<anything>`: the next rows that are sent lack the last value of each.

One acts for as long as it is there: `slow.<seconds>`, every forward pass sleeps that long.
Works where modules are called: on the CPU, and on a GPU until a shape is captured as a graph.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from protos.tulip.v1 import inference_pb2 as pb
from tulip_server.wire import RowFormat

if TYPE_CHECKING:
    from torch import Tensor, nn

FOLDER_VARIABLE = "BOUQUET_FAULTS"

_LONGEST_HANG = 60.0
_LOOK_SECONDS = 0.02

log = logging.getLogger(__name__)


class InjectedFault(RuntimeError):
    """A forward pass failed because a test asked for it."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What the files in one folder ask for."""

    folder: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Faults | None:
        """The faults of `BOUQUET_FAULTS`; `None` where nobody asks for any."""
        folder = environment.get(FOLDER_VARIABLE)
        return cls(Path(folder)) if folder else None

    def in_forward(self) -> None:
        """A forward pass, on its own thread: sleep, hang or raise as asked. Raises `InjectedFault`."""
        time.sleep(self._delay())
        if self.taken("hang"):
            self._hang()
        if self.taken("forward"):
            raise InjectedFault("a test asked the forward pass to fail")

    def taken(self, step: str) -> bool:
        """Whether one file for `step` was there; it is not any more."""
        for file in self.folder.glob(f"{step}.*"):
            try:
                file.unlink()
            except FileNotFoundError:  # another process was first
                continue
            return True
        return False

    def _delay(self) -> float:
        return sum(float(file.name.removeprefix("slow.")) for file in self.folder.glob("slow.*"))

    def _hang(self) -> None:
        log.warning("a forward pass hangs because a test asked for it")
        end = time.monotonic() + _LONGEST_HANG
        while time.monotonic() < end and not (self.folder / "hang-release").exists():
            time.sleep(_LOOK_SECONDS)


@dataclass(frozen=True, slots=True)
class SpoilableFormat(RowFormat):
    """A row format whose rows come out in another shape when a file asks for it."""

    faults: Faults | None = None

    def cut(self, rows: NDArray[Any], output: pb.Output) -> NDArray[Any]:
        """The rows, or too few of them, or too narrow ones."""
        rows = RowFormat.cut(self, rows, output)
        assert self.faults is not None
        if self.faults.taken("width"):
            return rows[:, :-1]
        return rows[:-1] if self.faults.taken("shape") else rows


def install(faults: Faults) -> None:
    """Let `faults` decide over every forward pass of this process."""
    from torch.nn.modules.module import register_module_forward_hook

    from rose_engine.models.base import Trunk

    log.warning("faults can be injected by files in %s: this is for tests", faults.folder)

    def after_forward(module: nn.Module, _inputs: object, hidden_TD: Tensor) -> None:
        if not isinstance(module, Trunk):
            return
        faults.in_forward()
        if faults.taken("nan"):
            hidden_TD[0] = float("nan")

    register_module_forward_hook(after_forward)
