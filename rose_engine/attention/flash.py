"""FlashAttention 2, as PyTorch ships it, and FlashAttention 3, from the package `fa3-fwd`.

Both read the cumulative lengths on the device: nothing to do per step on the host, and one captured graph
serves every layout of its shape. Grids follow `max_length`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rose_engine.attention.base import NO_BIAS, Attend, AttentionSpec, RaggedLayout

HALF_PRECISION = (torch.bfloat16, torch.float16)


class Fa2Backend:
    """`aten::_flash_attention_forward`: no further package, any window."""

    name = "fa2"

    def refusal(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        """Needs a CUDA device of compute capability 8.0, half precision, heads of 8 to 256."""
        return cuda_refusal(spec, dtype, device, HALF_PRECISION, (8, 0))

    def bind(self, layout: RaggedLayout) -> Attend:
        """Attention over `layout`."""
        cu_lengths, longest = layout.cu_lengths, layout.max_length

        def attend(q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, spec: AttentionSpec) -> Tensor:
            left, right = spec.window
            outputs: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
                q_TNH,
                k_TMH,
                v_TMH,
                cu_lengths,
                cu_lengths,
                longest,
                longest,
                0.0,  # dropout
                right == 0,  # causal
                False,  # debug mask
                scale=spec.scale,
                window_size_left=left,
                window_size_right=right,
            )
            return outputs[0]

        return attend


class Fa3Backend:
    """`fa3-fwd`: Hopper only. Its build has bfloat16 and no local windows (`fa3_fwd_config.CONFIG`)."""

    name = "fa3"

    def __init__(self) -> None:
        # The raw operator: the package's autograd wrapper costs host time and keeps tensors alive.
        import_module("fa3_fwd._C")
        self._forward: Any = torch.ops.fa3_fwd.fwd

    def refusal(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        """Needs compute capability 9.x, bfloat16, and a causal or full window."""
        if not (spec.causal or spec.full):
            return "the package is built without local windows"
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
            return "it runs on Hopper only"
        return cuda_refusal(spec, dtype, device, (torch.bfloat16,), (9, 0))

    def bind(self, layout: RaggedLayout) -> Attend:
        """Attention over `layout`."""

        def attend(q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, spec: AttentionSpec) -> Tensor:
            out_TNH: Tensor = self._forward(*_fa3_arguments(layout, q_TNH, k_TMH, v_TMH, spec))[0]
            return out_TNH

        return attend


def cuda_refusal(
    spec: AttentionSpec,
    dtype: torch.dtype,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    capability: tuple[int, int],
) -> str | None:
    """What the flash kernels have in common: device, dtype, no bias, a head width that is a multiple of 8."""
    if spec.biased:
        return NO_BIAS
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if torch.cuda.get_device_capability(device) < capability:
        return f"it needs compute capability {capability[0]}.{capability[1]}"
    if dtype not in dtypes:
        return f"it does not compute in {str(dtype).removeprefix('torch.')}"
    if spec.head_dim % 8 or not 8 <= spec.head_dim <= 256:
        return f"heads of width {spec.head_dim}; it takes multiples of 8 up to 256"
    return None


def _fa3_arguments(
    layout: RaggedLayout, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, spec: AttentionSpec
) -> tuple[Any, ...]:
    """Positional arguments of `fa3_fwd::fwd` in the order of `fa3_fwd_interface._flash_attn_forward`."""
    cu_lengths, longest = layout.cu_lengths, layout.max_length
    new_keys = (None, None, None, None)  # k_new, v_new, qv, out
    bounds = (cu_lengths, cu_lengths, None, None, None, longest, longest)
    paging = (None, None, None)  # page_table, kv_batch_idx, leftpad_k
    rotary = (None, None, None)  # cos, sin, lengths
    descale = (None, None, None)  # q, k, v
    mask = (spec.scale, spec.causal, *spec.window, 0, 0.0)  # ..., attention_chunk, softcap
    tuning = (
        True,
        None,
        1,
        None,
        0,
    )  # rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin
    return (q_TNH, k_TMH, v_TMH, *new_keys, *bounds, *paging, *rotary, *descale, *mask, *tuning)
