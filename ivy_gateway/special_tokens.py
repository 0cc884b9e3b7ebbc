"""A tokenizer file's special tokens: where its templates put them, and how to keep texts from spelling them.

Works on the parsed `tokenizer.json`, in the terms of that format; knows nothing of the library, of texts or
of limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ivy_gateway.errors import StartupError

Json = dict[str, Any]

# No pre-tokenizer of a Unigram model lets a plain space through: it splits there, or writes U+2581 instead.
_UNREACHABLE = " \uffff {} \uffff "


@dataclass(frozen=True, slots=True)
class Piece:
    """Special tokens that stand together: `[n]` ids, and the segment of each."""

    ids: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Template:
    """What surrounds one text or two: `pieces[0]`, text, `pieces[1]` and, for a pair, text, `pieces[2]`."""

    pieces: tuple[Piece, ...]
    text_segments: tuple[int, ...]  # of each text's own tokens
    first_end: tuple[int, ...] = ()  # what ends the first text of a pair, also where it is cut

    @property
    def num_special(self) -> int:
        """Special tokens it adds."""
        return sum(len(piece.ids) for piece in self.pieces)

    @property
    def has_segments(self) -> bool:
        """Whether any token is outside segment 0."""
        return any(self.text_segments) or any(any(piece.segments) for piece in self.pieces)

    def join(self, *texts: list[int]) -> list[int]:
        """The ids of one sequence, in order."""
        assert len(texts) == len(self.text_segments), "as many texts as the template has places"
        ids = list(self.pieces[0].ids)
        for text, piece in zip(texts, self.pieces[1:], strict=True):
            ids += text
            ids += piece.ids
        return ids

    def segments(self, *texts: list[int]) -> list[int]:
        """The segment of every id that `join` gives for the same texts."""
        segments = list(self.pieces[0].segments)
        for text, own, piece in zip(texts, self.text_segments, self.pieces[1:], strict=True):
            segments += [own] * len(text)
            segments += piece.segments
        return segments

    def without_specials(self) -> Template:
        """The texts alone."""
        return replace(self, pieces=(Piece(),) * len(self.pieces), first_end=())

    def in_one_segment(self) -> Template:
        """The same special tokens for a model that has no segments."""
        pieces = tuple(Piece(piece.ids, (0,) * len(piece.ids)) for piece in self.pieces)
        return replace(self, pieces=pieces, text_segments=(0,) * len(self.text_segments))


@dataclass(frozen=True, slots=True)
class Templates:
    """The two templates of a tokenizer."""

    single: Template
    pair: Template

    @classmethod
    def read(cls, content: Json, segments: bool) -> Templates:
        """Read the templates of a tokenizer file; without `segments` everything is in segment 0.

        Raises `StartupError` for a post-processor that is unknown or that does not keep the texts in order.
        """
        stages = [stage for stage in _stages(content.get("post_processor")) if stage["type"] != "ByteLevel"]
        if len(stages) > 1:
            raise StartupError("tokenizer.json: several templates in one post-processor are not supported")
        single, pair = _patterns(stages[0] if stages else {"type": None})
        templates = cls(_template(single, num_texts=1), _template(pair, num_texts=2))
        if segments:
            return templates
        return cls(templates.single.in_one_segment(), templates.pair.in_one_segment())


def literal_form(content: Json) -> Json:
    """The tokenizer file under which no text becomes a special token: they lose their spellings.

    The ids of all other pieces stay. A Unigram vocabulary would still match a special piece as if it were
    a word, so there these pieces get names that no text reaches; the unknown token keeps its own.
    """
    model = content["model"]
    if isinstance(model["vocab"], list):  # Unigram: pieces and scores, in id order
        spellings = {token["content"] for token in content.get("added_tokens") or ()}
        vocab = [
            [_UNREACHABLE.format(i) if piece in spellings and i != model.get("unk_id") else piece, score]
            for i, (piece, score) in enumerate(model["vocab"])
        ]
        model = model | {"vocab": vocab}
    return content | {"added_tokens": [], "model": model}


def control_tokens(content: Json) -> dict[str, int]:
    """Spelling and id of every special token that user text must not yield: all but the unknown token."""
    model = content["model"]
    unknown = model.get("unk_token")
    if isinstance(model["vocab"], list) and model.get("unk_id") is not None:
        unknown = model["vocab"][model["unk_id"]][0]
    added = content.get("added_tokens") or ()
    return {t["content"]: t["id"] for t in added if t["special"] and t["content"] != unknown}


@dataclass(frozen=True, slots=True)
class _Text:
    """The place of text `number` in a pattern."""

    number: int
    segment: int = 0


_Pattern = list[Piece | _Text]


def _stages(processor: Json | None) -> list[Json]:
    if processor is None:
        return []
    if processor["type"] == "Sequence":
        return [stage for part in processor["processors"] for stage in _stages(part)]
    return [processor]


def _patterns(stage: Json) -> tuple[_Pattern, _Pattern]:
    """Single and pair pattern of one post-processor."""
    match stage["type"]:
        case None:
            return [_Text(0)], [_Text(0), _Text(1)]
        case "TemplateProcessing":
            special = stage["special_tokens"]
            return [_element(e, special) for e in stage["single"]], [
                _element(e, special) for e in stage["pair"]
            ]
        case "BertProcessing":
            start, end = _piece([stage["cls"][1]]), _piece([stage["sep"][1]])
            single: _Pattern = [start, _Text(0), end]
            return single, [*single, _Text(1, 1), _piece([stage["sep"][1]], 1)]
        case "RobertaProcessing":
            start, end = _piece([stage["cls"][1]]), _piece([stage["sep"][1]])
            single = [start, _Text(0), end]
            return single, [*single, end, _Text(1), end]
        case unknown:
            raise StartupError(f"tokenizer.json: post-processor {unknown!r} is not supported")


def _element(element: Json, special_tokens: Json) -> Piece | _Text:
    """One element of a `TemplateProcessing`: a special token by name, or the sequence A or B."""
    if "Sequence" in element:
        return _Text("AB".index(element["Sequence"]["id"]), element["Sequence"]["type_id"])
    token = element["SpecialToken"]
    return _piece(special_tokens[token["id"]]["ids"], token["type_id"])


def _piece(ids: Iterable[int], segment: int = 0) -> Piece:
    ids = tuple(ids)
    return Piece(ids, (segment,) * len(ids))


def _template(pattern: _Pattern, num_texts: int) -> Template:
    texts = [element for element in pattern if isinstance(element, _Text)]
    if [text.number for text in texts] != list(range(num_texts)):
        raise StartupError(f"tokenizer.json: a template for {num_texts} texts must hold each once, in order")
    pieces = [Piece()]
    for element in pattern:
        if isinstance(element, _Text):
            pieces.append(Piece())
        else:
            last = pieces[-1]
            pieces[-1] = Piece(last.ids + element.ids, last.segments + element.segments)
    return Template(tuple(pieces), tuple(text.segment for text in texts))
