"""What became of an engine's steps: plain counters, for whoever exports them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepCounters:
    """Steps so far, and what the captured graphs hold now."""

    eager: int = 0
    captured: int = 0
    replayed: int = 0
    evicted: int = 0
    refused: int = 0  # shapes whose capture failed, or that alone exceed the budget: eager from then on
    num_bytes: int = 0
