"""The letters in which byte-level vocabularies write their pieces: one for each byte.

Printable characters of Latin-1 stand for their own bytes, the others follow from U+0100 on (GPT-2's encoder).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))

# Each letter and its byte.
ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}


_LATIN1 = {ord(letter): byte for letter, byte in ALPHABET.items()}


def pieces(vocabulary: Mapping[str, int]) -> list[tuple[bytes, int]]:
    """The bytes of every piece that is written in these letters, and its id."""
    written = ((p, i) for p, i in vocabulary.items() if ALPHABET.keys() >= set(p))
    return [(piece.translate(_LATIN1).encode("latin-1"), i) for piece, i in written]


def texts_of(vocabulary: Iterable[str]) -> list[str]:
    """The pieces as texts spell them, without what is no whole character."""
    spelled = (piece.translate(_LATIN1).encode("latin-1", "ignore") for piece in vocabulary)
    return [text for text in (raw.decode(errors="ignore") for raw in spelled) if text]
