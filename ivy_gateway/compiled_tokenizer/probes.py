"""Texts on which an encoder and the library are compared at load, where they would differ first.

A probe does not prove that two tokenizers are equal (the fuzz tests look for that); it catches a vocabulary,
a charsmap or a library of another kind than those the extension was tested with.
"""

from __future__ import annotations

from collections.abc import Sequence

_FIXED = (
    "", " ", "  ", "a", " a", "a ", "  a  b  ", "\n", "a\r\nb", "\ta\u00a0b\u3000c\u2009d",
    "a\u0085b\u2028c\u1680d", "▁", "▁▁a", "a▁b", " ▁ a", "The quick brown fox, 1984!",
    "Zürich 東京 🙂", "naïve café co-operate", "e\u0301", "cafe\u0301s", "a\u0301\u0308b",
    "©\u0301", "™\u0301", "\u0600a", "\u06dd1", "\u0301", "\u200d", "a\u200db",
    "👨\u200d👩\u200d👧", "👍🏽", "🇩🇪🇫🇷", "1\u20e3", "❤\ufe0f", "क्षत्रिय", "क़\u0301",
    "กำลังใจ", "각\u0301", "ᄀ\u1161\u11a8", "ﬁne ﬂow ½ ² ㎏ Ⅷ", "＜ｓ＞", "＜／ｓ＞", "<s>",
    "</s>", "<unk>", "<mask>", " <mask> x", "[CLS] [SEP]", "<pad>", "\x00", "a\x00b",
    "\x01\x7f\xad", "\ufeff", "\ufffd", "\ufffe", "\U000f0000", "\U00020000", "\U000e0001",
    "don't", "U.S.A.", "#hash ##tag", "İstanbul ǅ ẞ ſ", "ΟΔΟΣ", "x\u0323\u0307", "a" * 101,
    "a" * 600, "の" * 300, "ab" * 150, "IT'S we'Ll 'ſ 'RE' ''d", "a\r\n\r\n  b\n \n\tc !?\n\n",
    "12345 ١٢٣٤ ²½Ⅷ 1a2", "\u1112\u1161\u11ab 각\u11a8", "ড\u09bc ক\u09cb\u09be", "q\u0307\u0323", "Å \u212b",
    "{}();\t\t// x = 10_000",
)  # fmt: skip
_NUM_FROM_VOCABULARY = 220


def texts(pieces: Sequence[str]) -> list[str]:
    """The fixed probes, and some from all over the vocabulary: pieces alone, and several as one word."""
    step = max(1, len(pieces) // _NUM_FROM_VOCABULARY)
    chosen = [piece.replace("▁", " ").removeprefix("##") for piece in pieces[::step]]
    joined = ["".join(chosen[i : i + 5]) for i in range(0, len(chosen), 10)]
    return [*_FIXED, *chosen, *joined]
