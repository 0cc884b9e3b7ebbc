"""What `/docs` and `/openapi.json` say about a route; `/docs` itself, a page that needs no other host."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ivy_gateway.routes.schema import O_PROBLEM, T_PROBLEM, Schema, either

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "pre{background:#f4f4f4;padding:.7em;overflow-x:auto}td{padding:.1em .8em .1em 0;vertical-align:top}"
    "h2{border-top:1px solid #ccc;padding-top:.8em}code{white-space:nowrap}"
)
# For a route whose bodies decide which family of clients it answers.
EITHER_PROBLEM = either(T_PROBLEM, O_PROBLEM)


def documented(
    summary: str,
    *,
    request: object,
    takes: Schema,
    reply: object,
    answers: Schema,
    octets: bool = False,
    problem: Schema | None = None,
) -> dict[str, Any]:
    """Keyword arguments for a route with a body: both sides as schemas, and an example of each.

    `octets`: it may answer bare bytes instead. `problem`: the errors' schema, where it is not the family's.
    """
    body = {"required": True, "content": {"application/json": {"schema": takes, "example": request}}}
    more = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}} if octets else {}
    arguments = answered(summary, answers, reply, problem=problem)
    arguments["responses"][200]["content"] |= more
    return arguments | {"openapi_extra": {"requestBody": body}}


def answered(
    summary: str, answers: Schema, reply: object = None, *, problem: Schema | None = None
) -> dict[str, Any]:
    """Keyword arguments for a route without a body."""
    content: dict[str, Any] = {"schema": answers} | ({} if reply is None else {"example": reply})
    responses: dict[int | str, Any] = {200: {"content": {"application/json": content}}}
    if problem is not None:
        responses["default"] = error_response(problem)
    return {"summary": summary, "responses": responses}


def error_response(problem: Schema) -> dict[str, Any]:
    """How a route's errors are documented."""
    return {"description": "An error", "content": {"application/json": {"schema": problem}}}


def page(openapi: Mapping[str, Any]) -> str:
    """The documentation as one HTML page without scripts."""
    title = html.escape(f"{openapi['info']['title']} {openapi['info']['version']}")
    head = f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
    return "\n".join([head, f"<h1>{title}</h1>", *_sections(openapi)])


def _sections(openapi: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>"
            yield f"<p>{html.escape(operation.get('summary', ''))}. "
            yield f"{html.escape(operation.get('description', ''))}</p>"
            yield from _request(path, operation)
            yield from _reply(operation)


def _request(path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    if "requestBody" not in operation:
        return
    content = operation["requestBody"]["content"]["application/json"]
    rows = (
        f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(field['description'])}"
        for name, field in content["schema"]["properties"].items()
    )
    yield f"<table>{''.join(rows)}</table>"
    body = json.dumps(content["example"])
    yield f"<pre>curl localhost:8080{html.escape(path)} -H 'content-type: application/json' \\\n"
    yield f"  -d '{html.escape(body)}'</pre>"


def _reply(operation: Mapping[str, Any]) -> Iterator[str]:
    content = operation["responses"].get("200", {}).get("content", {}).get("application/json", {})
    if "example" in content:
        yield f"<pre>{html.escape(json.dumps(content['example']))}</pre>"
