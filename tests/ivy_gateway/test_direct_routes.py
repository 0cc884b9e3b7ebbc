"""Known paths reach their handlers directly; everything else takes the framework's way."""

from __future__ import annotations

import pytest
from fastapi import APIRouter, Request, Response

from ivy_gateway.direct_routes import DirectRoutes
from ivy_gateway.errors import InvalidValue
from ivy_gateway.routes.render import OpenAiRoute

router = APIRouter(route_class=OpenAiRoute)


@router.post("/known")
async def known(request: Request) -> Response:
    return Response(await request.body())


@router.post("/refusing")
async def refusing(request: Request) -> Response:
    raise InvalidValue("`input` is odd", "input")


@router.get("/models/{name}")
async def parametric(request: Request) -> Response:
    raise AssertionError("paths with parameters are the framework's to match")


async def ask(method: str, path: str, kind: str = "http") -> tuple[dict, list[dict]]:
    """The scope after the request, and what was sent; the inner application sends its own name."""
    sent: list[dict] = []

    async def inner(scope, receive, send):
        await send({"type": "inner"})

    async def receive():
        return {"type": "http.request", "body": b"echo", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "method": method, "path": path, "headers": []}
    await DirectRoutes(inner, router.routes)(scope, receive, send)
    return scope, sent


async def test_a_known_path_reaches_its_handler_and_names_its_route():
    scope, sent = await ask("POST", "/known")
    assert scope["route"].path == "/known"
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[1]["body"] == b"echo"


async def test_what_a_handler_raises_is_rendered_in_its_family():
    _, sent = await ask("POST", "/refusing")
    assert sent[0]["status"] == 400
    assert b'"param":"input"' in sent[1]["body"]


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("GET", "/known", "http"),
        ("POST", "/known/", "http"),
        ("GET", "/models/m", "http"),
        ("POST", "/unknown", "http"),
        ("POST", "/known", "lifespan"),
    ],
)
async def test_everything_else_is_passed_on(method, path, kind):
    scope, sent = await ask(method, path, kind)
    assert sent == [{"type": "inner"}]
    assert "route" not in scope
