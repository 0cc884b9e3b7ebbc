"""Whether this machine can compile the fused GEMMs, and where compiled ones are kept.

Imports the CuTe DSL only in `gemms_module`, so an install without it loses nothing but this path.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from rose_engine.stages import stage

if TYPE_CHECKING:
    from rose_engine.kernels.cute.interface import FusedGemms

# The epilogues extend classes of these packages, so nothing but the pair they were written against will do.
PINNED = {"quack-kernels": "0.6.5", "nvidia-cutlass-dsl": "4.8.1"}
HOPPER = (9, 0)

log = logging.getLogger(__name__)


class CompileCache(Protocol):
    """What is set on the toolchain's cache module."""

    EXTRA_SOURCE_DIRS: list[Path]
    CACHE_DIR: str | None
    CACHE_ENABLED: bool


def refusal(device: torch.device) -> str | None:
    """Why the fused GEMMs cannot run on `device`, in a few words; `None` when they can."""
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    if (capability := torch.cuda.get_device_capability(device)) != HOPPER:
        return f"written for compute capability 9.0, this is {capability[0]}.{capability[1]}"
    return unusable()


def unusable() -> str | None:
    """Why the fused GEMMs cannot be compiled by what is installed, device or not; `None` when they can."""
    return missing_packages() or _misplaced()


def missing_packages() -> str | None:
    """Which pinned package is absent or of another version; `None` when all are there."""
    for name, wanted in PINNED.items():
        found = _installed_version(name)
        if found != wanted:
            return f"needs {name} {wanted}, found {found or 'none'}"
    return None


def load_gemms() -> FusedGemms:
    """The GEMMs, to be launched; the first call imports the CuTe DSL, seconds. Ask `refusal` first."""
    return cast("FusedGemms", gemms_module().HopperGemms())


def gemms_module() -> Any:  # noqa: ANN401  (its imports have no types)
    """The module `gemms`; importing it imports the CuTe DSL."""
    with stage("import of the CuTe DSL"), _compile_decorators_idle():
        _keep_compiled(cast("CompileCache", importlib.import_module("quack.cache")))
        return importlib.import_module("rose_engine.kernels.cute.gemms")


@contextmanager
def _compile_decorators_idle() -> Iterator[None]:
    """`torch.compile` and `torch.compiler.disable` hand functions back as they are while the context lasts.

    The toolchain decorates functions that nothing here calls; decorating them imports TorchDynamo and
    Inductor, which takes twice as long as all the rest of the import.
    """
    decorators: tuple[tuple[Any, str], ...] = ((torch, "compile"), (torch.compiler, "disable"))
    found = [getattr(module, name) for module, name in decorators]
    for module, name in decorators:
        setattr(module, name, _as_it_is)
    try:
        yield
    finally:
        for (module, name), function in zip(decorators, found, strict=True):
            setattr(module, name, function)


def _as_it_is(
    function: Callable[..., object] | None = None,
    *,
    recompile_limit: int | None = None,  # noqa: ARG001  (without one of this name Dynamo is imported to set it)
    **_options: object,
) -> object:
    return _as_it_is if function is None else function


def compile_without_device() -> None:
    """Let this process compile for Hopper, whatever card there is or is not. Call it before `gemms_module`.

    No CUDA call is made then, so that processes may be forked. The toolchain's own workers do the same.
    """
    major, minor = HOPPER
    os.environ |= {"QUACK_ARCH": f"{major}{minor}", "CUTE_DSL_ARCH": f"sm_{major}{minor}a"}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def cache_folder() -> Path:
    """Where compiled GEMMs are kept."""
    if chosen := os.environ.get("QUACK_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "bouquet" / "gemms"


def facts() -> tuple[object, ...]:
    """What every compiled GEMM depends on: our own epilogues, the toolchain, Python."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    sources = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    packages = {name: _installed_version(name) for name in (*PINNED, "apache-tvm-ffi")}
    return sources, packages, sys.version_info[:2]


def _misplaced() -> str | None:
    """The toolchain tells installed code from ours by the folder's name, and refuses to compile otherwise."""
    spec = importlib.util.find_spec("quack")
    if spec is None or spec.origin is None:
        return "quack cannot be imported"
    installed = {"site-packages", "dist-packages"} & set(Path(spec.origin).parts)
    return None if installed else f"quack must lie under a folder called site-packages, not {spec.origin}"


def _keep_compiled(cache: CompileCache) -> None:
    """Give the toolchain's cache of compiled objects a folder; without one it compiles in every process."""
    sources = Path(__file__).parent  # our epilogues are part of what a compiled object depends on
    if sources not in cache.EXTRA_SOURCE_DIRS:
        cache.EXTRA_SOURCE_DIRS.append(sources)
    folder = Path(cache.CACHE_DIR or cache_folder())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compiled GEMMs are not kept: %s", error)
        cache.CACHE_ENABLED = False
    else:
        cache.CACHE_DIR = str(folder)


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
