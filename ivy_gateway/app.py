"""The application: routes, lifespan, request ids, and what is said when no route matches.

`create_app(config)` is all that an ASGI server needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request, Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ivy_gateway import metrics
from ivy_gateway.config import GatewayConfig
from ivy_gateway.errors import StartupError, UnknownRoute
from ivy_gateway.model_profile import ModelProfile
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.reference import check_reference
from ivy_gateway.replicas import ReplicaPool
from ivy_gateway.routes import admin, openai, tei, vllm
from ivy_gateway.routes.render import Family, render
from ivy_gateway.templates import CARD_INSTRUCTION, reranker_form
from ivy_gateway.tokenizer import TextTokenizer
from protos import __version__

logger = logging.getLogger(__name__)

ROUTERS = (tei.router, openai.router, vllm.router, admin.router, admin.models_router)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_FIRST_READY_SECONDS = 2.0  # how long the start waits for a replica before it serves 503s meanwhile


def create_app(config: GatewayConfig) -> FastAPI:
    """The gateway for `config`. Reads the model's folder: `StartupError` says what is wrong with it."""
    profile = ModelProfile.read(
        config.model,
        prompts=config.prompts,
        default_prompt_name=config.default_prompt_name,
        max_length=config.max_length,
        any_dimensions=config.any_dimensions,
    )
    form = reranker_form(config.reranker_template, profile)
    if form is None and config.instruction is not None:
        raise StartupError("--instruction: pairs of this model take no instruction")
    tokenizer = TextTokenizer.load(
        config.model,
        literal=config.literal_text,
        max_length=profile.max_length,
        workers=config.tokenizer_workers,
        lower_case=profile.do_lower_case,
        reranker_form=form,
        instruction=CARD_INSTRUCTION if config.instruction is None else config.instruction,
    )
    check_reference(config, tokenizer)
    app = FastAPI(
        title="Bouquet",
        version=__version__,
        lifespan=lambda app: _lifespan(app, config, profile, tokenizer),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_middleware(RequestScope)
    return app


@contextlib.asynccontextmanager
async def _lifespan(
    app: FastAPI, config: GatewayConfig, profile: ModelProfile, tokenizer: TextTokenizer
) -> AsyncIterator[None]:
    asyncio.get_running_loop().set_debug(config.debug)
    pool = ReplicaPool(config.replicas, tokenizer.hash, config.max_waiting_tokens)
    app.state.pipeline = Pipeline(config, profile, tokenizer, pool)
    with contextlib.closing(tokenizer):
        async with pool.running():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pool.first_ready(), _FIRST_READY_SECONDS)
            logger.info("serving %s", config.served_model_name)
            yield


async def _no_such_route(request: Request, error: Exception) -> Response:
    """404 and 405 in the words of the family that the path belongs to."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 405:
        message = f"{request.method} is not served on {path}"
    else:
        message = f"there is no {path}{_nearest(request.app, path)}"
    family = Family.O if path.startswith(("/v1/", "/v2/")) else Family.T
    response = render(UnknownRoute(message, error.status_code), family)
    response.headers.update(error.headers or {})
    return response


def _nearest(app: FastAPI, path: str) -> str:
    close = difflib.get_close_matches(path.rstrip("/"), app.openapi()["paths"], n=1)
    return f"; did you mean {close[0]}?" if close else "; /docs lists what there is"


class RequestScope:
    """Gives each request an id, echoes it, and counts the answer under its route's template."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass `scope` on, with the id put into the reply's headers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, request_id, status = time.perf_counter(), _request_id(scope), 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            metrics.request_finished(route, status, time.perf_counter() - began)


def _request_id(scope: Scope) -> str:
    """The caller's id where it is short and plain, else a new one."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    text = given.decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else secrets.token_hex(16)
