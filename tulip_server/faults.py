"""Faults on demand, for tests of what comes after one: the forward pass raises, or yields a NaN.

`BOUQUET_FAULTS` names a folder; without it nothing here is called. A file `forward.<anything>` in it makes
the next forward pass raise, `nan.<anything>` puts a NaN into its first token's hidden state; the file is gone
then. Works where modules are called: on the CPU, and on a GPU until a shape is captured as a graph.
"""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from rose_engine.models.base import Trunk

FOLDER_VARIABLE = "BOUQUET_FAULTS"

log = logging.getLogger(__name__)


class InjectedFault(RuntimeError):
    """A forward pass failed because a test asked for it."""


def install(folder: Path) -> None:
    """Let files in `folder` decide over every forward pass of this process."""
    log.warning("faults can be injected by files in %s: this is for tests", folder)

    def after_forward(module: nn.Module, _inputs: object, hidden_TD: Tensor) -> None:
        if not isinstance(module, Trunk):
            return
        if _taken(folder, "forward"):
            raise InjectedFault("a test asked the forward pass to fail")
        if _taken(folder, "nan"):
            hidden_TD[0] = float("nan")

    register_module_forward_hook(after_forward)


def _taken(folder: Path, step: str) -> bool:
    """Whether one file for `step` was there; it is not any more."""
    for file in folder.glob(f"{step}.*"):
        try:
            file.unlink()
        except FileNotFoundError:  # another process was first
            continue
        return True
    return False
