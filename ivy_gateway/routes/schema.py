"""JSON Schema in few words, for what routes say they take and answer; and the pieces that several share.

Requests leave unknown fields open (they are ignored, policy P8); replies are closed: what is not here is not
sent. Only documentation and its tests read these: bodies are read by each route itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]


def _described(schema: Schema, says: str) -> Schema:
    return schema | ({"description": says} if says else {})


def string(says: str = "", **more: object) -> Schema:
    """A string."""
    return _described({"type": "string", **more}, says)


def boolean(says: str = "") -> Schema:
    """A boolean."""
    return _described({"type": "boolean"}, says)


def integer(says: str = "", **more: object) -> Schema:
    """An integer; `minimum` and `maximum` are JSON Schema's."""
    return _described({"type": "integer", **more}, says)


def number(says: str = "") -> Schema:
    """A number."""
    return _described({"type": "number"}, says)


def choice(says: str, *values: str) -> Schema:
    """One of these strings."""
    return _described({"type": "string", "enum": list(values)}, says)


def array(items: Schema, says: str = "", **more: object) -> Schema:
    """A list; `minItems` and `maxItems` are JSON Schema's."""
    return _described({"type": "array", "items": items, **more}, says)


def either(*schemas: Schema, says: str = "") -> Schema:
    """Any of these."""
    return _described({"anyOf": list(schemas)}, says)


def nullable(schema: Schema) -> Schema:
    """This, or null."""
    if "anyOf" in schema:
        return schema | {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    values = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return schema | {"type": [schema["type"], "null"]} | values


def record(
    properties: Mapping[str, Schema], *, optional: Mapping[str, Schema] | None = None, says: str = ""
) -> Schema:
    """An object of a reply: all `properties`, perhaps the `optional` ones, and no others."""
    shape = {
        "type": "object",
        "properties": {**properties, **(optional or {})},
        "required": list(properties),
        "additionalProperties": False,
    }
    return _described(shape, says)


def mapping(values: Schema, says: str = "") -> Schema:
    """An object with keys of any name."""
    return _described({"type": "object", "additionalProperties": values}, says)


def body(properties: Mapping[str, Schema], *alternatives: tuple[str, ...], says: str = "") -> Schema:
    """An object of a request, open to further fields: at least one of `alternatives` is wholly there.

    Null means absent, so that all but what must be there may be null.
    """
    needed = set(alternatives[0]) if len(alternatives) == 1 else set()
    shape: Schema = {
        "type": "object",
        "properties": {n: p if n in needed else nullable(p) for n, p in properties.items()},
    }
    if needed:
        shape["required"] = list(alternatives[0])
    elif alternatives:
        shape["anyOf"] = [{"required": list(names)} for names in alternatives]
    return _described(shape, says)


# What requests share.

TOKEN_IDS = array(integer(minimum=0, maximum=2**31 - 1), minItems=1)
TEXT = string(minLength=1)
TEXT_OBJECT = body({"text": TEXT}, ("text",))
TEXT_PART = body({"type": choice("", "text"), "text": string()}, ("type", "text"))
MODEL = string("absent, or a served name")
MESSAGES = array(
    body(
        {"role": choice("", "system", "user", "assistant"), "content": either(string(), array(TEXT_PART))},
        ("role", "content"),
    ),
    "instead: a conversation, of which the model's own chat template makes one input; texts only",
    minItems=1,
)
CHAT_FIELDS: dict[str, Schema] = {
    "messages": MESSAGES,
    "add_generation_prompt": boolean("with messages: open an answer at the end"),
    "continue_final_message": boolean("with messages: leave the last one open"),
    "chat_template_kwargs": mapping(
        {"type": ["string", "number", "boolean", "null"]}, "with messages: variables of the template"
    ),
    "chat_template": string("not supported: the template is the server's own"),
}
TRUNCATION_FIELDS: dict[str, Schema] = {
    "truncate": boolean("cut inputs over the model's limit; default: the server's setting"),
    "truncate_prompt_tokens": integer(
        "cut inputs to this many tokens, special tokens included; -1: the model's limit; 0 is refused",
        minimum=-1,
    ),
}
SIDES = ("right", "left", "Right", "Left")
TRUNCATION_SIDE = choice("the side that is cut: right (default) or left", *SIDES)
PROMPT_NAME = string("one of the model's prompts, to put in front")
DIMENSIONS = integer("shorten vectors, where the model allows it", minimum=1)

# What replies share.

VECTOR = array(number())
COUNT = integer(minimum=0)
USAGE = record({"prompt_tokens": COUNT, "total_tokens": COUNT})
ENCODED = either(VECTOR, string("base64"))


def listing(item: Schema) -> Schema:
    """The envelope of OpenAI's and vLLM's lists."""
    return record(
        {
            "id": string(),
            "object": choice("", "list"),
            "created": integer(),
            "model": string(),
            "data": array(item),
            "usage": USAGE,
        }
    )


def indexed(kind: str, values: Mapping[str, Schema]) -> Schema:
    """One item of such a list."""
    return record({"object": choice("", kind), "index": COUNT, **values})


_PROBLEM = {
    "error_type": string("the kind of error, in TEI's words"),
    "message": string("what is wrong, naming the field"),
    "type": string("as error_type"),
    "code": integer("the status"),
}
_NESTED = record(
    {
        "message": string(),
        "type": string("the kind of error, in OpenAI's words"),
        "param": nullable(string("the field at fault")),
        "code": nullable(string()),
    }
)
T_PROBLEM = record({"error": string("as message"), **_PROBLEM})
O_PROBLEM = record({"error": _NESTED, "detail": string("as message"), **_PROBLEM})
