"""Ragged attention behind one interface; SDPA is the reference.

Backends are found by name and imported when asked for: a library that is not installed breaks nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module

import torch

from rose_engine.attention.base import AttentionBackend, AttentionSpec
from rose_engine.errors import EngineConfigError

# name -> "module:Class"; the class takes no arguments
BACKENDS: dict[str, str] = {
    "sdpa": "rose_engine.attention.sdpa:SdpaBackend",
    "fa2": "rose_engine.attention.flash:Fa2Backend",
    "fa3": "rose_engine.attention.flash:Fa3Backend",
    "fa4": "rose_engine.attention.flash4:Fa4Backend",
    "triton": "rose_engine.attention.triton:TritonBackend",
    "flashinfer-fa2": "rose_engine.attention.flashinfer:fa2_kernels",
    "flashinfer-fa3": "rose_engine.attention.flashinfer:fa3_kernels",
}
# What "auto" tries on each type of device, best first.
PREFERENCES: dict[str, tuple[str, ...]] = {
    "cpu": ("sdpa",),
    "cuda": ("fa2", "triton", "sdpa"),  # what needs no package; a runner that measures loads the others
}


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend, and why it was chosen."""

    backend: AttentionBackend
    why: str
    asked: bool = False  # by name; otherwise a runner that measures may choose better

    def __str__(self) -> str:
        return f"{self.backend.name} ({self.why})"


def load_backend(name: str) -> AttentionBackend:
    """The backend called `name`.

    Raises `EngineConfigError`: unknown (the message lists what is known), or its library does not load.
    """
    if name not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise EngineConfigError(f"attention backend {name!r} is unknown; known are auto, {known}")
    module, _, attribute = BACKENDS[name].partition(":")
    try:
        backend: AttentionBackend = getattr(import_module(module), attribute)()
    except Exception as error:
        raise EngineConfigError(f"attention backend {name!r} cannot be loaded: {error}") from error
    return backend


def choose_backend(
    name: str, specs: Iterable[AttentionSpec], dtype: torch.dtype, device: torch.device
) -> BackendChoice:
    """The backend called `name`, or for "auto" the first of this device's that serves every one of `specs`.

    Raises `EngineConfigError` saying why the one asked for, or each that was tried, does not serve.
    """
    specs = tuple(specs)
    if name != "auto":
        return BackendChoice(_serving(name, specs, dtype, device), "asked for", asked=True)
    passed_over: list[str] = []
    for candidate in PREFERENCES[device.type]:
        try:
            backend = _serving(candidate, specs, dtype, device)
        except EngineConfigError as error:
            passed_over.append(str(error))
        else:
            return BackendChoice(backend, "; ".join(passed_over) or f"the first choice on {device.type}")
    raise EngineConfigError("; ".join(passed_over))


def _serving(
    name: str, specs: tuple[AttentionSpec, ...], dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    backend = load_backend(name)
    for spec in specs:
        if refusal := backend.refusal(spec, dtype, device):
            raise EngineConfigError(f"attention backend {name!r} cannot serve this model: {refusal}")
    return backend
