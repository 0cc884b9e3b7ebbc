"""How long the stages of a start take, as log lines for people and for `benchmarks.startup`.

Knows no stage. A stage may contain others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Log how long the block called `name` took, unless it fails: then the error is the last that is said."""
    began = time.perf_counter()
    yield
    log.info("stage %s: %.3f s", name, time.perf_counter() - began)
