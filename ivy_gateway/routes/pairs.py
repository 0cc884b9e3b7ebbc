"""What the routes that score pairs share: queries, documents in every spelling, instruction, raw scores."""

from __future__ import annotations

from collections.abc import Sequence

from ivy_gateway.errors import EmptyInput, InvalidField, InvalidValue
from ivy_gateway.routes.body import Fields, JsonValue, kind_of, refuse
from ivy_gateway.routes.inputs import check_batch_size
from ivy_gateway.routes.schema import Schema, body, boolean, integer, string

INSTRUCTION_FIELDS: dict[str, Schema] = {
    "instruction": string("what a language model is told to look for; default: the server's"),
    "chat_template_kwargs": body({"instruction": string()}, says="the same: an object with `instruction`"),
    "chat_template": string("not supported: the template is the server's own"),
}
LOGIT_FIELDS: dict[str, Schema] = {
    "raw_scores": boolean("true: logits"),
    "use_activation": boolean("false: logits too"),
}
LIMIT_FIELDS: dict[str, Schema] = {
    "max_tokens_per_query": integer("cut queries to this many tokens; 0 = off", minimum=0),
    "max_tokens_per_doc": integer("cut documents to this many tokens; 0 = off", minimum=0),
}


def read_query(fields: Fields) -> str:
    """The one `query` of a body. Raises `EmptyInput` for a blank one (policy P1)."""
    query = _read_document(fields.require("query"), "query", ())
    refuse_blank([query], "query")
    return query


def refuse_blank(queries: Sequence[str], name: str) -> None:
    """Raise `EmptyInput`, naming every query that holds nothing but white space."""
    blank = [i for i, query in enumerate(queries) if not query.strip()]
    if blank:
        places = ", ".join(f"{name}[{i}]" for i in blank)
        raise EmptyInput(f"`{name}` cannot be blank: {places if len(queries) > 1 else name}", name)


def read_documents(fields: Fields, name: str, limit: int) -> tuple[str, ...]:
    """Documents to rank, which may be blank: one or a list of texts, `{"text": ...}` or lists of text parts.

    `rank_fields` names the fields of objects that are read, in that order, in place of `text` (Cohere's v1).
    """
    rank_fields = _read_rank_fields(fields)
    value = fields.require(name)
    if not isinstance(value, list):
        return (_read_document(value, name, rank_fields),)
    if not value:
        raise EmptyInput(f"`{name}` cannot be empty", name)
    check_batch_size(len(value), limit)
    return tuple(_read_document(item, f"{name}[{i}]", rank_fields) for i, item in enumerate(value))


def read_parts(parts: list[JsonValue], place: str) -> str:
    """The texts of vLLM's content parts, a line each. Raises `InvalidValue` for parts that are no text."""
    texts = []
    for i, part in enumerate(parts):
        if not isinstance(part, dict):
            refuse(f"{place}[{i}]", "an object", part)
        if part.get("type") != "text":
            raise InvalidValue(
                f"`{place}[{i}].type` must be text: only texts are served", f"{place}[{i}].type"
            )
        texts.append(_read_member(part, "text", f"{place}[{i}]"))
    return "\n".join(texts)


def read_instruction(fields: Fields) -> str | None:
    """What a language model is told to look for, in either spelling.

    Raises `InvalidValue` for two that differ, and for other settings of a chat template: it is the server's.
    """
    if "chat_template" in fields:
        raise InvalidValue("`chat_template`: the template is the server's own", "chat_template")
    settings = fields.object("chat_template_kwargs")
    unknown = [name for name in settings if name != "instruction" and name in settings]
    if unknown:
        raise InvalidValue(
            f"`chat_template_kwargs` takes an instruction only, got {unknown[0][:80]!r}",
            "chat_template_kwargs",
        )
    given = {text for text in (fields.text("instruction"), settings.text("instruction")) if text}
    if len(given) > 1:
        raise InvalidValue("`instruction` and `chat_template_kwargs.instruction` differ", "instruction")
    return given.pop() if given else None


def wants_logits(fields: Fields) -> bool:
    """Whether scores are shown as the model's raw logits."""
    raw, activated = fields.boolean("raw_scores"), fields.boolean("use_activation")
    return raw is True or activated is False


def _read_rank_fields(fields: Fields) -> tuple[str, ...]:
    names = fields.get("rank_fields") or ()
    if not isinstance(names, (list, tuple)):
        refuse("rank_fields", "a list of strings", names)
    for i, name in enumerate(names):
        if not isinstance(name, str):
            refuse(f"rank_fields[{i}]", "a string", name)
    return tuple(str(name) for name in names)


def _read_document(item: JsonValue, place: str, rank_fields: Sequence[str]) -> str:
    if isinstance(item, str):
        return item
    if not isinstance(item, dict):
        refuse(place, "a string or an object with `text`", item)
    if rank_fields:
        return "\n".join(_read_member(item, name, place) for name in rank_fields)
    content = item.get("content")
    if "text" not in item and isinstance(content, list):
        return read_parts(content, f"{place}.content")
    return _read_member(item, "text", place)


def _read_member(item: dict[str, JsonValue], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        shown = f"{place}.{name[:80]}"
        raise InvalidField(f"`{shown}` must be a string, got {kind_of(value)}", shown)
    return value
