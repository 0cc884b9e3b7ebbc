"""Inputs of a job by the gateway's own encoder: texts are cut, framed and packed in one call.

Gives what `truncation` gives on the library's ids; knows nothing of threads or routes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ivy_gateway.compiled_tokenizer.encoder import Encoded, FastEncoder, Frame, Side
from ivy_gateway.jobs import EncodedInput
from ivy_gateway.special_tokens import Piece, Template
from ivy_gateway.templates import Prompt, Text
from ivy_gateway.truncation import Cut, PairLimits, fit_query


def can_frame(prompts: Sequence[Prompt]) -> bool:
    """Whether all that is to be encoded, the second text of a pair, is text and pooled whole."""
    encoded = (p.text if p.second is None else p.second for p in prompts)
    return all(isinstance(text, str) for text in encoded) and not any(p.unpooled for p in prompts)


def encode_texts(
    encoder: FastEncoder, texts: list[str], prompts: Sequence[Prompt], template: Template, cut: Cut
) -> list[EncodedInput]:
    """As `truncation.fit_text` on the ids of each of `texts`. Raises `NotUnicode`."""
    frame = Frame(
        _side(template.pieces[0]),
        _side(template.pieces[1]),
        template.text_segments[0],
        max(0, cut.limit - template.num_special) if cut.enabled else None,
        cut.side == "left",
    )
    encoded = encoder.encode(texts, [frame], with_segments=template.has_segments)
    return _inputs(encoded, prompts, itertools.repeat(False, len(texts)))


def encode_documents(
    encoder: FastEncoder,
    texts: list[str],
    prompts: Sequence[Prompt],
    queries: Mapping[Text, list[int]],
    template: Template,
    cut: Cut,
    limits: PairLimits,
    field: str,
) -> list[EncodedInput]:
    """As `truncation.fit_pair` on the ids of each of `texts`, the second ones of the pairs `prompts`.

    `queries` has the ids of the first ones. Raises `TooLong` as `fit_pair`, and `NotUnicode`.
    """
    numbers: dict[Text, int] = {}
    frames: list[Frame] = []
    cut_queries: list[bool] = []
    for p in prompts:
        if p.text not in numbers:
            numbers[p.text] = len(frames)
            first = queries[p.text]
            query, room = fit_query(p.index, first, template, cut, limits, field)
            frames.append(_document_frame(query, room, template, cut, limits))
            cut_queries.append(len(query) < len(first))
    frame_of = [numbers[p.text] for p in prompts]
    encoded = encoder.encode(texts, frames, frame_of, with_segments=template.has_segments)
    return _inputs(encoded, prompts, [cut_queries[number] for number in frame_of])


def _document_frame(query: list[int], room: int, template: Template, cut: Cut, limits: PairLimits) -> Frame:
    before, between, after = template.pieces
    own_segment, text_segment = template.text_segments
    prefix = Side(
        (*before.ids, *query, *between.ids),
        (*before.segments, *(own_segment for _ in query), *between.segments),
    )
    room = min(room, limits.second) if cut.enabled else limits.second
    return Frame(prefix, _side(after), text_segment, room, cut.side == "left")


def _side(piece: Piece) -> Side:
    return Side(piece.ids, piece.segments)


def _inputs(
    encoded: Encoded, prompts: Sequence[Prompt], cut_before: Sequence[bool] | itertools.repeat[bool]
) -> list[EncodedInput]:
    ids, segments = encoded.ids, encoded.segments
    bounds = itertools.pairwise(encoded.cu_seqlens.tolist())
    return [
        EncodedInput(p.index, ids[a:b], None if segments is None else segments[a:b], cut or before)
        for p, (a, b), cut, before in zip(prompts, bounds, encoded.cut.tolist(), cut_before, strict=True)
    ]
