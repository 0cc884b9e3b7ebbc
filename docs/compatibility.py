"""`compatibility.md`: what the routes take and answer, from their own schemas and from the tables of facts.

python -m docs.compatibility           # write it
python -m docs.compatibility --check   # status 1 when the file says something else
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from ivy_gateway.app import ROUTERS
from ivy_gateway.routes.render import Family, families
from tests.contracts import test_tei, test_vllm
from tests.contracts.facts import Fact

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
INTRODUCTION = """# Compatibility

Written by `python -m docs.compatibility` from the routes' own schemas (the OpenAPI document at
`/openapi.json`) and from the tables of `tests/contracts/`, which run against real stacks. Fields that a
route does not know are ignored; null means absent; a value of a known field that cannot be honoured is
an error. `/docs` has an example of each route.

## Chosen where servers differ

* Over-long input is cut on token ids and reported in `x-truncated-inputs`, unless the request or the
  server says no.
* Special tokens spelled in a text are characters. This holds in `messages` too: only the model's own
  chat template makes control tokens of them. A template in a request is refused, and so are parts that
  are no text. A model whose files hold no chat template refuses `messages`.
* `/v1/embeddings` refuses token ids unless `--token-ids` says whose they are: most clients send another
  model's.
* Empty texts are refused where texts are embedded; a blank document is ranked like any other, a blank
  query is refused.
* `user`, `priority`, `request_id`, `cache_salt` and `options` have no effect.
* Every error has both spellings that clients read; `error` is a string on TEI's routes, an object on the
  others.
* Not served: sparse vectors (`/embed_sparse` answers 424), images, gRPC for clients, Ollama's and
  Weaviate's own routes.
"""


def page() -> str:
    """The whole page."""
    app = FastAPI()
    for router in ROUTERS:
        app.include_router(router)
    paths = app.openapi()["paths"]
    parts = [INTRODUCTION, "## Client libraries in the tests\n", _clients(), "## Routes\n", _routes(paths)]
    parts += ["## Fields\n", *_fields(paths), "## Facts\n", *_facts()]
    return "\n".join(parts)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown without padding: one long cell would widen all others."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ["---"] * len(header), *rows))


def _clients() -> str:
    """The first sentence of each file of tests with real clients."""
    files = sorted((ROOT / "tests" / "clients").glob("test_*.py"))
    rows = [
        (
            f"`{file.relative_to(ROOT)}`",
            (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()[0],
        )
        for file in files
    ]
    return _table(("test", "what is in it"), rows)


def _routes(paths: Mapping[str, Any]) -> str:
    shapes = {Family.T: "TEI's", Family.O: "OpenAI's"}
    by_path = families(route for router in ROUTERS for route in router.routes)
    rows = [
        (
            f"`{method.upper()} {path}`",
            ", ".join(operation.get("tags", ())),
            shapes[by_path[path]],
            operation["summary"],
        )
        for path, methods in paths.items()
        for method, operation in methods.items()
    ]
    return _table(("route", "dialect", "errors", "what it does"), rows)


def _fields(paths: Mapping[str, Any]) -> Iterator[str]:
    """The fields of every body; routes with the same ones together."""
    together: dict[str, list[str]] = {}
    for path, methods in paths.items():
        if "requestBody" in methods.get("post", {}):
            schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            together.setdefault(_field_table(schema["properties"]), []).append(f"`{path}`")
    for fields, names in together.items():
        yield f"### {', '.join(names)}\n"
        yield fields


def _field_table(properties: Mapping[str, Any]) -> str:
    rows = [
        (f"`{name}`", _kind(schema), schema["description"].replace("|", "\\|"))
        for name, schema in properties.items()
    ]
    return _table(("field", "type", "what it means"), rows)


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(one) for one in schema["anyOf"] if one != {"type": "null"}))
    kinds = [kind for kind in _listed(schema.get("type", "anything")) if kind != "null"]
    return f"[{_kind(schema['items'])}]" if kinds == ["array"] else "/".join(kinds)


def _listed(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value


def _facts() -> Iterator[str]:
    """What the tests state of every route, in a line each."""
    for title, module in (("text-embeddings-inference", test_tei), ("vLLM, OpenAI, Cohere", test_vllm)):
        facts: list[Fact] = module.FACTS
        rows = [(f"`{f.method} {f.path}`", f.name, str(f.status), f.to) for f in facts]
        yield f"### {title}\n"
        yield _table(("route", "fact", "status", "model"), rows)


def main() -> int:
    """Write the page, or with `--check` compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
