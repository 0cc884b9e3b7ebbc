"""Which code points make one extended grapheme cluster: asked of `tokenizers`, whose Unicode version decides.

`python -m ivy_gateway.compiled_tokenizer.graphemes` writes the table that the extension is built with, and
`agrees` asks at start whether the installed library still gives it. The question is always the same: a
`Precompiled` normalizer with one key replaces a short cluster that starts with this key whole, so a combining
mark after the key vanishes exactly where the key starts a cluster. Rules (GB..): Unicode Standard Annex 29.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence

from tokenizers.normalizers import Precompiled

Property = tuple[str, str]  # Grapheme_Cluster_Break, and Indic_Conjunct_Break
Range = tuple[int, int, str, str]  # first, last, and the property of all between

_MARK = "\u0301"
_JOINER = "\u200d"
_CHUNK = 1 << 15  # code points asked about at once
_OTHER: Property = ("Other", "None")
_FIXED: dict[int, Property] = {0x0A: ("LF", "None"), 0x0D: ("CR", "None"), 0x200D: ("ZWJ", "Extend")}

# Probe: what stands before and after the code point, and the key whose mark tells.
_PROBES = {
    "joins": ("a", "", "a"),
    "prepend": ("", "a" + _MARK, "a"),
    "control": ("", _MARK + "\u0302", _MARK),
    "before_l": ("", "\u1100" + _MARK, "\u1100"),
    "before_v": ("", "\u1160" + _MARK, "\u1160"),
    "before_t": ("", "\u11a8" + _MARK, "\u11a8"),
    "pictographic": ("", _JOINER + "©" + _MARK, "©"),
    "extend": ("©", _JOINER + "®" + _MARK, "®"),
    "consonant": ("", "\u094d\u0915" + _MARK, "\u0915"),
    "linker": ("\u0915", "\u0916" + _MARK, "\u0916"),
    "conjunct_extend": ("\u0915", "\u094d\u0916" + _MARK, "\u0916"),
}


def properties(code_points: Sequence[int]) -> list[Property]:
    """The properties that the installed library gives to each of `code_points`."""
    answers = {name: _ask(code_points, *probe) for name, probe in _PROBES.items()}
    return [
        _property(code_point, {name for name, yes in answers.items() if yes[i]})
        for i, code_point in enumerate(code_points)
    ]


def agrees(ranges: Sequence[Range]) -> bool:
    """Whether the library gives the `ranges` their properties: asked at the ends of each and beside them."""
    expected = {edge: (kind, conjunct) for a, b, kind, conjunct in ranges for edge in (a, b)}
    beside = {n for first, last, *_ in ranges for n in (first - 1, last + 1)} - expected.keys()
    expected |= {n: _OTHER for n in beside if 0 <= n < 0x110000 and not _surrogate(n)}
    return properties(list(expected)) == list(expected.values())


def _surrogate(code_point: int) -> bool:
    return 0xD800 <= code_point < 0xE000


def _ask(code_points: Sequence[int], before: str, after: str, key: str) -> list[bool]:
    """For each code point between `before` and `after`: whether the mark survives: they are joined."""
    normalizer = one_key_normalizer(key)
    text = "\n".join(before + ("x" if n == 0x0A else chr(n)) + after for n in code_points)
    answers = normalizer.normalize_str(text).split("\n")
    if not after:  # the code point itself is what vanishes
        return [answer == "\uffff" for answer in answers]
    return [answer.endswith("\uffff" + after[after.index(key) + 1 :]) for answer in answers]


def _property(code_point: int, yes: set[str]) -> Property:
    if 0xAC00 <= code_point < 0xD7A4:  # Hangul syllables: told apart by arithmetic
        return _OTHER
    if code_point in _FIXED:
        return _FIXED[code_point]
    return _break(yes), _conjunct(yes)


def _break(yes: set[str]) -> str:
    if "control" not in yes:
        return "Control"
    hangul = {("before_l", "before_v"): "L", ("before_v", "before_t"): "V", ("before_t",): "T"}
    if "prepend" in yes:
        return "Prepend"
    if "joins" in yes:
        return "Extend" if "extend" in yes else "SpacingMark"
    before = tuple(name for name in ("before_l", "before_v", "before_t") if name in yes)
    return hangul.get(before, "Pictographic" if "pictographic" in yes else "Other")


def _conjunct(yes: set[str]) -> str:
    if "prepend" in yes or "control" not in yes:
        return "None"
    for name, value in (("consonant", "Consonant"), ("linker", "Linker"), ("conjunct_extend", "Extend")):
        if name in yes:
            return value
    return "None"


def one_key_normalizer(key: str) -> Precompiled:
    """A `Precompiled` normalizer that replaces `key` by U+FFFF and nothing else.

    The charsmap is a double array in the form of Darts-clone: the unit of a node holds its label, whether a
    leaf follows and the XOR to its children; then the replacements, each ended by a zero byte.
    """
    path = key.encode()
    units = [0] * (256 * (len(path) + 2))
    units[0] = 256 << 10
    for depth, label in enumerate(path):
        position = 256 * (depth + 1) ^ label
        leaf = depth == len(path) - 1
        units[position] = (position ^ 256 * (depth + 2)) << 10 | leaf << 8 | label
    units[256 * (len(path) + 1)] = 1 << 31
    blob = struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + "\uffff".encode() + b"\0"
    return Precompiled(blob)


def ranges() -> list[Range]:
    """Every code point whose property is not Other, in ranges: some seconds."""
    found: list[Range] = []
    code_points = [n for n in range(0x110000) if not _surrogate(n)]
    for start in range(0, len(code_points), _CHUNK):
        part = code_points[start : start + _CHUNK]
        for code_point, known in zip(part, properties(part), strict=True):
            if known != _OTHER:
                _append(found, code_point, known)
    return found


def _append(found: list[Range], code_point: int, known: Property) -> None:
    if found and found[-1][1] == code_point - 1 and found[-1][2:] == known:
        found.append((found.pop()[0], code_point, *known))
    else:
        found.append((code_point, code_point, *known))


def table() -> str:
    """The ranges as the extension includes them."""
    lines = (
        f"{{0x{a:X}, 0x{b:X}, Break::{kind}, Conjunct::{conjunct}}},\n" for a, b, kind, conjunct in ranges()
    )
    return (
        "// Written by `python -m ivy_gateway.compiled_tokenizer.graphemes`: not to be edited.\n"
        + "".join(lines)
    )


if __name__ == "__main__":
    sys.stdout.write(table())
