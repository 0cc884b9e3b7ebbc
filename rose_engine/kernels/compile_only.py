"""Triton kernels compiled instead of launched: into Triton's cache, for a card that this process has not.

Where a kernel would be launched, it is compiled for the arguments' types and alignments, as for a launch. The
caller's tensors are the CPU's. For processes that do nothing else: there is no way back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from ctypes.util import find_library
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch

from rose_engine.kernels import launch

Kernel = Any  # Triton has no types that mypy could see


class AbsentDevice:
    """What Triton asks its driver before it compiles (`triton.backends.driver.DriverBase`)."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:  # noqa: ANN401
        """What to compile for, as the CUDA driver says it."""
        compiler: Any = launch.triton.backends.compiler
        return compiler.GPUTarget("cuda", self._capability[0] * 10 + self._capability[1], 32)

    def get_current_device(self) -> int:
        """The one there would be."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """The default one."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors are."""
        return torch.device("cpu")


def compile_only(capability: tuple[int, int]) -> None:
    """From now on kernels over any tensor are compiled for this compute capability, and never launched."""
    launch.triton.runtime.driver.set_active(AbsentDevice(capability))
    launch.triton.runtime.JITFunction.__getitem__ = _compiling
    launch.COMPILING.append(capability)
    _has_driver()  # asked before any fork


def _compiling(kernel: Kernel, grid: tuple[int, ...]) -> Callable[..., None]:
    return partial(_compile, kernel, grid)


def _compile(kernel: Kernel, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    compiled = kernel.warmup(*arguments, grid=grid, **options)
    if compiled is not None and _has_driver():
        driver: Any = import_module("triton.backends.nvidia.driver")
        with suppress(Exception):  # no C compiler, say: the kernel is compiled all the same
            driver.CudaLauncher(compiled.src, compiled.metadata)  # compiles what a launch goes through, in C


@cache
def _has_driver() -> bool:
    """Whether CUDA's driver library is here: what launches a kernel is linked with it."""
    return find_library("cuda") is not None
