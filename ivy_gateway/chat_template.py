"""A model's chat template: from a conversation to the text that the model was trained to see.

The template is the model folder's own file and runs in a sandbox; what users say is its data. What users say
is never a control token either (policy of literal text): its spellings are split by a mark while the template
runs, so that afterwards only the template's own are found. Knows nothing of tokenizers or limits.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ivy_gateway.errors import InvalidValue, StartupError, UnsupportedTask
from ivy_gateway.jobs import Conversation, Message

# Variables that a request may not set: what the conversation itself, and the server, fill in.
RESERVED = ("messages", "add_generation_prompt", "continue_final_message", "tools", "documents")
_FIRST_MARK, _LAST_MARK = 0x100000, 0x10FFFD  # the last plane for private use: no text means anything by it


@dataclass(frozen=True, slots=True)
class ControlToken:
    """One of the template's own: the id, and its spelling's length in characters."""

    id: int
    length: int


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as texts and control tokens, in order.

    `head` and `tail` are how many characters the template puts before the first and behind the last message's
    own words, control tokens included: what a cut must leave.
    """

    pieces: tuple[str | ControlToken, ...]
    head: int
    tail: int


class ChatTemplate:
    """One template. `control` are spellings and ids of the tokenizer's added tokens.

    `literal`: users spell none of them. `source` is in Jinja's language; `variables` name special tokens.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str], control: Mapping[str, int], *, literal: bool
    ) -> None:
        self._source = source
        self._variables = variables
        self._control = control
        self._literal = literal
        # What the end, or the start, of a text could complete a control token from.
        self._starts = {word[:n] for word in control for n in range(1, len(word))}
        self._ends = {word[n:] for word in control for n in range(1, len(word))}
        self._longest = max(map(len, control), default=0)

    @classmethod
    def load(cls, folder: Path, control: Mapping[str, int], *, literal: bool) -> ChatTemplate | None:
        """Read the folder's `chat_template.jinja`, else the one in `tokenizer_config.json`; `None`: neither.

        Raises `StartupError` for a file that cannot be read. A broken template shows when it is first used.
        """
        settings = _read_settings(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        source = (
            file.read_text(encoding="utf-8") if file.is_file() else _default(settings.get("chat_template"))
        )
        if source is None:
            return None
        return cls(source, _special_tokens(settings), control, literal=literal)

    def render(self, chat: Conversation) -> RenderedChat:
        """Run the template.

        Raises `InvalidValue` for a conversation that the template refuses, and `UnsupportedTask` for a
        template that cannot be run.
        """
        mark = _unused(chat)
        guarded = [replace(m, content=self._guard(m.content, mark)) for m in chat.messages]
        text, tag = self._run(chat, guarded, mark), mark + " "
        head, tail = self._frame(chat, mark)
        if chat.continue_final_message:
            last = guarded[-1]
            open_ended = [*guarded[:-1], replace(last, content=last.content + tag)]
            text, tail = _until(self._run(chat, open_ended, mark), tag), ""
        pieces = tuple(self._split(text, mark))
        own = text.replace(mark, "")
        return RenderedChat(
            pieces,
            len(head) if own.startswith(head) else 0,
            len(tail) if own.endswith(tail) and len(head) + len(tail) <= len(own) else 0,
        )

    def _frame(self, chat: Conversation, mark: str) -> tuple[str, str]:
        """What stands before the first and behind the last message's words, whatever these are."""
        text = self._run(chat, [replace(message, content=mark) for message in chat.messages], mark)
        if mark not in text:
            return "", ""
        return text[: text.index(mark)], text[text.rindex(mark) + 1 :]

    def _run(self, chat: Conversation, messages: Iterable[Message], mark: str) -> str:
        own = {
            name: self._guard(value, mark) if isinstance(value, str) else value
            for name, value in chat.template_arguments.items()
        }
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        variables = {**self._variables, **own, "messages": conversation, "tools": None, "documents": None}
        try:
            return self._template.render(variables, add_generation_prompt=chat.add_generation_prompt)
        except jinja2.TemplateSyntaxError as error:
            raise UnsupportedTask(f"the model's chat template cannot be run: {error}") from None
        except _Refused as error:
            raise InvalidValue(
                f"`messages`: the model's chat template refuses them: {error}", "messages"
            ) from None
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InvalidValue(
                f"`messages`: the model's chat template fails on them: {str(error)[:200]}", "messages"
            ) from None

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        return environment.from_string(self._source)

    def _guard(self, text: str, mark: str) -> str:
        """`text` with a mark in every control token that it spells, or that its edges could complete."""
        if not self._literal:
            return text
        lengths = range(1, min(self._longest, len(text) + 1))
        within = bool(text) and any(text in word for word in self._control)
        before = mark * (within or any(text[:n] in self._ends for n in lengths))
        behind = mark * any(text[-n:] in self._starts for n in lengths)
        if spelled := self._spelled_in(text):
            text = re.sub(f"(?=(?:{spelled}))(.)", rf"\1{mark}", text, flags=re.DOTALL)
        return before + text + behind

    def _spelled_in(self, text: str) -> str:
        """The control tokens in `text` as alternatives, the longer first: there may be thousands in all."""
        words = sorted((word for word in self._control if word in text), key=len, reverse=True)
        return "|".join(map(re.escape, words))

    def _split(self, text: str, mark: str) -> Iterator[str | ControlToken]:
        spelled = self._spelled_in(text)
        for i, part in enumerate(re.split(f"({spelled})", text) if spelled else [text]):
            if i % 2:
                yield ControlToken(self._control[part], len(part))
            elif plain := part.replace(mark, ""):
                yield plain


class _Refused(jinja2.TemplateError):
    """What a template raises by its own will."""


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _to_json(value: object, indent: int | None = None) -> str:
    """Jinja's own filter would write `<` as an escape, for web pages."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _until(text: str, tag: str) -> str:
    """What stands before `tag`, without the white space that the template would have taken off the end."""
    before, found, behind = text.rpartition(tag[0])
    if not found:
        raise InvalidValue("`continue_final_message`: the template leaves the last message out", "messages")
    return before if behind.startswith(tag[1:]) else before.rstrip()


def _unused(chat: Conversation) -> str:
    """A character that nobody says."""
    said = {character for message in chat.messages for character in message.content}
    said.update(*(value for value in chat.template_arguments.values() if isinstance(value, str)))
    return next(chr(code) for code in range(_FIRST_MARK, _LAST_MARK) if chr(code) not in said)


def _read_settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_bytes())
    except ValueError as error:
        raise StartupError(f"{file} cannot be read: {error}") from error
    return settings if isinstance(settings, dict) else {}


def _default(templates: object) -> str | None:
    """The template of a file that holds one, or several by name."""
    if isinstance(templates, list):
        named = {item.get("name"): item.get("template") for item in templates if isinstance(item, dict)}
        templates = named.get("default")
    return templates if isinstance(templates, str) else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Spellings under the names that templates know them by, such as `bos_token`."""
    spellings = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token")
    }
    return {name: value for name, value in spellings.items() if isinstance(value, str)}
