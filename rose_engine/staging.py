"""Batches on the device, and the way there and back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rose_engine.attention.base import RaggedLayout


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """A `Batch` as the model sees it: int32 tensors over T packed tokens, on the device."""

    token_ids_T: Tensor
    position_ids_T: Tensor  # inside each sequence, from 0; a family adds its own offset
    segment_ids_T: Tensor | None
    layout: RaggedLayout
