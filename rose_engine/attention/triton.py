"""Our own kernel for packed sequences, causal or full: made for small batches, where launches decide."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from rose_engine.attention.base import NO_BIAS, Attend, AttentionSpec, RaggedLayout
from rose_engine.kernels.launch import INTERPRETED
from rose_engine.kernels.ragged_attention import ragged_attention


class TritonBackend:
    """`rose_engine.kernels.ragged_attention`; reads the cumulative lengths on the device."""

    name = "triton"

    def __init__(self) -> None:
        import_module("triton")

    def refusal(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:  # noqa: ARG002
        """Needs a CUDA device (or Triton's interpreter) and a causal or full window."""
        if device.type != "cuda" and not INTERPRETED:
            return f"it needs a CUDA device, not {device.type}"
        if spec.biased:
            return NO_BIAS
        if not (spec.causal or spec.full):
            return "it has no local windows"
        return None

    def bind(self, layout: RaggedLayout) -> Attend:
        """Attention over `layout`."""

        def attend(q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, spec: AttentionSpec) -> Tensor:
            return ragged_attention(
                q_TNH, k_TMH, v_TMH, layout.cu_lengths, layout.max_length, spec.scale, spec.causal
            )

        return attend
