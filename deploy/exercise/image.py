"""A Dockerfile carried out in a folder instead of a container: each RUN line runs, on this machine's Python.

Absolute paths of the image lie under the folder. What differs from a real build, and only that: the base
image is this machine; `apt-get install` is simulated, so that names are checked and nothing is installed; a
user is a number.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.exercise.dockerfile import Dockerfile, Instruction, assignment, expanded

# Folders that the Dockerfiles write to; all others are the base image's.
_IMAGE_PATH = re.compile(r"(?<![\w./])/(?=(opt|src|cache|tmp|var|models|run)\b)")
_BASE_PATH = "/usr/local/bin:/usr/bin:/bin"
_APT_GET = """#!/bin/sh
test "$1" = install || exit 0
exec /usr/bin/apt-get --simulate "$@" >/dev/null
"""


@dataclass(frozen=True, slots=True)
class Image:
    """What a container of the image would start with, its paths made real under `root`."""

    root: Path
    environment: Mapping[str, str]
    working_folder: Path
    user: int
    command: tuple[str, ...]
    health_command: tuple[str, ...]

    def path(self, inside: str) -> Path:
        """Where the image's absolute path `inside` is on this machine."""
        return self.root / inside.lstrip("/")


def build(file: Path, context: Path, root: Path, arguments: Mapping[str, str]) -> Image:
    """Carry out `file` with `context` as the build's context. Raises `CalledProcessError` if a RUN fails."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "tmp").mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)  # a tmpfs, in a container
    return _image(Dockerfile.read(file, arguments), _Builder(context, root, arguments), skipped=())


def built(file: Path, root: Path, arguments: Mapping[str, str]) -> Image:
    """The image that an earlier `build` left under `root`."""
    return _image(Dockerfile.read(file, arguments), _Builder(root, root, arguments), skipped=("RUN", "COPY"))


def _image(dockerfile: Dockerfile, builder: _Builder, skipped: tuple[str, ...]) -> Image:
    for stage in dockerfile.stages:
        builder.begin_stage()
        for instruction in stage.instructions:
            if instruction.keyword not in skipped:
                builder.carry_out(instruction)
    final = dockerfile.stages[-1]
    health = final.last("HEALTHCHECK")
    health_command = Instruction("CMD", (), health.text.removeprefix("CMD").strip()).exec_form()
    return Image(
        builder.root,
        builder.environment,
        builder.folder,
        int(final.last("USER").text.partition(":")[0]),
        tuple(map(builder.real, final.last("CMD").exec_form())),
        tuple(map(builder.real, health_command)),
    )


class _Builder:
    """Instructions in, files under the root and an environment out. The stages share one root."""

    def __init__(self, context: Path, root: Path, arguments: Mapping[str, str]) -> None:
        self.root = root
        self._context, self._arguments = context, arguments
        self.begin_stage()

    def begin_stage(self) -> None:
        """Forget what the stage before set."""
        self.environment = {"PATH": _BASE_PATH}
        self.folder = self.root
        self._build_arguments: dict[str, str] = {}

    def carry_out(self, instruction: Instruction) -> None:
        """Do what the instruction says; those that only describe the image do nothing."""
        step = getattr(self, f"_{instruction.keyword.lower()}", None)
        if step is not None:
            step(instruction)

    def real(self, text: str) -> str:
        """`text` with the image's paths under the root."""
        return _IMAGE_PATH.sub(f"{self.root}/", text)

    def _arg(self, instruction: Instruction) -> None:
        name, default = assignment(instruction.text)
        self._build_arguments[name] = self._arguments.get(name, default)

    def _env(self, instruction: Instruction) -> None:
        for word in shlex.split(instruction.text):
            name, value = assignment(word)
            known = self._build_arguments | self.environment
            self.environment[name] = expanded(self.real(value), known)

    def _workdir(self, instruction: Instruction) -> None:
        self.folder = Path(self.real(instruction.text))
        self.folder.mkdir(parents=True, exist_ok=True)

    def _copy(self, instruction: Instruction) -> None:
        if any(flag.startswith("--from=") for flag in instruction.flags):
            return  # it is there already
        *sources, target = instruction.words
        for source in (self._context / name for name in sources):
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, self.folder / target, dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copy(source, self.folder / target)

    def _run(self, instruction: Instruction) -> None:
        stand_ins = self.root / "stand-ins"
        stand_ins.mkdir(exist_ok=True)
        (stand_ins / "apt-get").write_text(_APT_GET)
        (stand_ins / "apt-get").chmod(0o755)
        path = f"{stand_ins}:{self.environment['PATH']}:{os.environ['PATH']}"
        environment = os.environ | self._build_arguments | self.environment | {"PATH": path}
        print(f"RUN {instruction.text}", flush=True)
        subprocess.run(
            ["/bin/sh", "-c", self.real(instruction.text)], cwd=self.folder, env=environment, check=True
        )
