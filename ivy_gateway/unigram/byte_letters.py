"""The letters in which byte-level vocabularies write their pieces: one for each byte.

Printable characters of Latin-1 stand for their own bytes, the others follow from U+0100 on (GPT-2's encoder).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))

# Each letter and its byte.
ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}


def pieces(vocabulary: Mapping[str, int]) -> list[tuple[bytes, int]]:
    """The bytes of every piece that is written in these letters, and its id."""
    return [
        (bytes(map(ALPHABET.__getitem__, p)), i) for p, i in vocabulary.items() if ALPHABET.keys() >= set(p)
    ]


def texts_of(vocabulary: Iterable[str]) -> list[str]:
    """The pieces that are whole characters, as texts spell them."""
    spelled = (bytes(ALPHABET.get(letter, 0x3F) for letter in piece) for piece in vocabulary)
    return [text for text in (raw.decode(errors="ignore") for raw in spelled) if text]
