"""One JSON object of a model folder, read with its types checked.

Knows nothing of what the keys mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rose_engine.errors import CheckpointError

Kind = TypeVar("Kind")
Default = TypeVar("Default")


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The keys of one JSON file. A key that holds `null` counts as absent."""

    path: Path
    values: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> SettingsFile:
        """Raises `CheckpointError` when the file is missing or holds no JSON object."""
        values = read_json(path)
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: expected a JSON object")
        return cls(path, values)

    @classmethod
    def read_if_present(cls, path: Path) -> SettingsFile:
        """As `read`; a missing file has no keys."""
        return cls.read(path) if path.is_file() else cls(path, {})

    def required(self, key: str, kind: type[Kind]) -> Kind:
        """The value of `key`. Raises `CheckpointError`, naming both, when absent or of another type."""
        value = self.optional(key, kind, None)
        if value is None:
            raise CheckpointError(f"{self.path}: {key} is missing")
        return value

    def optional(self, key: str, kind: type[Kind], default: Default) -> Kind | Default:
        """The value of `key`, or `default`. Raises `CheckpointError` when it is of another type."""
        value = self.values.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        # A bool is an int to Python, and never one in these files.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{self.path}: {key} is {value!r}, expected {kind.__name__}")
        return value

    def section(self, key: str) -> SettingsFile:
        """The JSON object under `key`; without keys when absent."""
        return SettingsFile(self.path, self.optional(key, dict, {}))


def read_json(path: Path) -> object:
    """The content of a JSON file. Raises `CheckpointError` when it is missing or malformed."""
    try:
        content: object = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not a JSON file ({error})") from error
    return content
