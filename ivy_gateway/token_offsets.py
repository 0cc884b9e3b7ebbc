"""Tokens with their places in a text, in UTF-8 bytes, from encodings whose offsets count characters.

Knows nothing of requests, nor of where the encodings come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from tokenizers import Encoding

from ivy_gateway.jobs import Token, TokenizedText
from ivy_gateway.special_tokens import Piece


def tokenized(source: str, read: str, encoding: Encoding, around: Sequence[TokenizedText]) -> TokenizedText:
    """The tokens of `source` between those that the template puts `around` it.

    `read` is `source` as it was encoded: itself, or in lower case.
    """
    starts, stops = byte_positions(source, read)
    raw = source.encode()
    own = (
        Token(token_id, raw[starts[first] : stops[end]].decode(), False, starts[first], stops[end])
        for token_id, (first, end) in zip(encoding.ids, encoding.offsets, strict=True)
    )
    before, after = around
    return TokenizedText(
        (*before.tokens, *own, *after.tokens), (*before.pieces, *encoding.tokens, *after.pieces)
    )


def special_tokens(piece: Piece, names: Mapping[int, str]) -> TokenizedText:
    """The special tokens of `piece`, under their names."""
    pieces = tuple(names[token_id] for token_id in piece.ids)
    tokens = (Token(i, name, True, None, None) for i, name in zip(piece.ids, pieces, strict=True))
    return TokenizedText(tuple(tokens), pieces)


def byte_positions(source: str, read: str) -> tuple[Sequence[int], Sequence[int]]:
    """For each boundary between characters of `read`, where in `source` a token there starts or stops.

    Lower case can have more characters (capital I with a dot becomes two): both stand for all of the one.
    """
    if source.isascii():
        return range(len(source) + 1), range(len(source) + 1)
    codes = np.frombuffer(source.encode("utf-32-le"), "<u4")
    widths = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)
    bounds = np.concatenate(([0], np.cumsum(widths)))
    if len(read) == len(source):
        return (same := bounds.tolist()), same
    copies = [len(character.lower()) for character in source]
    starts = [*np.repeat(bounds[:-1], copies).tolist(), int(bounds[-1])]
    return starts, [0, *np.repeat(bounds[1:], copies).tolist()]
