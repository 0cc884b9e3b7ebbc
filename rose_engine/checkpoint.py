"""Weights: find the files of a model folder and stream their tensors into a module built on the meta device.

Strict in both directions: every tensor has a place or is ignorable, every parameter gets its tensor.
Knows nothing of model families beyond the rules they hand in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rose_engine.errors import CheckpointError
from rose_engine.settings_file import SettingsFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class FusedGroup:
    """Tensors of a checkpoint that one parameter holds one below the other (along dimension 0).

    `parts` and `fused` are components of dotted names: `attention.query.weight` becomes rows of
    `attention.qkv.weight`.
    """

    fused: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeightRules:
    """How a family's tensor names become parameter names."""

    renames: tuple[tuple[str, str], ...] = ()  # (pattern, replacement) of `re.sub`, in this order
    fused: tuple[FusedGroup, ...] = ()
    ignorable: tuple[str, ...] = ()  # shell patterns over renamed names that need no place

    def rename(self, tensor_name: str) -> str:
        """The parameter (or part of a fused one) that a tensor is meant for."""
        for pattern, replacement in self.renames:
            tensor_name = re.sub(pattern, replacement, tensor_name)
        return tensor_name

    def is_ignorable(self, renamed: str) -> bool:
        """Whether a tensor without a place is no mistake."""
        return any(fnmatchcase(renamed, pattern) for pattern in self.ignorable)

    def parts_of(self, parameter: str) -> tuple[str, ...]:
        """Renamed tensor names that make up `parameter`, in order: itself, unless it is fused."""
        components = parameter.split(".")
        for group in self.fused:
            if group.fused in components:
                at = components.index(group.fused)
                return tuple(".".join((*components[:at], p, *components[at + 1 :])) for p in group.parts)
        return (parameter,)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its place and shape, not its values."""

    file: Path
    name: str
    shape: tuple[int, ...]


@runtime_checkable
class OwnsBuffers(Protocol):
    """A module whose buffers are computed, not loaded: it fills them once the weights are there."""

    def fill_buffers(self, device: torch.device) -> None:
        """Replace the buffers built on the meta device by real ones on `device`."""
        ...


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of `folder`, in name order.

    Raises `CheckpointError` when there are none, when a shard is missing, or when the weights are pickled.
    """
    if (folder / SINGLE_FILE).is_file():
        return (folder / SINGLE_FILE,)
    if (folder / INDEX_FILE).is_file():
        return _shards(folder, SettingsFile.read(folder / INDEX_FILE).required("weight_map", dict))
    if any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder}: the weights are pickled (pytorch_model.bin), and pickled weights are refused because "
            f"loading them can run code; `python -m rose_engine.convert {folder}` converts them"
        )
    raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}")


def _shards(folder: Path, weight_map: Mapping[str, Any]) -> tuple[Path, ...]:
    files = tuple(folder / name for name in sorted(set(map(str, weight_map.values()))))
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{folder}: {INDEX_FILE} names shards that are missing: {_listed(missing)}")
    held = {tensor.name for tensor in _stored_tensors(files)}
    if absent := sorted(weight_map.keys() - held):
        raise CheckpointError(f"{folder}: {INDEX_FILE} names tensors that no shard holds: {_listed(absent)}")
    return files


class _NoInitialValues(TorchFunctionMode):
    """Functions of `torch.nn.init` hand their tensor back: on the meta device they import TorchDynamo."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        keywords = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else keywords["tensor"]
        return func(*args, **keywords)


@contextmanager
def weightless() -> Iterator[None]:
    """Modules built while the context lasts are on the meta device and get no initial values."""
    with torch.device("meta"), _NoInitialValues():
        yield


def load_weights(
    module: nn.Module, folder: Path, rules: WeightRules, dtype: torch.dtype, device: torch.device
) -> None:
    """Give `module`, built on the meta device, the weights of `folder` in `dtype` on `device`.

    Raises `CheckpointError` naming every tensor that is missing, unused, of the wrong shape, or left out
    of a fused group; nothing is read before all of them agree.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    groups = _match(folder, shapes, rules)
    _materialize(module, dtype, device)
    _stream(dict(module.named_parameters()), groups)
    for part in module.modules():
        if isinstance(part, OwnsBuffers):
            part.fill_buffers(device)


def read_rows(folder: Path, tensor_names: Sequence[str], rows: Sequence[int]) -> Tensor:
    """Some `rows` of the first of these matrices that the folder's weights hold, in this order: `[n, width]`.

    Raises `CheckpointError` when there is none of them, or no such row.
    """
    stored = {tensor.name: tensor for tensor in _stored_tensors(weight_files(folder))}
    tensor = next((stored[name] for name in tensor_names if name in stored), None)
    if tensor is None:
        raise CheckpointError(f"{folder}: {' or '.join(tensor_names)} is missing")
    if outside := [row for row in rows if not 0 <= row < tensor.shape[0]]:
        raise CheckpointError(
            f"{folder}: {tensor.name} has {tensor.shape[0]} rows, none numbered {outside[0]}"
        )
    with _opened(tensor.file) as opened:
        matrix = opened.get_slice(tensor.name)
        return torch.cat([matrix[row : row + 1] for row in rows])


def _match(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], rules: WeightRules
) -> dict[str, list[StoredTensor]]:
    """For each parameter the stored tensors that make it up."""
    stored = _by_renamed(folder, rules)
    parts = {parameter: rules.parts_of(parameter) for parameter in shapes}
    placed = {name for names in parts.values() for name in names}
    unused = [t.name for name, t in stored.items() if name not in placed and not rules.is_ignorable(name)]
    problems = [f"no place for {_listed(unused)}"] if unused else []
    problems += _missing(parts, stored)
    groups = {p: [stored[name] for name in names if name in stored] for p, names in parts.items()}
    problems += [
        f"{parameter}: shape {_shown_shape(group)} in the files, {shapes[parameter]} in the model"
        for parameter, group in groups.items()
        if len(group) == len(parts[parameter]) and _stacked_shape(group) != shapes[parameter]
    ]
    if problems:
        raise CheckpointError(f"{folder}: {'; '.join(problems[:MAX_NAMES_SHOWN])}")
    return groups


def _by_renamed(folder: Path, rules: WeightRules) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for tensor in _stored_tensors(weight_files(folder)):
        twin = stored.setdefault(rules.rename(tensor.name), tensor)
        if twin is not tensor:
            raise CheckpointError(f"{folder}: {twin.name} and {tensor.name} are meant for the same place")
    return stored


def _missing(parts: Mapping[str, tuple[str, ...]], stored: Mapping[str, StoredTensor]) -> Iterator[str]:
    for parameter, names in parts.items():
        absent = [name for name in names if name not in stored]
        if len(absent) == len(names):
            yield f"{parameter} is missing"
        elif absent:
            yield f"{parameter} is half filled: {_listed(absent)} is missing"


def _stacked_shape(group: Sequence[StoredTensor]) -> tuple[int, ...] | None:
    """Shape of the tensors one below the other; `None` when they do not fit together."""
    if len(group) == 1:
        return group[0].shape
    tails = {tensor.shape[1:] for tensor in group}
    return (sum(tensor.shape[0] for tensor in group), *tails.pop()) if len(tails) == 1 else None


def _shown_shape(group: Sequence[StoredTensor]) -> str:
    return " + ".join(str(tensor.shape) for tensor in group)


def _materialize(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            real = torch.empty(parameter.shape, dtype=dtype, device=device)
            part.register_parameter(name, nn.Parameter(real, requires_grad=False))


@torch.no_grad()
def _stream(parameters: Mapping[str, Tensor], groups: Mapping[str, list[StoredTensor]]) -> None:
    """Copy tensor by tensor, file by file, so that no more than one is in host memory twice."""
    moves = [
        (tensor, rows)
        for parameter, group in groups.items()
        for tensor, rows in zip(group, _row_blocks(parameters[parameter], group), strict=True)
    ]
    moves.sort(key=lambda move: move[0].file)
    for file, of_file in groupby(moves, key=lambda move: move[0].file):
        with _opened(file) as stored:
            for tensor, rows in of_file:
                rows.copy_(stored.get_tensor(tensor.name))


def _row_blocks(parameter: Tensor, group: Sequence[StoredTensor]) -> Sequence[Tensor]:
    return [parameter] if len(group) == 1 else torch.split(parameter, [tensor.shape[0] for tensor in group])


def _stored_tensors(files: Iterable[Path]) -> Iterator[StoredTensor]:
    for file in files:
        with _opened(file) as stored:
            for name in stored.keys():  # noqa: SIM118 - not a mapping
                yield StoredTensor(file, name, tuple(stored.get_slice(name).get_shape()))


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as stored:
            yield stored
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file ({error})") from error


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES_SHOWN
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
