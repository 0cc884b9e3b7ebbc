"""Texts that are likely to tell two tokenizers apart, made from a seed, a vocabulary and real passages."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

LANGUAGES = ("ar", "de", "en", "hi", "ru", "th", "zh")

_WHITE_SPACE = (
    " \t\n\r\x0b\x0c\x1c\x1d\x85\xa0\u1680\u2000\u2009\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"
)
_MARKS = (
    "\u0300\u0301\u0308\u0327\u0331\u05b0\u064b\u0651\u0670"
    "\u093c\u094d\u09cd\u0e31\u0e48\u20dd\u3099\u302e\ufe0f\ufe0e"
)
# What the rules for grapheme clusters are about, short in UTF-8 wherever there is a choice.
_CLUSTERS = (
    "a", "e", "A", "Z", "é", "©", "®", "™", "ª", "²", "ﬁ", "א", "ب", "क", "क़", "ক", "각", "가",
    "ᄀ", "ᅡ", "ᆨ", "㉠", "\r", "\n", "\r\n", "\x00", "\x01", "\xad", "\u0600", "\u0601",
    "\u06dd", "\u070f", "\U000110bd", "\u200c", "\u200d", "\u200e", "\U000e0020", "\U000e0001",
    "\U0001f1e6", "\U0001f1fa", "👍", "🏽", "👨‍👩‍👧", "❤️", "1⃣", "\u2581", "\u0903",
    "\u0e33", "\u1160", "\U00016d63", *_MARKS,
)  # fmt: skip
# What the patterns that split texts for byte-level BPE tell apart.
_PATTERN_PARTS = (
    "'", "'", "s", "S", "ſ", "t", "re", "RE", "Ve", "m", "LL", "ll", "lL", "d", "'s", "a", "É", "ǅ", "ʰ",
    "中", "ि", "\u0301", "1", "2", "34567", "٣", "²", "½", "Ⅷ", "〇", "!", "...", "_", "€", "\u2019",
    " ", " ", "  ", "\t", "\n", "\n", "\r", "\r\n", "\u2028", "\x85", "\xa0", "\u3000", "\x1c", "\x00",
)  # fmt: skip
_RANGES = (
    (0x20, 0x7F), (0x80, 0x250), (0x250, 0x370), (0x370, 0x600), (0x600, 0x900), (0x900, 0xE00),
    (0xE00, 0x1200), (0x1200, 0x2000), (0x2000, 0x2C00), (0x2C00, 0x3400), (0x3400, 0xA000),
    (0xA000, 0xAC00), (0xAC00, 0xD7FF), (0xE000, 0xF900), (0xF900, 0x10000), (0x10000, 0x12000),
    (0x1D000, 0x1F000), (0x1F000, 0x20000), (0x20000, 0x32000), (0xE0000, 0xE0200),
    (0xF0000, 0x110000),
)  # fmt: skip


def passages(xquad: Path, languages: Sequence[str] = LANGUAGES) -> list[str]:
    """The XQuAD passages of `languages`, language by language."""
    found: list[str] = []
    for language in languages:
        articles = json.loads((xquad / f"xquad.{language}.json").read_text())["data"]
        found += [p["context"] for article in articles for p in article["paragraphs"]]
    return found


class TextMaker:
    """An endless supply of texts: `next(maker)`. Equal arguments make equal texts."""

    def __init__(
        self, seed: int, pieces: Sequence[str], specials: Sequence[str], passages: Sequence[str]
    ) -> None:
        self._random = random.Random(seed)
        self._pieces = pieces
        self._specials = [*specials, *map(_full_width, specials), "<s>", "</s>", "[CLS]", "<mask>", "<unk>"]
        self._passages = passages
        self._makers: tuple[Callable[[], str], ...] = (
            self._snippet,
            self._mutated,
            self._mutated,
            self._joined_pieces,
            self._characters,
            self._clusters,
            self._clusters,
            self._white_space,
            self._pattern_parts,
            self._with_specials,
            self._compatibility,
            self._repeated,
            self._mixed,
        )

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return self._random.choice(self._makers)()

    def _any_character(self) -> str:
        first, last = self._random.choice(_RANGES)
        code_point = self._random.randrange(first, last)
        return "x" if 0xD800 <= code_point < 0xE000 else chr(code_point)

    def _piece(self) -> str:
        piece = self._random.choice(self._pieces)
        return piece if self._random.random() < 0.5 else piece.replace("▁", " ").replace("##", "")

    def _snippet(self) -> str:
        passage = self._random.choice(self._passages)
        start = self._random.randrange(len(passage))
        return passage[start : start + self._random.randrange(1, 200)]

    def _mutated(self) -> str:
        text = list(self._snippet())
        for _ in range(self._random.randrange(1, 8)):
            place = self._random.randrange(len(text) + 1)
            match self._random.randrange(5):
                case 0:
                    text.insert(place, self._any_character())
                case 1:
                    text.insert(place, self._random.choice(_CLUSTERS))
                case 2:
                    text.insert(place, self._random.choice(_WHITE_SPACE))
                case 3:
                    del text[place : place + self._random.randrange(1, 4)]
                case _:
                    text[place:place] = text[place : place + 3]
        return "".join(text)

    def _joined_pieces(self) -> str:
        between = self._random.choice(("", "", " ", "  ", "▁", "-"))
        return between.join(self._piece() for _ in range(self._random.randrange(1, 12)))

    def _characters(self) -> str:
        if self._random.random() < 0.5:
            return "".join(self._any_character() for _ in range(self._random.randrange(1, 30)))
        first, last = self._random.choice(_RANGES)
        text = "".join(chr(self._random.randrange(first, last)) for _ in range(self._random.randrange(1, 30)))
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _clusters(self) -> str:
        return "".join(self._random.choice(_CLUSTERS) for _ in range(self._random.randrange(1, 12)))

    def _white_space(self) -> str:
        letters = ("a", "b", "▁", ".", "é", "中", self._random.choice(_CLUSTERS))
        return "".join(
            self._random.choice(_WHITE_SPACE if self._random.random() < 0.6 else letters)
            for _ in range(self._random.randrange(1, 15))
        )

    def _pattern_parts(self) -> str:
        return "".join(self._random.choice(_PATTERN_PARTS) for _ in range(self._random.randrange(1, 20)))

    def _with_specials(self) -> str:
        parts = (
            lambda: self._random.choice(self._specials),
            lambda: self._random.choice(self._specials)[: self._random.randrange(1, 6)],
            lambda: self._random.choice(_WHITE_SPACE),
            self._piece,
        )
        return "".join(self._random.choice(parts)() for _ in range(self._random.randrange(1, 10)))

    def _compatibility(self) -> str:
        """Text in another normal form: decomposed, full-width, or of compatibility characters."""
        text = self._snippet() if self._random.random() < 0.5 else self._joined_pieces()
        match self._random.randrange(3):
            case 0:
                return unicodedata.normalize("NFD", text)
            case 1:
                return _full_width(text)
            case _:
                marked = (c + self._random.choice(_MARKS) * (self._random.random() < 0.3) for c in text)
                return "".join(marked)

    def _repeated(self) -> str:
        """One unbroken word, up to some thousand characters long."""
        pick = (
            self._any_character,
            self._piece,
            lambda: self._random.choice(("a", "aa", "ab", "の", "0", "ก")),
        )
        unit = "".join(self._random.choice(pick)() for _ in range(self._random.randrange(1, 4)))
        return unit * self._random.randrange(1, 120 if self._random.random() < 0.9 else 1500)

    def _mixed(self) -> str:
        makers = self._makers[:-1]
        return "".join(self._random.choice(makers)()[:80] for _ in range(self._random.randrange(2, 5)))


def _full_width(text: str) -> str:
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)
