"""What `/docs` and `/openapi.json` say about a route; `/docs` itself, a page that needs no other host."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from typing import Any

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "pre{background:#f4f4f4;padding:.7em;overflow-x:auto}td{padding:.1em .8em .1em 0;vertical-align:top}"
    "h2{border-top:1px solid #ccc;padding-top:.8em}code{white-space:nowrap}"
)


def documented(summary: str, request: object, reply: object, fields: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments for a route: its summary, its fields in words, an example of both sides."""
    schema = {
        "type": "object",
        "properties": {name: {"description": text} for name, text in fields.items()},
        "example": request,
    }
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {
        "summary": summary,
        "openapi_extra": {"requestBody": body},
        "responses": {200: {"content": {"application/json": {"example": reply}}}},
    }


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
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    rows = (
        f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(field['description'])}"
        for name, field in schema["properties"].items()
    )
    yield f"<table>{''.join(rows)}</table>"
    body = json.dumps(schema["example"])
    yield f"<pre>curl localhost:8080{html.escape(path)} -H 'content-type: application/json' \\\n"
    yield f"  -d '{html.escape(body)}'</pre>"


def _reply(operation: Mapping[str, Any]) -> Iterator[str]:
    content = operation["responses"].get("200", {}).get("content", {}).get("application/json", {})
    if "example" in content:
        yield f"<pre>{html.escape(json.dumps(content['example']))}</pre>"
