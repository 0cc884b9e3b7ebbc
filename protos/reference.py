"""A model's reference file: a few texts with the ids and vectors that another library gives for them.

Both sides check themselves against it before they serve: the gateway text to ids, the server ids to vectors.
It lies in the model's folder as `bouquet_reference.json`:

    {"format": 1,
     "made_with": {"sentence-transformers": "6.2.0", ...},        # for people
     "examples": [{"text": "...", "token_ids": [101, ..., 102],   # special tokens included
                   "vector": "..."}, ...]}                        # base64 of little-endian float32 [D]

Texts stand without prompt. Knows nothing of tokenizers or models; numpy only.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

REFERENCE_FILE = "bouquet_reference.json"
MAX_EXAMPLES = 20
_FORMAT = 1


class BadReference(ValueError):
    """A file that is no reference file; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceExample:
    """One text, its ids `[length]` and its vector `[D]`."""

    text: str
    token_ids: NDArray[np.int32]
    vector: NDArray[np.float32]


def read_reference(folder: Path) -> tuple[ReferenceExample, ...]:
    """The examples of a model's folder, none where it has no reference file.

    Raises `BadReference` for a file that cannot be read.
    """
    path = folder / REFERENCE_FILE
    if not path.is_file():
        return ()
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != _FORMAT:
            raise BadReference(f"{path}: format {content['format']!r} is unknown, {_FORMAT} is known")
        examples = tuple(_from_json(item) for item in content["examples"])
    except BadReference:
        raise
    except (OSError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadReference(f"{path}: not a reference file ({error!r})") from error
    if not examples:
        raise BadReference(f"{path}: no examples")
    return examples


def write_reference(path: Path, examples: Sequence[ReferenceExample], made_with: Mapping[str, str]) -> None:
    """Write 1 to `MAX_EXAMPLES` examples; `made_with`: versions by library. Raises `OSError`."""
    assert 0 < len(examples) <= MAX_EXAMPLES
    lines = ",\n".join(json.dumps(_to_json(example), ensure_ascii=False) for example in examples)
    head = f'"format": {_FORMAT},\n "made_with": {json.dumps(dict(made_with))}'
    path.write_text(f'{{{head},\n "examples": [\n{lines}\n]}}\n', encoding="utf-8")


def _from_json(item: dict[str, Any]) -> ReferenceExample:
    text = item["text"]
    if not isinstance(text, str):
        raise TypeError("a text that is no string")
    vector = np.frombuffer(base64.b64decode(item["vector"], validate=True), "<f4")
    return ReferenceExample(text, np.array(item["token_ids"], np.int32), vector)


def _to_json(example: ReferenceExample) -> dict[str, Any]:
    little = np.ascontiguousarray(example.vector, "<f4")
    return {
        "text": example.text,
        "token_ids": example.token_ids.tolist(),
        "vector": base64.b64encode(little.tobytes()).decode("ascii"),
    }
