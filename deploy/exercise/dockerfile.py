"""Dockerfiles as data: stages of instructions, arguments expanded. Knows nothing of what instructions do.

The subset that this repository writes: no here-documents, no escapes but a backslash at the end of a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FLAG = re.compile(r"--[a-z-]+=\S+\s+")
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its keyword, its `--flags` and the rest as written."""

    keyword: str
    flags: tuple[str, ...]
    text: str

    @property
    def words(self) -> list[str]:
        """The text split at white space."""
        return self.text.split()

    def exec_form(self) -> list[str]:
        """The words of a JSON array. Raises `ValueError` for the shell form, which swallows signals."""
        words = json.loads(self.text)
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{self.keyword} {self.text} is not in exec form")
        return words


@dataclass(frozen=True, slots=True)
class Stage:
    """What stands between one FROM and the next."""

    base: str
    name: str
    instructions: tuple[Instruction, ...]

    def last(self, keyword: str) -> Instruction:
        """The one that counts where several are given. Raises `LookupError` if there is none."""
        found = [instruction for instruction in self.instructions if instruction.keyword == keyword]
        if not found:
            raise LookupError(f"no {keyword} in the stage {self.name or self.base}")
        return found[-1]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """The arguments before the first FROM with their defaults, and the stages in order."""

    arguments: Mapping[str, str]
    stages: tuple[Stage, ...]

    @classmethod
    def read(cls, file: Path, arguments: Mapping[str, str] | None = None) -> Dockerfile:
        """Parse `file`; `arguments` replace defaults, as `--build-arg` does."""
        instructions = [_instruction(line) for line in _logical_lines(file.read_text(encoding="utf-8"))]
        starts = [i for i, instruction in enumerate(instructions) if instruction.keyword == "FROM"]
        defaults = dict(assignment(instruction.text) for instruction in instructions[: starts[0]])
        known = {name: (arguments or {}).get(name, default) for name, default in defaults.items()}
        ends = [*starts[1:], len(instructions)]
        stages = (_stage(instructions[start:end], known) for start, end in zip(starts, ends, strict=True))
        return cls(known, tuple(stages))


def assignment(text: str) -> tuple[str, str]:
    """`NAME=value` as a pair; no value is an empty one."""
    name, _, value = text.partition("=")
    return name, value


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`text` with `$NAME` and `${NAME}` replaced; an unknown name is empty, as it is for the builder."""
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], ""), text)


def _logical_lines(text: str) -> list[str]:
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(kept).replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip()]


def _instruction(line: str) -> Instruction:
    keyword, _, text = line.partition(" ")
    flags: list[str] = []
    text = text.strip()
    while match := _FLAG.match(text):
        flags.append(match[0].strip())
        text = text[match.end() :]
    return Instruction(keyword.upper(), tuple(flags), text)


def _stage(instructions: list[Instruction], arguments: Mapping[str, str]) -> Stage:
    words = expanded(instructions[0].text, arguments).split()
    name = words[2] if len(words) == 3 and words[1].upper() == "AS" else ""
    return Stage(words[0], name, tuple(instructions[1:]))
