"""Faults on demand, for tests of what comes after one. Without `BOUQUET_FAULTS` nothing here ever acts.

The variable names a folder. A file `<step>.<anything>` in it makes the next run of that step fail, and is
gone then. Knows nothing of what the steps do.
"""

from __future__ import annotations

import os
from pathlib import Path


class InjectedFault(RuntimeError):
    """A step failed because a test asked for it."""


_folder = Path(os.environ["BOUQUET_FAULTS"]) if os.environ.get("BOUQUET_FAULTS") else None


def point(step: str) -> None:
    """A place where `step` can be made to fail. Raises `InjectedFault` when a file asks for it."""
    if _folder is not None and _taken(_folder, step):
        raise InjectedFault(f"a test asked the step {step!r} to fail")


def _taken(folder: Path, step: str) -> bool:
    """Whether one file for `step` was there; it is not any more."""
    for file in folder.glob(f"{step}.*"):
        try:
            file.unlink()
        except FileNotFoundError:  # another thread or process was first
            continue
        return True
    return False
