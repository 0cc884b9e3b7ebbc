"""A fact about a route: what is sent, and what must come back. Shapes are spelled as values with types.

A shape is a type, or `OneOf`; a list of one shape, for lists of any length but 0; a list of more, for exactly
these; a dict, whose keys are exactly these, but for those with a `?` behind them, which may be absent; or
any other value, which must be equal.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema

from tests.cases.client import Stack

ANY = object()


@dataclass(frozen=True)
class OneOf:
    """Any of these shapes."""

    shapes: tuple[Any, ...]


NULLABLE_INT = OneOf((int, None))
NULLABLE_STR = OneOf((str, None))


@dataclass(frozen=True)
class Fact:
    """One request and its answer. `to` is the stack's fixture; `headers` are shapes of texts."""

    name: str
    path: str
    send: Any
    shape: Any = ANY
    status: int = 200
    to: str = "embedder"
    method: str = "POST"
    headers: Mapping[str, Any] = field(default_factory=dict)
    message: str = ""
    more_keys: bool = False  # the outer object may hold further keys

    def check(self, stack: Stack) -> None:
        """Send, and compare all that is stated."""
        reply = self._answer(stack)
        assert reply.status_code == self.status, reply.text
        for name, wanted in self.headers.items():
            assert name in reply.headers, name
            assert wanted is ANY or isinstance(wanted, type) or reply.headers[name] == wanted, name
            assert wanted is not int or reply.headers[name].isdecimal(), name
        if self.message:
            assert self.message in reply.text
        if self.shape is not ANY:
            body = reply.json()
            if self.more_keys:
                body = {key: body[key] for key in body if key in _keys(self.shape)}
            problem = mismatch(body, self.shape, "body")
            assert problem is None, problem
        self._check_documented(stack, reply)

    def _check_documented(self, stack: Stack, reply: httpx.Response) -> None:
        """The reply is what the stack's own OpenAPI document says of the route, where it is in there."""
        document = _document_of(stack.base)
        if document.has(self.path, self.method.lower()):
            problem = document.problem(self.path, self.method.lower(), reply)
            assert problem is None, problem

    def _answer(self, stack: Stack) -> httpx.Response:
        stack.used = True
        if isinstance(self.send, bytes):
            return stack.post_raw(self.path, self.send)
        content = {} if self.send is None else {"json": self.send}
        return stack.http.request(self.method, self.path, **content)


def _keys(shape: Mapping[str, Any]) -> set[str]:
    return {key.rstrip("?") for key in shape}


def mismatch(value: Any, shape: Any, place: str) -> str | None:
    """Where `value` is not of `shape`, and how; or None."""
    if shape is ANY:
        return None
    if isinstance(shape, OneOf):
        found = [mismatch(value, one, place) for one in shape.shapes]
        return None if None in found else found[0]
    if isinstance(shape, type):
        fits = type(value) is shape or (shape is float and type(value) is int)
        return None if fits else f"{place} is {type(value).__name__}, not {shape.__name__}"
    if isinstance(shape, list):
        return _list_mismatch(value, shape, place)
    if isinstance(shape, dict):
        return _object_mismatch(value, shape, place)
    return None if value == shape else f"{place} is {value!r}, not {shape!r}"


def _list_mismatch(value: Any, shape: list[Any], place: str) -> str | None:
    if not isinstance(value, list) or not value:
        return f"{place} is no list, or an empty one"
    if len(shape) > 1 and len(shape) != len(value):
        return f"{place} has {len(value)} items, not {len(shape)}"
    shapes = shape if len(shape) > 1 else shape * len(value)
    found = (mismatch(v, s, f"{place}[{i}]") for i, (v, s) in enumerate(zip(value, shapes, strict=True)))
    return next((problem for problem in found if problem), None)


def _object_mismatch(value: Any, shape: dict[str, Any], place: str) -> str | None:
    if not isinstance(value, dict):
        return f"{place} is no object"
    needed = {key for key in shape if not key.endswith("?")}
    if not needed <= set(value) <= _keys(shape):
        return f"{place} has the keys {sorted(value)}, not {sorted(shape)}"
    by_name = {key.rstrip("?"): one for key, one in shape.items()}
    found = (mismatch(value[key], by_name[key], f"{place}.{key}") for key in value)
    return next((problem for problem in found if problem), None)


class Document:
    """An OpenAPI document, asked what it says of a route."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._paths = content["paths"]

    def operation(self, path: str, method: str) -> dict[str, Any]:
        """What it says of one method of one path."""
        return self._paths[path][method]

    def has(self, path: str, method: str) -> bool:
        """Whether it says anything of it."""
        return method in self._paths.get(path, {})

    def posts(self) -> set[str]:
        """Every path that takes a POST."""
        return {path for path, methods in self._paths.items() if "post" in methods}

    def takes(self, path: str) -> dict[str, Any]:
        """The schema of a POST's body."""
        return self._body(path)["schema"]

    def examples(self) -> list[tuple[str, Any]]:
        """Every route with a body, and the example of one."""
        return [(path, self._body(path)["example"]) for path in self.posts() if self._has_body(path)]

    def fields(self, path: str) -> set[str]:
        """The fields of a POST's body, `a`, and those of objects inside, `a.b`."""
        outer = self.takes(path)["properties"]
        inner = {f"{name}.{key}" for name, schema in outer.items() for key in _all_properties(schema)}
        return set(outer) | inner

    def problem(self, path: str, method: str, reply: httpx.Response) -> str | None:
        """Where a reply is not of its schema, or None."""
        answers = self.operation(path, method)["responses"]
        content = answers.get(str(reply.status_code), answers["default"]).get("content", {})
        kind = reply.headers.get("content-type", "").partition(";")[0]
        if kind not in content:
            return None if not content and not reply.content else f"{kind} is not documented"
        if kind != "application/json":
            return None
        try:
            jsonschema.validate(reply.json(), content[kind]["schema"])
        except jsonschema.ValidationError as error:
            return f"{error.json_path}: {error.message[:200]}"
        return None

    def _has_body(self, path: str) -> bool:
        return "requestBody" in self.operation(path, "post")

    def _body(self, path: str) -> dict[str, Any]:
        return self.operation(path, "post")["requestBody"]["content"]["application/json"]


@functools.cache
def _document_of(base: str) -> Document:
    return Document(httpx.get(f"{base}/openapi.json", timeout=60, trust_env=False).json())


def _all_properties(schema: Mapping[str, Any]) -> set[str]:
    inner = set(schema.get("properties", {}))
    return inner.union(*(_all_properties(one) for one in schema.get("anyOf", [])))
