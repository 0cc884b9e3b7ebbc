"""What BERT's normalizer and pre-tokenizer make of each character: asked of the library, once for each kind.

Normalization is character by character but for canonical order: where one character leaves a combining mark
behind, `reordering` names the mark, and a text with two of them in a row is left to the library.
"""

from __future__ import annotations

import functools
import itertools
import json
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

_BETWEEN = "|"  # ASCII punctuation: left alone by every normalizer here
_SURROGATES = range(0xD800, 0xE000)
# Planes with characters that something happens to; the others are asked at some places only.
_ASSIGNED = (range(0x33480), range(0xE0000, 0xE1000))
_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


@dataclass(frozen=True)
class BertCharacters:
    """How each character is treated; those not named stay as they are."""

    normalized: list[tuple[str, str]]
    removed: list[tuple[int, int]]  # first and last
    isolated: str  # ideographs: words of their own, though not in the place of others
    punctuation: str
    reordering: str


@functools.lru_cache(maxsize=8)
def of(normalizer: str) -> BertCharacters:
    """The characters of a `BertNormalizer`, given by its description in JSON."""
    options = json.loads(normalizer)
    options.pop("type")
    library = BertNormalizer(**options)
    changed = [(c, text) for c, text in _normalized(library, _code_points()) if c != text]
    kept = [(c, text) for c, text in changed if text and text.split() != [c]]
    return BertCharacters(
        normalized=kept,
        removed=_ranges([ord(c) for c, text in changed if not text]) + _removed_private(library),
        isolated="".join(c for c, text in changed if text.split() == [c]),
        punctuation=_punctuation(),
        reordering=_marks(library),
    )


def _code_points() -> Iterable[int]:
    return (n for part in _ASSIGNED for n in part if n not in _SURROGATES and chr(n) != _BETWEEN)


def _normalized(library: BertNormalizer, code_points: Iterable[int]) -> list[tuple[str, str]]:
    characters = [chr(n) for n in code_points]
    texts = library.normalize_str(_BETWEEN.join(characters)).split(_BETWEEN)
    return list(zip(characters, texts, strict=True))


def _removed_private(library: BertNormalizer) -> list[tuple[int, int]]:
    """The private planes where they are removed."""
    ends = [part for part in _PRIVATE if not library.normalize_str(chr(part[0]) + chr(part[-1]))]
    return [(part[0], part[-1]) for part in ends]


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """First and last of each run in ascending `numbers`."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    return [((part := [n for _, n in run])[0], part[-1]) for _, run in runs]


@functools.lru_cache(maxsize=1)
def _punctuation() -> str:
    """Every character that the pre-tokenizer makes a word of its own."""
    text = "a".join(chr(n) for n in _code_points())
    words = (word for word, _ in BertPreTokenizer().pre_tokenize_str(f"a{text}a"))
    return "".join({word for word in words if len(word) == 1 and word != "a"} | {_BETWEEN})


def _marks(library: BertNormalizer) -> str:
    """Combining marks that survive, where the normalizer orders them at all."""
    if library.normalize_str("\u1b44\u302e") != library.normalize_str("\u302e\u1b44"):
        return ""
    marks = (chr(n) for n in _code_points() if unicodedata.combining(chr(n)))
    return "".join(mark for mark in marks if library.normalize_str(mark))
