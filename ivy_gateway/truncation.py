"""Fit token ids into the model's limit and its templates: ids are cut, special tokens never.

Works on ids that a tokenizer, or the client itself, made; knows nothing of texts, threads or routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ivy_gateway.errors import EmptyInput, TooLong
from ivy_gateway.jobs import EncodedInput, Int32Array, TokenIds
from ivy_gateway.special_tokens import Template

_MAX_NAMED = 8  # inputs that one message names


@dataclass(frozen=True, slots=True)
class Cut:
    """The limit of one call, in tokens with special tokens, and what happens to inputs over it."""

    enabled: bool
    limit: int
    side: str  # the side that is cut: "right" or "left"

    def to(self, room: int, ids: list[int]) -> list[int]:
        """At most `room` of `ids`; all of them when cutting is off."""
        if not self.enabled or len(ids) <= room:
            return ids
        return ids[:room] if self.side == "right" else ids[len(ids) - room :]


@dataclass(frozen=True, slots=True)
class PairLimits:
    """The most tokens of each text of a pair, special tokens left out; they hold where cutting is off too."""

    first: int
    second: int


def join(template: Template, *texts: list[int]) -> TokenIds:
    """One sequence of `texts` in `template`, with segment ids where these tell anything."""
    segments = np.array(template.segments(*texts), np.int32) if template.has_segments else None
    return TokenIds(np.array(template.join(*texts), np.int32), segments)


def fit_text(index: int, ids: list[int], template: Template, cut: Cut, num_unpooled: int = 0) -> EncodedInput:
    """One text without special tokens, cut to what the template leaves of the limit.

    `num_unpooled` tokens of the uncut sequence, from its start, are left out of the pool.
    """
    kept = cut.to(cut.limit - template.num_special, ids)
    sequence = join(template, kept)
    truncated = len(kept) < len(ids)
    if not num_unpooled:
        return EncodedInput(index, sequence.token_ids, sequence.segment_ids, truncated)
    lost = len(ids) - len(kept) if cut.side == "left" else 0  # of what stood in front
    start = max(len(template.pieces[0].ids), num_unpooled - lost)
    spans = np.array([[start, len(sequence.token_ids)]], np.int32)
    return EncodedInput(index, sequence.token_ids, sequence.segment_ids, truncated, spans)


def fit_document(index: int, chunks: Sequence[list[int]], template: Template, separator: int) -> EncodedInput:
    """A document of `chunks` without special tokens, uncut: `separator` between, a span for each of them."""
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for chunk in chunks:
        if spans:
            ids.append(separator)
        spans.append((len(ids), len(ids) + len(chunk)))
        ids += chunk
    sequence = join(template, ids)
    offset = len(template.pieces[0].ids)
    return EncodedInput(
        index, sequence.token_ids, sequence.segment_ids, False, np.array(spans, np.int32) + np.int32(offset)
    )


def fit_pair(
    index: int,
    first: list[int],
    second: list[int],
    template: Template,
    cut: Cut,
    limits: PairLimits,
    field: str,
) -> EncodedInput:
    """Two texts without special tokens: each cut to its own limit, the second then to what is left.

    Raises `TooLong`, naming `field`, when nothing is left and cutting is on.
    """
    query, room = fit_query(index, first, template, cut, limits, field)
    document = cut.to(room, Cut(True, limits.second, cut.side).to(limits.second, second))
    sequence = join(template, query, document)
    truncated = len(query) < len(first) or len(document) < len(second)
    return EncodedInput(index, sequence.token_ids, sequence.segment_ids, truncated)


def fit_query(
    index: int, first: list[int], template: Template, cut: Cut, limits: PairLimits, field: str
) -> tuple[list[int], int]:
    """The first text of a pair, cut to its own limit, and the tokens it leaves to the second.

    Raises `TooLong`, naming `field`, when nothing is left and cutting is on.
    """
    query = _limited(first, Cut(True, limits.first, cut.side), template)
    room = cut.limit - template.num_special - len(query)
    if cut.enabled and room < 1:
        raise TooLong(
            f"`{field}` of pair {index} has {len(query)} tokens: with {template.num_special} special tokens"
            f" it leaves no room for the second text within {cut.limit} tokens",
            field,
        )
    return query, room


def _limited(first: list[int], cut: Cut, template: Template) -> list[int]:
    """The first text of a pair within its own limit; a cut on the right gives it its end back."""
    kept = cut.to(cut.limit, first)
    return [*kept, *template.first_end] if len(kept) < len(first) and cut.side == "right" else kept


def fit_ready(index: int, ready: TokenIds, template: Template, cut: Cut) -> EncodedInput:
    """A sequence that the client joined: verbatim, or cut so that special tokens at its far end survive."""
    num_tokens = len(ready.token_ids)
    if not cut.enabled or num_tokens <= cut.limit:
        return EncodedInput(index, ready.token_ids, ready.segment_ids, truncated=False)
    if cut.side == "right":
        tail = _num_matching(ready.token_ids[::-1], template.pieces[-1].ids[::-1])
        head = cut.limit - tail
    else:
        head = _num_matching(ready.token_ids, template.pieces[0].ids)
        tail = cut.limit - head
    kept = np.r_[0:head, num_tokens - tail : num_tokens]
    segments = None if ready.segment_ids is None else ready.segment_ids[kept]
    return EncodedInput(index, ready.token_ids[kept], segments, truncated=True)


def checked_lengths(inputs: list[EncodedInput], cut: Cut, field: str) -> list[EncodedInput]:
    """`inputs`, none empty, none over the limit. Raises `EmptyInput` or `TooLong` naming those that are."""
    empty = [item.index for item in inputs if item.num_tokens == 0]
    if empty:
        raise EmptyInput(f"{_named(field, empty)}: no token to compute on", f"{field}[{empty[0]}]")
    if any(item.spans is not None for item in inputs):
        _check_spans(inputs, field)
    over = [item for item in inputs if item.num_tokens > cut.limit]
    if over:
        param = f"{field}[{over[0].index}]"
        also = f"; also over: {_named(field, [item.index for item in over[1:]])}" if len(over) > 1 else ""
        raise TooLong(
            f"`{param}` has {over[0].num_tokens} tokens, special tokens included; at most {cut.limit} are"
            f" allowed, and truncation is off{also}",
            param,
        )
    return inputs


def _check_spans(inputs: list[EncodedInput], field: str) -> None:
    """Raise `EmptyInput`, naming the first of `inputs`, or of its chunks, that has no token to be pooled."""
    for item in inputs:
        spans = [] if item.spans is None else item.spans.tolist()
        for number, (start, end) in enumerate(spans):
            if start >= end:
                param = f"{field}[{item.index}][{number}]" if len(spans) > 1 else f"{field}[{item.index}]"
                raise EmptyInput(f"`{param}`: no token of its own to compute on", param)


def _num_matching(ids: Int32Array, special: tuple[int, ...]) -> int:
    """All of `special` if `ids` starts with them, else none."""
    return len(special) if tuple(ids[: len(special)].tolist()) == special else 0


def _named(field: str, indexes: Sequence[int]) -> str:
    shown = ", ".join(f"`{field}[{index}]`" for index in indexes[:_MAX_NAMED])
    return shown if len(indexes) <= _MAX_NAMED else f"{shown} and {len(indexes) - _MAX_NAMED} more"
