"""FlashAttention 4 in the CuTe DSL, from the package `flash-attn-4`.

Compiles 1.5 to 3.4 s for each new combination of head shape, mask and dtype, on first use; never during a
capture, because the eager run before it has the same combination.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rose_engine.attention.base import Attend, AttentionSpec, RaggedLayout
from rose_engine.attention.flash import HALF_PRECISION, cuda_refusal


class Fa4Backend:
    """`flash_attn.cute.flash_attn_varlen_func`: Hopper and Blackwell, any window."""

    name = "fa4"

    def __init__(self) -> None:
        self._varlen: Any = import_module("flash_attn.cute").flash_attn_varlen_func

    def refusal(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        """Needs compute capability 9.0 and half precision."""
        return cuda_refusal(spec, dtype, device, HALF_PRECISION, (9, 0))

    def bind(self, layout: RaggedLayout) -> Attend:
        """Attention over `layout`."""

        def attend(q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, spec: AttentionSpec) -> Tensor:
            result = self._varlen(
                q_TNH,
                k_TMH,
                v_TMH,
                cu_seqlens_q=layout.cu_lengths,
                cu_seqlens_k=layout.cu_lengths,
                max_seqlen_q=layout.max_length,
                max_seqlen_k=layout.max_length,
                softmax_scale=spec.scale,
                causal=spec.causal,
                window_size=_window(spec),
            )
            out_TNH: Tensor = result[0] if isinstance(result, tuple) else result
            return out_TNH

        return attend


def _window(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """The package's own notation: `None` is without bound; a causal mask is said by its flag alone."""
    if spec.causal:
        return None, None
    left, right = spec.window
    return None if left < 0 else left, None if right < 0 else right
