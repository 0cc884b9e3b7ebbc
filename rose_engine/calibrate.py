"""What a model and a card are good for, found by measuring at start: seconds, and once per combination.

Two points of the token axis: the *inflection point*, from where launching eagerly is a small part of what the
device needs and graphs stop paying, and the *saturation point*, from where more tokens only add latency. Two
choices: the attention backend for each spec and class of shapes, the decoder's path for each token count.
Decides and remembers; how to measure is handed in, so that no device is needed here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rose_engine.attention.base import AttentionSpec
from rose_engine.attention.choice import Choices, ShapeClass
from rose_engine.layers.decoder import DecoderPlan

log = logging.getLogger(__name__)

SATURATED = 0.95  # of the best throughput
# A launch holds the interpreter that also serves the wire, so it must be far below the device's time, not
# just below it, before a graph brings nothing.
LAUNCH_SHARE = 0.1
# Whatever brings kernels, and ourselves.
PACKAGES = ("bouquet", "triton", "fa3-fwd", "flash-attn-4", "flashinfer-python", "quack-kernels")
PROBE_TOKENS = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384)
PLAN_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Timing:
    """One forward pass: what the device needs for it, and what the host needs to launch it eagerly."""

    device_seconds: float
    launch_seconds: float


Samples = Mapping[int, Timing]  # token count -> timing


@dataclass(frozen=True, slots=True)
class Calibration:
    """The outcome for one model on one card."""

    inflection_tokens: int
    saturation_tokens: int
    attention: Choices
    plan: DecoderPlan | None = None  # None: the model has no decoder stack
    step_seconds: Mapping[int, float] = field(default_factory=dict)  # token count -> device time

    def seconds_of(self, num_tokens: int) -> float | None:
        """About what a step of so many tokens takes: as long as the next larger one that was measured.

        Beyond the largest in proportion to it. `None` where none was measured.
        """
        if not self.step_seconds:
            return None
        measured = min((t for t in self.step_seconds if t >= num_tokens), default=max(self.step_seconds))
        return self.step_seconds[measured] * max(1.0, num_tokens / measured)

    def to_json(self) -> dict[str, Any]:
        """As plain values, for `from_json`."""
        attention = [
            {"spec": dataclasses.asdict(spec), "shapes": shape_class.name, "backend": name}
            for (spec, shape_class), name in self.attention.items()
        ]
        plan = None if self.plan is None else dataclasses.asdict(self.plan)
        return {
            "inflection_tokens": self.inflection_tokens,
            "saturation_tokens": self.saturation_tokens,
            "attention": attention,
            "plan": plan,
            "step_seconds": {str(tokens): seconds for tokens, seconds in self.step_seconds.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Calibration:
        """The inverse of `to_json`. Raises `KeyError`, `TypeError` or `ValueError` for anything else."""
        attention = {
            (_spec(choice["spec"]), ShapeClass[choice["shapes"]]): str(choice["backend"])
            for choice in values["attention"]
        }
        plan = None if values["plan"] is None else _plan(values["plan"])
        # Absent from a file of an earlier version: what was measured then holds all the same.
        seconds = {int(tokens): float(took) for tokens, took in values.get("step_seconds", {}).items()}
        points = int(values["inflection_tokens"]), int(values["saturation_tokens"])
        return cls(*points, attention, plan, seconds)


def _spec(values: Mapping[str, Any]) -> AttentionSpec:
    left, right = values["window"]
    return AttentionSpec(**{**values, "window": (int(left), int(right))})


def _plan(values: Mapping[str, Any]) -> DecoderPlan:
    return DecoderPlan(tuple((int(bound), str(path)) for bound, path in values["up_to"]), values["above"])


def inflection_point(samples: Samples, max_tokens: int) -> int:
    """The fewest tokens from which on an eager launch takes at most `LAUNCH_SHARE` of the device's time.

    `max_tokens`, the largest batch, if that holds nowhere among the samples.
    """
    reached = max_tokens
    for tokens in sorted(samples, reverse=True):
        if samples[tokens].device_seconds * LAUNCH_SHARE < samples[tokens].launch_seconds:
            break
        reached = tokens
    return reached


def saturation_point(samples: Samples) -> int:
    """The fewest tokens that reach 95 % of the best throughput measured."""
    rates = {tokens: tokens / timing.device_seconds for tokens, timing in samples.items()}
    enough = SATURATED * max(rates.values())
    return min(tokens for tokens, rate in rates.items() if rate >= enough)


def probe_lengths(tokens: int, max_length: int) -> tuple[int, ...]:
    """Lengths of a typical batch of `tokens`: sequences of 512, or as long as the model takes."""
    length = min(512, max_length, tokens)
    whole, rest = divmod(tokens, length)
    return (length,) * whole + ((rest,) if rest else ())


def sample(
    time: Callable[[tuple[int, ...]], Timing],
    max_tokens: int,
    max_length: int,
    timed: Samples = MappingProxyType({}),
) -> dict[int, Timing]:
    """Time batches of every probed token count up to `max_tokens`, or as far as device memory goes.

    Of the counts in `timed` the timing is known.
    """
    counts = [tokens for tokens in PROBE_TOKENS if tokens <= max_tokens] or [max_tokens]
    samples: dict[int, Timing] = {}
    for tokens in counts:
        try:
            samples[tokens] = timed.get(tokens) or time(probe_lengths(tokens, max_length))
        except torch.OutOfMemoryError:
            if not samples:
                raise
            log.warning("no device memory for %d tokens: measured up to %d", tokens, max(samples))
            break
    return samples


def fastest_plan(seconds: Mapping[int, Mapping[str, float]]) -> DecoderPlan:
    """The plan that takes the fastest path at each token count measured; `seconds[tokens][path]`.

    A count's winner holds up to that count; neighbours with one winner become one entry.
    """
    winners = [(tokens, min(paths, key=paths.__getitem__)) for tokens, paths in sorted(seconds.items())]
    above = winners[-1][1]
    up_to: list[tuple[int, str]] = []
    for tokens, path in winners:
        if up_to and up_to[-1][1] == path:
            up_to.pop()
        up_to.append((tokens, path))
    return DecoderPlan(tuple(entry for entry in up_to if entry is not up_to[-1]), above)


def key_of(facts: Iterable[object], card: str) -> str:
    """Names one combination of model shape, card and software; a new version of any measures again."""
    parts = [card, torch.__version__, *map(_version, PACKAGES), *map(repr, facts)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/bouquet/calibration`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "bouquet" / "calibration"


@dataclass(frozen=True, slots=True)
class CalibrationCache:
    """One file per key. Losing or damaging it costs a new measurement, nothing else."""

    folder: Path

    def find(self, key: str) -> Calibration | None:
        """What an earlier start measured; `None` if nothing readable is there."""
        file = self._file(key)
        try:
            calibration = Calibration.from_json(json.loads(file.read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            log.warning("%s is unreadable (%s): measuring again", file, error)
            return None
        log.info("calibration from %s", file)
        return calibration

    def store(self, key: str, calibration: Calibration) -> None:
        """Remember; a folder that cannot be written is reported and otherwise ignored."""
        file = self._file(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(calibration.to_json(), indent=1))
            part.replace(file)
        except OSError as error:
            log.warning("the calibration cannot be kept: %s", error)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def log_samples(samples: Samples) -> None:
    """One line per token count, for whoever wonders about the two points."""
    for tokens, timing in samples.items():
        log.info(
            "%6d tokens: device %.2f ms, launch %.2f ms, %.0f tokens/s",
            tokens,
            1e3 * timing.device_seconds,
            1e3 * timing.launch_seconds,
            tokens / timing.device_seconds,
        )


def median(values: Sequence[float]) -> float:
    """The middle value; of an even count the higher of the two."""
    return sorted(values)[len(values) // 2]
