"""What the library's regular expressions and its normalization make of each code point: asked of the library.

Both go by their own versions of Unicode, which are not Python's. Some tenths of a second, once a process.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
from tokenizers import Regex
from tokenizers.normalizers import NFC, NFD, Replace

Range = tuple[int, int]  # first and last
FormC = tuple[list[tuple[int, str]], list[tuple[int, int]], list[tuple[int, int, int]]]

_BETWEEN = "|"  # neither composes nor comes apart
_BASE = "x"  # composes with none of the two marks below
_FIRST_MARK, _LAST_MARK = "\u0334", "\u0345"  # of the lowest class in canonical order, and of the highest
_BLOCK = 1 << 12  # code points asked about at once
_HANGUL = range(0xAC00, 0xD7A4)  # syllables: composed by arithmetic


@functools.lru_cache(maxsize=8)
def matching(classes: str) -> list[Range]:
    """The code points that one of `classes` matches: of `\\p{L}`, `\\p{M}`, `\\p{N}` and `\\s`."""
    found = _kept(classes, _classified())
    numbers = np.frombuffer(found.encode("utf-32-le"), "<u4").astype(np.int64)
    first = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    last = np.append(first[1:], len(numbers)) - 1
    return list(zip(numbers[first].tolist(), numbers[last].tolist(), strict=True))


@functools.lru_cache(maxsize=1)
def form_c() -> FormC:
    """What normalization form C is made by, as the extension's `FormCOptions` has it, but for Hangul.

    What form D makes of each character that it takes apart; combining marks, each with the place of its class
    in canonical order, from 1; pairs of characters and the one that they become.
    """
    parts = _parts()
    pairs = [_pair(c, some) for c, some in parts.items() if NFC().normalize_str(c) == c]
    return (
        [(ord(c), some) for c, some in parts.items()],
        [(ord(mark), rank) for mark, rank in _ranks(parts).items()],
        pairs,
    )


@functools.lru_cache(maxsize=1)
def _classified() -> str:
    """Every character of a class that is ever asked about: few of all."""
    return _kept(r"\p{L}\p{M}\p{N}\s", _all_characters())


def _kept(classes: str, text: str) -> str:
    return Replace(Regex(f"[^{classes}]+"), "").normalize_str(text)


def _all_characters() -> str:
    numbers = np.arange(0x110000, dtype="<u4")
    return numbers[(numbers < 0xD800) | (numbers >= 0xE000)].tobytes().decode("utf-32-le")


def _parts() -> dict[str, str]:
    """The characters that form D takes apart, and into what."""
    form_d = NFD()
    found: dict[str, str] = {}
    before, _, after = _all_characters().partition("".join(map(chr, _HANGUL)))
    characters = (before + after).replace(_BETWEEN, "")
    for start in range(0, len(characters), _BLOCK):
        block = characters[start : start + _BLOCK]
        if form_d.normalize_str(block) != block:
            parts = form_d.normalize_str(_BETWEEN.join(block)).split(_BETWEEN)
            found |= {c: some for c, some in zip(block, parts, strict=True) if some != c}
    return found


def _pair(c: str, parts: str) -> tuple[int, int, int]:
    """What all parts of `c` but the last make, the last, and `c`, which the two become."""
    first = NFC().normalize_str(parts[:-1])
    if len(first) != 1 or NFC().normalize_str(first + parts[-1]) != c:
        raise ValueError(f"U+{ord(c):04X} is not composed of two characters")
    return ord(first), ord(parts[-1]), ord(c)


def _ranks(parts: dict[str, str]) -> dict[str, int]:
    """Each combining mark of a class other than 0, with the place of the class among all, from 1.

    Form D sorts marks by their classes and leaves those of one class in their order: marks that are sorted
    both ways are of different classes.
    """
    candidates = [chr(n) for a, b in matching(r"\p{M}") for n in range(a, b + 1) if chr(n) not in parts]
    marks = [c for c in candidates if _moves(c)]
    ascending, descending = (NFD().normalize_str("".join(some)) for some in (marks, marks[::-1]))
    place = {mark: i for i, mark in enumerate(descending)}
    ranks, rank = {}, 0
    for before, mark in itertools.pairwise(_BASE + ascending):
        rank += before == _BASE or place[before] < place[mark]
        ranks[mark] = rank
    return ranks


def _moves(mark: str) -> bool:
    """Whether canonical order moves it among other marks: its class is not 0."""
    texts = (_BASE + _LAST_MARK + mark, _BASE + mark + _FIRST_MARK)
    return mark in (_FIRST_MARK, _LAST_MARK) or any(NFD().normalize_str(text) != text for text in texts)
