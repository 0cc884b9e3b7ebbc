"""Compiles what a model's first start on a Hopper card would compile, without the card: into caches to keep.

    python -m rose_engine.compile_ahead FOLDER

Goes to the folders where a server of the same environment looks (`toolchain.cache_folder`, Triton's). The
measurements of a first start cannot be made here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rose_engine import triton_ahead
from rose_engine.build_process import BuildProcess
from rose_engine.checkpoint import weightless
from rose_engine.cuda_runner import decoder_of
from rose_engine.errors import EngineError
from rose_engine.kernels import launch
from rose_engine.kernels.cute import toolchain
from rose_engine.layers import fused_build
from rose_engine.layers.fused_build import GemmWidths
from rose_engine.model_source import ModelSource


def main(arguments: list[str]) -> int:
    """Compile for one model folder. Exit status: 0 compiled, or nothing to compile; 1 something failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a model folder; its weights are not read")
    folder = parser.parse_args(arguments).folder
    try:
        return _compile(folder)
    except EngineError as error:
        return _say(str(error), 1)


def _compile(folder: Path) -> int:
    widths = _widths(folder)
    if widths is None:
        return _say(f"{folder}: nothing to compile, the model has no decoder stack", 0)
    return max(_compile_kernels(widths), _compile_gemms(widths))


def _compile_kernels(widths: GemmWidths) -> int:
    if launch.triton is None:
        return _say("Triton kernels: Triton is not installed", 1)
    return _outcome("Triton kernels", BuildProcess(triton_ahead.build_command(widths, toolchain.HOPPER)))


def _compile_gemms(widths: GemmWidths) -> int:
    if why := widths.misfit:
        return _say(f"GEMMs: nothing to compile: {why}", 0)
    if why := toolchain.unusable():
        return _say(f"GEMMs: {why}", 1)
    return _outcome("GEMMs", BuildProcess(fused_build.build_command(widths)))


def _outcome(what: str, process: BuildProcess) -> int:
    report = process.report()
    for name, failure in report.failures.items():
        _say(f"{what}: {name}: {failure}", 1)
    return _say(f"{what}: {report}", 1 if report.failures else 0)


def _widths(folder: Path) -> GemmWidths | None:
    source = ModelSource.read(folder)
    with weightless():
        stack = decoder_of(source.family.build(source.config, source.facts))
    return None if stack is None else GemmWidths.of(stack.shape)


def _say(line: str, status: int) -> int:
    sys.stderr.write(line + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
