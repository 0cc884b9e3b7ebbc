"""`python -m rose_engine.convert MODEL`: pickled weights to safetensors, without running anybody's code.

Pickles are read by torch's restricted reader, which makes tensors and plain containers and nothing else. No
code of the model's folder is imported. Knows nothing of model families.
"""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rose_engine.checkpoint import INDEX_FILE, SINGLE_FILE
from rose_engine.errors import CheckpointError
from rose_engine.settings_file import SettingsFile

logger = logging.getLogger(__name__)

PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"
# What `--out` leaves behind: pickles, code, and weights of other programs.
_NOT_COPIED = ("*.bin", "*.py", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.pt", "*.pth", ".git")


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert, or end with a message and status 1."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(
        prog="python -m rose_engine.convert",
        description="Convert a model's pickled weights (pytorch_model.bin) to safetensors.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="the model's folder")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="a new folder for the whole model (beside the pickled files)"
    )
    options = parser.parse_args(arguments)
    try:
        convert_model(options.model, options.out)
    except (CheckpointError, OSError) as error:
        sys.exit(f"error: {error}")


def convert_model(folder: Path, out: Path | None = None) -> Path:
    """Convert the pickled weights of a model and of its modules; the folder that holds the result.

    Without `out` safetensors files are written beside the pickled ones; else the whole model, less what the
    engine does not read, goes to `out`, which must not exist. Raises `CheckpointError` for a folder without
    pickled weights, with other weights already, or whose pickles hold more than tensors; `OSError`.
    """
    pickled = [part for part in (folder, *sorted(folder.glob("[0-9]*_*"))) if _pickled_weights(part)]
    if not pickled:
        raise CheckpointError(f"{folder}: no {PICKLED_FILE} and no {PICKLED_INDEX_FILE} to convert")
    for part in pickled:
        if (part / SINGLE_FILE).exists() or (part / INDEX_FILE).exists():
            raise CheckpointError(f"{part}: has safetensors weights already")
    target = folder
    if out is not None:
        shutil.copytree(folder, out, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        target = out
    for part in pickled:
        _convert_weights(part, target / part.relative_to(folder))
    return target


def _pickled_weights(folder: Path) -> bool:
    return (folder / PICKLED_FILE).is_file() or (folder / PICKLED_INDEX_FILE).is_file()


def _convert_weights(folder: Path, target: Path) -> None:
    """One file to one file, shards to shards with their index."""
    if (folder / PICKLED_FILE).is_file():
        _convert_file(folder / PICKLED_FILE, target / SINGLE_FILE)
        return
    index = SettingsFile.read(folder / PICKLED_INDEX_FILE)
    places = {str(name): str(file) for name, file in index.required("weight_map", dict).items()}
    for file in sorted(set(places.values())):
        _convert_file(folder / file, target / _renamed(file))
    weight_map = {name: _renamed(file) for name, file in places.items()}
    content = {"metadata": index.optional("metadata", dict, {}), "weight_map": weight_map}
    (target / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n")


def _renamed(shard: str) -> str:
    return f"{Path(shard).stem.replace('pytorch_model', 'model')}.safetensors"


def _convert_file(source: Path, target: Path) -> None:
    tensors = _independent(_read_tensors(source))
    unfinished = target.with_name(f"{target.name}.unfinished")
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.replace(target)
    logger.info("%s: %d tensors", target, len(tensors))


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file}: holds more than tensors, and reading that could run code; it is not converted"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file}: not a readable PyTorch file ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds a {type(content).__name__}, not named tensors")
    if others := [str(name) for name, value in content.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(f"{file}: {', '.join(others[:8])} hold no tensor: not the weights of a model")
    return content


def _independent(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, none of which shares memory with another, as safetensors files want them.

    A tied tensor is written under each of its names: which of them a model reads is its family's business.
    """
    seen: set[int] = set()
    independent = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes
        shared = storage.data_ptr() in seen
        seen.add(storage.data_ptr())
        independent[name] = (
            tensor if whole and not shared else tensor.clone(memory_format=torch.contiguous_format)
        )
    return independent


if __name__ == "__main__":
    main()
