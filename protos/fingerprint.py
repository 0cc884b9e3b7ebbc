"""The hash by which gateway and server make sure that they mean the same ids.

Standard library only: the server computes it without a tokenizer library.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def tokenizer_hash(tokenizer_file: Path) -> str:
    """Hash of vocabulary and special ids of a `tokenizer.json`; 16 hexadecimal digits.

    Two files with equal hashes map the same ids to the same pieces. Normalisation, templates, truncation
    and padding are left out: they belong to the gateway and change without a word to the servers.
    Raises `OSError` or `ValueError` when the file cannot be read or is not a tokenizer.
    """
    content = json.loads(tokenizer_file.read_bytes())
    try:
        vocabulary = content["model"]["vocab"]
        special = [(t["id"], t["content"], bool(t["special"])) for t in content.get("added_tokens") or []]
        essence = [_pieces_by_id(vocabulary), sorted(special)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{tokenizer_file}: not a tokenizer file ({error!r})") from error
    canonical = json.dumps(essence, ensure_ascii=True, separators=(",", ":")).encode()
    return hashlib.sha256(canonical).hexdigest()[:16]


def _pieces_by_id(vocabulary: dict[str, int] | list[tuple[str, float]]) -> list[Any]:
    """Pieces in id order, with their ids where these are given (they may have gaps)."""
    if isinstance(vocabulary, dict):
        return sorted((i, piece) for piece, i in vocabulary.items())
    return [piece for piece, _score in vocabulary]
