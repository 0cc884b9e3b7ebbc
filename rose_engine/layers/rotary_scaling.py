"""Ways to stretch a rotary basis to longer sequences: each turns the plain frequencies into slower ones.

A frequency is the angle, in radians, that one position adds: theta^(-2i / H) for i in 0 .. H/2 - 1, so
2 pi / frequency is the wavelength in tokens. Nothing here depends on a sequence: a table serves them all.
Knows nothing of the files in which a scaling is stated. Shapes: F = H/2 frequencies of a head of width H.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class RotaryScaling(Protocol):
    """One way to stretch a basis."""

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied with."""
        ...

    def scale(self, frequencies_F: Tensor, theta: float) -> Tensor:
        """The frequencies in place of the plain ones, `[F]`, which are powers of `theta`."""
        ...


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by a factor, as if they lay closer.   (Chen et al., 2023, arXiv:2306.15595)"""

    factor: float

    @property
    def magnitude(self) -> float:
        """One."""
        return 1.0

    def scale(self, frequencies_F: Tensor, theta: float) -> Tensor:  # noqa: ARG002 - the protocol's
        """Every frequency divided by the factor, `[F]`."""
        return frequencies_F / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths stretched, short ones kept, a blend between.   (Llama 3.1's `rope_type` llama3)

    A wave is short when it turns at least `high_freq_factor` times in `original_positions`, and long when it
    turns at most `low_freq_factor` times.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int  # tokens of the sequences that the basis was first trained on

    @property
    def magnitude(self) -> float:
        """One."""
        return 1.0

    def scale(self, frequencies_F: Tensor, theta: float) -> Tensor:  # noqa: ARG002 - the protocol's
        """Frequencies between themselves and themselves over the factor, `[F]`."""
        turns_F = self.original_positions * frequencies_F / (2 * math.pi)
        kept_F = (turns_F - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(frequencies_F / self.factor, frequencies_F, kept_F.clamp(0, 1))


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Short waves kept, long ones stretched, a ramp between.   (Peng et al., 2023, arXiv:2309.00071)

    The ramp runs from the index of the frequency that turns `beta_fast` times in `original_positions` to that
    of the one that turns `beta_slow` times; `whole_bounds` rounds both outwards to whole indices.
    """

    factor: float
    original_positions: int  # tokens of the sequences that the basis was first trained on
    magnitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    whole_bounds: bool = True

    def scale(self, frequencies_F: Tensor, theta: float) -> Tensor:
        """Frequencies between themselves and themselves over the factor, `[F]`."""
        first, last = self._ramp(len(frequencies_F), theta)
        index_F = torch.arange(len(frequencies_F), dtype=torch.float32, device=frequencies_F.device)
        stretched_F = ((index_F - first) / (last - first)).clamp(0, 1)
        return torch.lerp(frequencies_F, frequencies_F / self.factor, stretched_F)

    def _ramp(self, count: int, theta: float) -> tuple[float, float]:
        """The indices at which the ramp starts and ends."""
        first, last = (
            count * math.log(self.original_positions / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.whole_bounds:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0.0), min(last, 2.0 * count - 1)
        return first, last if last != first else first + 0.001  # the reference's own guard against 0 / 0


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's correction of attention's temperature: 0.1 * weight * ln(factor) + 1 for a factor above one."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
