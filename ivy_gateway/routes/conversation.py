"""vLLM's chat form of an input: `messages`, and how the model's template is to be filled in. Texts only."""

from __future__ import annotations

from ivy_gateway.chat_template import RESERVED
from ivy_gateway.errors import EmptyInput, InvalidField, InvalidValue
from ivy_gateway.jobs import Conversation, Message
from ivy_gateway.routes.body import Fields, JsonValue, refuse
from ivy_gateway.routes.pairs import read_parts

FIELD = "messages"
ROLES = ("system", "user", "assistant")
_SETTINGS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


def read_conversation(fields: Fields, input_field: str) -> Conversation | None:
    """The conversation of a body; `None` where it has `input_field` instead.

    Raises `InvalidValue` for both, for settings of a template without messages, for `chat_template` (it is
    the server's own) and for parts that are no text; `EmptyInput` where nobody says anything.
    """
    if FIELD not in fields:
        _refuse_settings(fields)
        return None
    if input_field in fields:
        raise InvalidValue(f"give either `{input_field}` or `{FIELD}`, not both", FIELD)
    if "chat_template" in fields:
        raise InvalidValue("`chat_template`: the template is the server's own", "chat_template")
    chat = Conversation(
        messages=_read_messages(fields.get(FIELD)),
        add_generation_prompt=fields.boolean("add_generation_prompt") is True,
        continue_final_message=fields.boolean("continue_final_message") is True,
        add_special_tokens=fields.boolean("add_special_tokens") is True,
        template_arguments=_read_arguments(fields.object("chat_template_kwargs")),
    )
    if chat.add_generation_prompt and chat.continue_final_message:
        raise InvalidValue(
            "`add_generation_prompt` begins a message and `continue_final_message` leaves one open: give one",
            "continue_final_message",
        )
    return chat


def _refuse_settings(fields: Fields) -> None:
    given = next((name for name in _SETTINGS if fields.get(name)), None)
    if given is not None:
        raise InvalidValue(f"`{given}` goes with `{FIELD}`", given)


def _read_messages(value: JsonValue) -> tuple[Message, ...]:
    if not isinstance(value, list):
        refuse(FIELD, "a list of messages", value)
    messages = tuple(_read_message(item, f"{FIELD}[{i}]") for i, item in enumerate(value))
    if not any(message.content for message in messages):
        raise EmptyInput(f"`{FIELD}` cannot be empty", FIELD)
    return messages


def _read_message(item: JsonValue, place: str) -> Message:
    if not isinstance(item, dict):
        refuse(place, "an object with `role` and `content`", item)
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise InvalidValue(f"`{place}.role` must be one of {', '.join(ROLES)}", f"{place}.role")
    if isinstance(content, list):
        content = read_parts(content, f"{place}.content")
    if not isinstance(content, str):
        refuse(f"{place}.content", "a string or a list of text parts", content)
    return Message(str(role), content)


def _read_arguments(settings: Fields) -> dict[str, str | int | float | bool]:
    arguments: dict[str, str | int | float | bool] = {}
    for name in settings:
        value = settings.get(name)
        if name in RESERVED:
            raise InvalidValue(f"`chat_template_kwargs` cannot set {name!r}", "chat_template_kwargs")
        if isinstance(value, (list, dict)):
            place = f"chat_template_kwargs.{name[:80]}"
            raise InvalidField(f"`{place}` must be a string, a number or a boolean", place)
        if value is not None:
            arguments[name] = value
    return arguments
