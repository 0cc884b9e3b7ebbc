"""Inputs as clients spell them: one string, lists of strings, token ids flat or nested, `{"text": ...}`.

Every refusal names the field and the first bad position, or every empty one.
"""

from __future__ import annotations

import struct
from typing import cast

import numpy as np

from ivy_gateway.errors import EmptyInput, InvalidField, InvalidValue, TooManyInputs
from ivy_gateway.jobs import Int32Array, TokenIds, Truncation
from ivy_gateway.model_profile import ModelProfile
from ivy_gateway.routes.body import Fields, JsonValue, kind_of, refuse

# Cohere's and Jina's words for the two sides of a search, and what models call their prompts for these.
_QUERY, _DOCUMENT = ("query",), ("document", "passage", "corpus")
_SIDES = {
    "search_query": _QUERY,
    "retrieval.query": _QUERY,
    "search_document": _DOCUMENT,
    "retrieval.passage": _DOCUMENT,
    "document": _DOCUMENT,
    "passage": _DOCUMENT,
}
LARGEST_ID = 2**31 - 1  # ids travel as int32; the vocabulary's own bound is the tokenizer's to check


def read_inputs(
    value: JsonValue, field: str, limit: int, *, objects: bool = False
) -> tuple[str | TokenIds, ...]:
    """Inputs to embed: a string, a list of ids, or a list whose items are each one of these.

    `objects` allows items `{"text": string}`. Raises `EmptyInput` naming every empty index (policy P1).
    """
    if isinstance(value, str):
        return (_not_empty(value, field),)
    if not isinstance(value, list):
        refuse(field, "a string or a list", value)
    if not value:
        raise EmptyInput(f"`{field}` cannot be empty", field)
    if type(value[0]) is int:
        return (read_token_ids(value, field),)
    check_batch_size(len(value), limit)
    _refuse_empty_items(value, field)
    return tuple(_read_item(item, f"{field}[{i}]", objects=objects) for i, item in enumerate(value))


def read_texts(value: JsonValue, field: str, limit: int) -> tuple[str, ...]:
    """Texts of one side of pairs: a string, or a list of strings or `{"text": string}`; may be empty."""
    items = value if isinstance(value, list) else [value]
    if not items:
        raise EmptyInput(f"`{field}` cannot be empty", field)
    check_batch_size(len(items), limit)
    named = isinstance(value, list)
    return tuple(_read_text(item, f"{field}[{i}]" if named else field) for i, item in enumerate(items))


def read_nonempty_texts(value: JsonValue, field: str, limit: int) -> tuple[str, ...]:
    """As `read_texts`. Raises `EmptyInput` naming every empty index (policy P1)."""
    texts = read_texts(value, field, limit)
    if isinstance(value, list):
        _refuse_empty_items(list(texts), field)
        return texts
    return (_not_empty(texts[0], field),)


def read_token_ids(value: JsonValue, field: str, segment_ids: JsonValue = None) -> TokenIds:
    """One sequence of ids, optionally with segment ids of the same length."""
    ids = _read_ids(value, field)
    if segment_ids is None:
        return TokenIds(ids)
    segments = _read_ids(segment_ids, "token_type_ids")
    if len(segments) != len(ids):
        raise InvalidValue(
            f"`token_type_ids` has {len(segments)} ids where `{field}` has {len(ids)}", "token_type_ids"
        )
    return TokenIds(ids, segments)


def read_truncation(fields: Fields, side_field: str) -> Truncation:
    """Truncation as the request asks for it; `side_field` is the dialect's name for the side that is cut."""
    enabled = fields.boolean("truncate")
    max_tokens = fields.integer("truncate_prompt_tokens", minimum=-1)
    if max_tokens == 0:
        raise InvalidValue(
            "`truncate_prompt_tokens` must be -1 or above zero, got 0", "truncate_prompt_tokens"
        )
    if enabled is None and max_tokens is not None:
        enabled = True
    side = fields.choice(side_field, ("right", "left", "Right", "Left")) or "right"
    return Truncation(enabled, None if max_tokens == -1 else max_tokens, side.lower())


def read_prompt_name(fields: Fields, profile: ModelProfile, *hint_fields: str) -> str | None:
    """The prompt that `prompt_name` names, which must exist; else what a hint means for this model, if any.

    A hint is the name of one of the model's prompts, or of a side of a search in another vendor's words.
    """
    if named := fields.text("prompt_name"):
        return named
    for field in hint_fields:
        hint = fields.get(field)
        if isinstance(hint, str) and (prompt := _prompt_for(hint, profile)) is not None:
            return prompt
    return None


def side_prompts(profile: ModelProfile) -> tuple[str | None, str | None]:
    """Names of the prompts for a query and for a document; none where neither prompt says anything."""
    names = _prompt_for("search_query", profile), _prompt_for("search_document", profile)
    return names if any(name and profile.prompts[name] for name in names) else (None, None)


def _prompt_for(hint: str, profile: ModelProfile) -> str | None:
    """Of the names that a hint may go by, the first whose prompt says something, else the first there is."""
    known = [name for name in (hint, *_SIDES.get(hint, ())) if name in profile.prompts]
    return next((name for name in known if profile.prompts[name]), known[0] if known else None)


def check_batch_size(count: int, limit: int) -> None:
    """Raise `TooManyInputs`, in TEI's words."""
    if count > limit:
        raise TooManyInputs(f"batch size {count} > maximum allowed batch size {limit}")


def _not_empty(text: str, field: str) -> str:
    if not text:
        raise EmptyInput(f"`{field}` cannot be empty", field)
    return text


def _refuse_empty_items(items: list[JsonValue], field: str) -> None:
    empty = [i for i, item in enumerate(items) if item in ("", []) or item == {"text": ""}]
    if empty:
        places = ", ".join(f"{field}[{i}]" for i in empty)
        raise EmptyInput(f"`{field}` cannot hold empty items: {places}", f"{field}[{empty[0]}]")


def _read_item(item: JsonValue, place: str, *, objects: bool) -> str | TokenIds:
    if isinstance(item, list):
        return read_token_ids(item, place)
    if objects and isinstance(item, dict):
        return _read_text(item, place)
    if not isinstance(item, str):
        refuse(place, "a string or a list of token ids", item)
    return item


def _read_text(item: JsonValue, place: str) -> str:
    if isinstance(item, dict) and isinstance(item.get("text"), str):
        item = item["text"]
    if not isinstance(item, str):
        refuse(place, "a string", item)
    return item


def _read_ids(value: JsonValue, place: str) -> Int32Array:
    if not isinstance(value, list):
        refuse(place, "a list of token ids", value)
    if not value:
        raise EmptyInput(f"`{place}` cannot be empty", place)
    try:
        # Twice as fast as numpy's own conversion, and takes no number with a fraction.
        array = np.frombuffer(struct.pack(f"{len(value)}i", *value), np.int32)
    except struct.error:
        array = None
    if array is not None and array.min() > 1:  # at most 1 are the booleans that pass for integers
        return array
    ids = _integers(value, place)
    if array is None or array.min() < 0:
        at = next(i for i, token in enumerate(ids) if not 0 <= token <= LARGEST_ID)
        raise InvalidValue(f"`{place}[{at}]`: {ids[at]} is no token id", f"{place}[{at}]")
    return array


def _integers(values: list[JsonValue], place: str) -> list[int]:
    if set(map(type, values)) == {int}:  # not isinstance: a bool would pass
        return cast("list[int]", values)
    at = next(i for i, value in enumerate(values) if type(value) is not int)
    raise InvalidField(f"`{place}[{at}]` must be a token id, got {kind_of(values[at])}", f"{place}[{at}]")
