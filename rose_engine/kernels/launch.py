"""How kernels are launched: Triton on CUDA devices, the torch twin elsewhere.

Every kernel module takes Triton's names from here, so that it can be imported where Triton is not
installed. With `TRITON_INTERPRET=1` in the environment before the first import, Triton's own interpreter runs
the kernels on the CPU: slow, and meant for tests of the kernels. Knows no kernel.

Programmatic dependent launch (the launchers' argument `pdl`) lets a kernel start while the one before it on
the stream still runs. It pays only when every kernel of a chain takes part. A kernel that does releases its
successor at its start, and reads or writes what other kernels touch only after its own wait: two successors
may be resident at once. Weights, token ids, positions and cumulative lengths may be read before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = [
    "COMPILING",
    "INTERPRETED",
    "assert_rows",
    "block_size",
    "ceil_div",
    "device_pdl",
    "gdc_launch_dependents",
    "gdc_wait",
    "inline",
    "jit",
    "launch_options",
    "runs_triton",
    "tl",
    "triton",
]

Kernel = Any  # Triton has no types that mypy could see

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    triton = tl = gdc_launch_dependents = gdc_wait = None

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
COMPILING: list[tuple[int, int]] = []  # for what `kernels.compile_only` made this process compile, if it did


def jit(function: Callable[..., None]) -> Kernel:
    """`triton.jit`, or the function as it is where Triton is not installed (it is never called then)."""
    return function if triton is None else triton.jit(function)


def inline(function: Callable[..., Any]) -> Kernel:
    """Like `jit`, for the parts of a kernel: they return values and are called from kernels only."""
    return function if triton is None else triton.jit(function)


def runs_triton(tensor: Tensor) -> bool:
    """Whether kernels over `tensor` run in Triton; the torch twin runs otherwise."""
    return INTERPRETED or bool(COMPILING) or (triton is not None and tensor.is_cuda)


def launch_options(pdl: bool, num_warps: int, num_stages: int = 3) -> dict[str, Any]:
    """Keyword arguments of a launch; the interpreter takes and ignores them."""
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    return options | {"launch_pdl": True} if pdl and not INTERPRETED else options


def device_pdl(pdl: bool) -> bool:
    """The kernels' own PDL switch: the interpreter knows no dependent launches."""
    return pdl and not INTERPRETED


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def block_size(width: int, largest: int | None = None) -> int:
    """The power of two that covers `width`, or `largest` where that is less."""
    covering = 1 << max(width - 1, 0).bit_length()
    return covering if largest is None else min(covering, largest)


def assert_rows(*tensors: Tensor | None) -> None:
    """Kernels address rows of adjacent elements; anything else is a bug of the caller."""
    for tensor in tensors:
        assert tensor is None or tensor.is_contiguous(), "a kernel's tensors must be contiguous"
