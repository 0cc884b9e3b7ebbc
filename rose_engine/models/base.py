"""What a model family provides, and the model that comes of it: a trunk with a head on top.

Knows no family and no device. Shapes: T packed tokens, B sequences, D model width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from rose_engine.attention.base import Attend, AttentionSpec, RaggedLayout
from rose_engine.checkpoint import WeightRules
from rose_engine.settings_file import SettingsFile
from rose_engine.staging import DeviceBatch


class Trunk(nn.Module):
    """Token ids to hidden states. Built on the meta device: computes nothing before its weights are there.

    A submodule with buffers that are computed rather than loaded has a method `fill_buffers(device)`.
    """

    @abstractmethod
    def forward(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer. No host sync, no shape that depends on values."""


@dataclass(frozen=True, slots=True)
class TrunkFacts:
    """What the rest of the engine needs to know of a trunk, from its `config.json`."""

    hidden_size: int  # D
    vocabulary_size: int
    max_positions: int  # rows of the position table, or the longest sequence the rotation was trained for
    attention_specs: tuple[AttentionSpec, ...]  # every distinct one
    position_offset: int = 0  # the position id of a sequence's first token
    num_segments: int = 1

    @property
    def max_length(self) -> int:
        """Tokens for which there are positions."""
        return self.max_positions - self.position_offset


@dataclass(frozen=True, slots=True)
class Family:
    """A model family as data: how to read its `config.json`, build its trunk and name its weights."""

    facts: Callable[[SettingsFile], TrunkFacts]
    build: Callable[[SettingsFile, TrunkFacts], Trunk]
    weights: WeightRules
    quantizes: bool = False  # whether its module chain may end in the quantiser


class Head(Protocol):
    """Hidden states to rows."""

    def __call__(self, hidden_TD: Tensor, layout: RaggedLayout) -> Tensor:
        """Rows `[B, ...]`, one per sequence, or `[R, ...]`, one per span of the layout."""
        ...


class Model:
    """A trunk with its head: packed token ids to rows."""

    def __init__(self, trunk: Trunk, head: Head, facts: TrunkFacts) -> None:
        self.trunk = trunk
        self.facts = facts
        self._head = head

    def __call__(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Rows on the device: `[B, D]`, or `[R, D]` of spans, or hidden states `[T, D]`, float32 these too.

        Call it under `torch.inference_mode`.
        """
        hidden_TD: Tensor = self.trunk(batch, attend)
        return hidden_TD.float() if batch.per_token else self._head(hidden_TD, batch.layout)
