"""Request bodies: read within the limit, parsed as JSON, their fields checked by name.

Works on the raw bytes: no model validation stands between a request and its handler. Knows no dialect.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn, TypeAlias

import orjson
from fastapi import Request

from ivy_gateway import metrics, request_context
from ivy_gateway.errors import (
    BodyTooLarge,
    InvalidField,
    InvalidHeader,
    InvalidValue,
    MalformedJson,
    UnsupportedMediaType,
)
from ivy_gateway.jobs import Lane
from ivy_gateway.request_context import RequestContext
from ivy_gateway.routes.render import ClientGone
from protos.stamps import stamp

logger = logging.getLogger(__name__)

LANE_HEADER = "x-bouquet-lane"

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

_KIND_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class Fields:
    """The fields of a JSON object. `null` counts as absent; unknown fields are never looked at.

    Every reader raises `InvalidField` for a wrong type and `InvalidValue` for an impossible value, naming
    the field. A boolean is not an integer, and 64.0 is not 64.
    """

    def __init__(self, values: dict[str, JsonValue]) -> None:
        self._values = values

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def get(self, name: str) -> JsonValue:
        """The bare value, or `None`."""
        return self._values.get(name)

    def require(self, name: str) -> JsonValue:
        """The bare value of a field that must be there."""
        value = self._values.get(name)
        if value is None:
            raise InvalidField(f"`{name}` is required", name)
        return value

    def boolean(self, name: str) -> bool | None:
        """`true`, `false` or absent."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            refuse(name, "a boolean", value)
        return value

    def text(self, name: str) -> str | None:
        """A string or absent."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            refuse(name, "a string", value)
        return value

    def integer(self, name: str, minimum: int, maximum: int = 2**31 - 1) -> int | None:
        """An integer of `minimum` .. `maximum`, or absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            refuse(name, "an integer", value)
        if not minimum <= value <= maximum:
            raise InvalidValue(f"`{name}` must be {minimum} to {maximum}, got {value}", name)
        return value

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        """One of `allowed`, or absent; any other value, of whatever type, is told what is allowed."""
        value = self._values.get(name)
        if value is None or (isinstance(value, str) and value in allowed):
            return value
        raise InvalidValue(f"`{name}` must be one of {', '.join(allowed)}; got {_shown(value)}", name)

    def choices(self, name: str, allowed: Sequence[str]) -> tuple[str, ...] | None:
        """Different ones of `allowed`: a list of them, or a lone one; or absent."""
        value = self._values.get(name)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        chosen = [item for item in items if isinstance(item, str) and item in allowed]
        if items and len(chosen) == len(items):
            return tuple(dict.fromkeys(chosen))
        wrong = next((_shown(item) for item in items if item not in chosen), "an empty list")
        raise InvalidValue(f"`{name}` must be one or a list of {', '.join(allowed)}; got {wrong}", name)

    def object(self, name: str) -> Fields:
        """The fields of an object; none when it is absent."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            refuse(name, "an object", value)
        return Fields(value or {})

    def over(self, defaults: Fields) -> Fields:
        """These fields, and those of `defaults` that are absent here."""
        own = {name: self._values[name] for name in self if name in self}
        return Fields(defaults._values | own)

    def one_of(self, *names: str) -> str | None:
        """The first of `names` that is there: for fields with several spellings."""
        for name in names:
            if name in self:
                return name
        return None


def _shown(value: JsonValue) -> str:
    return repr(value) if isinstance(value, str) and len(value) <= 40 else kind_of(value)


def refuse(name: str, wanted: str, value: JsonValue) -> NoReturn:
    """Raise the `InvalidField` for a value of the wrong type."""
    raise InvalidField(f"`{name}` must be {wanted}, got {kind_of(value)}", name)


def kind_of(value: JsonValue) -> str:
    """What a JSON value is, in words; never the value itself, which may be anybody's text."""
    return "null" if value is None else _KIND_NAMES.get(type(value), "something else")


async def read_fields(request: Request, max_bytes: int, *, for_servers: bool = True) -> Fields:
    """The JSON object in the body; `for_servers`: that of a request which inference servers will answer.

    Raises `UnsupportedMediaType`, `InvalidHeader`, `BodyTooLarge`, `MalformedJson`, `InvalidField`,
    `ClientGone`, and, before the body is parsed, `Overloaded`.
    """
    _check_content_type(_header(request, b"content-type"))
    _read_lane(request_context.current())
    raw = await _read(request, max_bytes)
    stamp("gateway.body")
    if for_servers:
        _refuse_early(request, len(raw))
    began = time.perf_counter()
    fields = Fields(parse_object(raw))
    stamp("gateway.parsed")
    metrics.phase_ended("parse", time.perf_counter() - began)
    return fields


def _read_lane(context: RequestContext) -> None:
    if context.lane_header is None:
        return
    try:
        context.lane = Lane(context.lane_header.decode("latin-1").strip().lower())
    except ValueError:
        lanes = " or ".join(lane.value for lane in Lane)
        raise InvalidHeader(f"the header {LANE_HEADER} must be {lanes}") from None


def _refuse_early(request: Request, num_bytes: int) -> None:
    """Raise `Overloaded` where the request would be refused whatever the body says."""
    admission = request.app.state.pipeline.admission
    admission.check(admission.lane_of(request_context.current().lane, 0, admission.estimate(num_bytes, 0)))


def parse_object(raw: bytes) -> dict[str, JsonValue]:
    """Parse `raw` as one JSON object without duplicate keys."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _malformed(raw, error) from None
    if not isinstance(value, dict):
        raise InvalidField(f"the body must be a JSON object, got {kind_of(value)}")
    _check_duplicates(raw, value)
    return value


def _header(request: Request, wanted: bytes) -> str:
    """A header's value as it came first, empty where it did not come."""
    for name, value in request.scope["headers"]:
        if name == wanted:
            text: str = value.decode("latin-1")
            return text
    return ""


def _check_content_type(content_type: str) -> None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType(f"the content type must be application/json, got {kind[:80] or 'none'}")


async def _read(request: Request, max_bytes: int) -> bytes:
    """The whole body; an oversized one is cut, after as much again has been read and dropped.

    The drain lets ordinary clients, which send everything before they listen, see the answer.
    """
    size, parts, more = 0, [], True
    while more and size <= 2 * max_bytes:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size <= max_bytes:
            parts.append(part)
    if size > max_bytes:
        declared = _header(request, b"content-length")
        got = declared if declared.isdecimal() else f"at least {size}"
        logger.warning(
            "%s: refused a body of %s bytes: --max-body-bytes is %d", request.url.path, got, max_bytes
        )
        raise BodyTooLarge(f"the body may hold {max_bytes} bytes, got {got}")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _check_duplicates(raw: bytes, value: dict[str, JsonValue]) -> None:
    """Refuse a key that is given twice, of which the parser would silently keep the last.

    Texts rarely spell a quoted key, so counting is nearly always enough; only then is the body parsed again.
    """
    if any(raw.count(b'"%b"' % key.encode()) > 1 for key in value if key.isascii()):
        keys = [key for key, _ in _outer_pairs(raw)]
        for key in value:
            if keys.count(key) > 1:
                raise MalformedJson(f"`{key[:80]}` is given more than once", key[:80])


def _outer_pairs(raw: bytes) -> list[tuple[str, JsonValue]]:
    # The hook runs for inner objects first, so the last result is the outer one's.
    outer: list[list[tuple[str, JsonValue]]] = []
    try:
        json.loads(raw, object_pairs_hook=outer.append)
    except (ValueError, RecursionError):  # this parser's limits are narrower
        raise MalformedJson("the body is nested too deeply, or holds a number too long") from None
    return outer[-1]


def _malformed(raw: bytes, error: orjson.JSONDecodeError) -> MalformedJson:
    if not raw:
        return MalformedJson("the body is empty; a JSON object was expected")
    if "UTF-8" in str(error):
        return MalformedJson("the body is not JSON: it is not valid UTF-8")
    if "surrogate" in str(error):
        return _lone_surrogate(raw)
    return MalformedJson(f"the body is not JSON: {error}")


def _lone_surrogate(raw: bytes) -> MalformedJson:
    """Name the field that holds half a surrogate pair, which is no character."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return MalformedJson("the body holds half a surrogate pair (\\ud800 to \\udfff)")
    place = _place_of_surrogate(value, "")
    return MalformedJson(f"`{place}` holds half a surrogate pair (\\ud800 to \\udfff)", place)


def _place_of_surrogate(value: JsonValue, place: str) -> str | None:
    if isinstance(value, str):
        return place if any("\ud800" <= character <= "\udfff" for character in value) else None
    children: list[tuple[str, JsonValue]] = []
    if isinstance(value, dict):
        children = [(f"{place}.{key}" if place else key, child) for key, child in value.items()]
    elif isinstance(value, list):
        children = [(f"{place}[{i}]", child) for i, child in enumerate(value)]
    found = (_place_of_surrogate(child, at) for at, child in children)
    return next((at for at in found if at is not None), None)
