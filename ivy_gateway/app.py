"""The application: routes, lifespan, request ids, and what is said when no route matches.

`create_app(config)` is all that an ASGI server needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import logging
import os
import re
import time
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request, Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ivy_gateway import metrics, request_context, tracing
from ivy_gateway.access import PROBES, ApiKeys, RequireKey
from ivy_gateway.config import OWN_ID_POLICIES, GatewayConfig
from ivy_gateway.direct_routes import DirectRoutes
from ivy_gateway.drain import Drain
from ivy_gateway.errors import StartupError, Unavailable, UnknownRoute
from ivy_gateway.foreign_vocabulary import ForeignVocabulary
from ivy_gateway.model_profile import ModelProfile
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.reference import check_reference
from ivy_gateway.replica import ReplicaState
from ivy_gateway.replicas import PoolSettings, ReplicaPool
from ivy_gateway.request_context import RequestContext
from ivy_gateway.routes import (
    admin,
    classify,
    cohere_embed,
    contextual,
    openai,
    perplexity,
    pooling,
    rerank,
    root,
    similarity,
    tei,
    tokens,
    vllm,
)
from ivy_gateway.routes.render import families, family_of, render
from ivy_gateway.templates import CARD_INSTRUCTION, reranker_form
from ivy_gateway.tokenizer import TextTokenizer
from ivy_gateway.wakefulness import Wakefulness
from protos import __version__
from protos.stamps import stamp

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("ivy_gateway.requests")

ROUTERS = (
    tei.router,
    openai.router,
    cohere_embed.router,
    perplexity.router,
    contextual.router,
    vllm.router,
    pooling.router,
    rerank.router,
    rerank.versioned_router,
    classify.router,
    classify.vllm_router,
    similarity.router,
    tokens.router,
    tokens.vllm_router,
    root.router,
    admin.router,
    admin.models_router,
)

_FAMILIES = families(route for router in ROUTERS for route in router.routes)
# https://www.w3.org/TR/trace-context/#traceparent-header: version, trace, parent and flags.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[ -~]{0,128})?")
_SERVED_TO_THE_END = PROBES | {"/metrics"}
_QUIET_SECONDS = 2.0  # of a start, before the log says which servers are missing
_DRAIN_POLL_SECONDS = 0.05  # at the start only: the order to go comes from a signal's handler
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# What scripts on a web page may read of a reply, besides its body.
_EXPOSED_HEADERS = ("x-request-id", "x-truncated-inputs", "x-embedding-space", "retry-after")


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
        separator=profile.separator,
        reranker_form=form,
        instruction=CARD_INSTRUCTION if config.instruction is None else config.instruction,
    )
    check_reference(config, tokenizer)
    tracing.check_installed(config.otlp_endpoint)
    wakefulness = Wakefulness(config.awake_ms / 1000)
    pool = PoolSettings.of(config, wakefulness)
    foreign = ForeignVocabulary.load(config.token_ids) if config.token_ids not in OWN_ID_POLICIES else None
    app = Application(
        title="Bouquet",
        version=__version__,
        lifespan=lambda app: _lifespan(app, config, profile, tokenizer, pool, foreign),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # ours are the spans of `tracing`
    )
    app.state.drain = Drain()
    app.state.wakefulness = wakefulness
    keys = app.state.keys = ApiKeys.read(config)
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.entrance = _entrance(app, config, keys)
    return app


class Application(FastAPI):
    """The framework's application behind our own layers, at whose `entrance` every request comes in.

    Those that the innermost layer knows never reach the framework's, which would each take their time.
    """

    entrance: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or start and stop."""
        if scope["type"] == "http":
            scope["app"] = self
            await self.entrance(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def by_framework(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose path or method is none that we know."""
        await super().__call__(scope, receive, send)


def _entrance(app: Application, config: GatewayConfig, keys: ApiKeys) -> ASGIApp:
    """From the inside out: handlers, keys, cross-origin requests (preflights carry no key), request ids."""
    layers: ASGIApp = DirectRoutes(app.by_framework, [route for router in ROUTERS for route in router.routes])
    if keys:
        open_paths = PROBES | ({"/metrics"} if config.open_metrics else set())
        layers = RequireKey(layers, keys, open_paths, lambda path: family_of(path, _FAMILIES))
    if config.cors_allow_origins != ("none",):
        layers = CrossOrigin(
            layers,
            allow_origins=config.cors_allow_origins,
            allow_methods=("GET", "POST", "OPTIONS"),
            allow_headers=("authorization", "content-type", "traceparent", "x-bouquet-lane", "x-request-id"),
            expose_headers=_EXPOSED_HEADERS,
        )
    return RequestScope(layers, app.state.drain, config.access_log)


@contextlib.asynccontextmanager
async def _lifespan(
    app: FastAPI,
    config: GatewayConfig,
    profile: ModelProfile,
    tokenizer: TextTokenizer,
    pool_settings: PoolSettings,
    foreign: ForeignVocabulary | None,
) -> AsyncIterator[None]:
    asyncio.get_running_loop().set_debug(config.debug)
    pool = ReplicaPool(config.replicas, tokenizer.hash, pool_settings)
    app.state.pipeline = Pipeline(config, profile, tokenizer, pool, foreign)
    with contextlib.closing(tokenizer):
        async with tracing.exporting(config.otlp_endpoint), pool.running(), _following_keys(app, config):
            quiet = min(config.start_patience_seconds, _QUIET_SECONDS)
            await _first_ready(pool, app.state.drain, quiet)
            for status in pool.statuses():
                if status.state is ReplicaState.CONNECTING:
                    logger.info("replica %s: not there yet (%s)", status.address, status.reason)
            await _first_ready(pool, app.state.drain, config.start_patience_seconds - quiet)
            logger.info("serving %s", config.served_model_name)
            yield


async def _first_ready(pool: ReplicaPool, drain: Drain, seconds: float) -> None:
    """Wait for a replica, for `seconds` at most, and not once the gateway is told to go."""
    first = asyncio.create_task(pool.first_ready())
    deadline = time.monotonic() + seconds
    while not first.done() and not drain.begun and (left := deadline - time.monotonic()) > 0:
        await asyncio.wait({first}, timeout=min(left, _DRAIN_POLL_SECONDS))
    first.cancel()


@contextlib.asynccontextmanager
async def _following_keys(app: FastAPI, config: GatewayConfig) -> AsyncIterator[None]:
    follower = asyncio.create_task(app.state.keys.follow(config))
    try:
        yield
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)


async def _no_such_route(request: Request, error: Exception) -> Response:
    """404 and 405 in the words of the family that the path belongs to."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 405:
        message = f"{request.method} is not served on {path}"
    else:
        message = f"there is no {path}{_nearest(request.app, path)}"
    family = family_of(path, _FAMILIES)
    response = render(UnknownRoute(message, error.status_code), family)
    response.headers.update(error.headers or {})
    return response


def _nearest(app: FastAPI, path: str) -> str:
    close = difflib.get_close_matches(path.rstrip("/"), app.openapi()["paths"], n=1)
    return f"; did you mean {close[0]}?" if close else "; /docs lists what there is"


class CrossOrigin(CORSMiddleware):
    """Starlette's middleware, by a shorter way for requests that no web page sent, which are most."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass `scope` on; the reply says that it depends on who asks."""
        if scope["type"] != "http" or any(name == b"origin" for name, _ in scope["headers"]):
            await super().__call__(scope, receive, send)
            return

        async def send_varying(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"vary", b"Origin"))
            await send(message)

        await self.app(scope, receive, send_varying)


class RequestScope:
    """Gives each request an id, echoes it, and counts the answer under its route's template.

    Everything that is done for the request knows its id, its trace and its lane by `request_context`. Once
    the gateway refuses what is new, requests end here.
    """

    def __init__(self, app: ASGIApp, drain: Drain, access_log: bool) -> None:
        self._app = app
        self._drain = drain
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass `scope` on, with the id put into the reply's headers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stamp("gateway.request")
        began, status = time.perf_counter(), 500
        context = _read_context(scope)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                stamp("gateway.encoded")
                status = message["status"]
                message["headers"].append((b"x-request-id", context.request_id.encode("latin-1")))
                if self._drain.begun:
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        token = request_context.enter(context)
        metrics.requests_in_flight(1)
        try:
            with tracing.request_span(scope["method"]) as span:
                app = _refuse if self._refuses(scope) else self._app
                await app(scope, receive, send_with_id)
                tracing.end_request(span, scope["method"], _route(scope), status)
        finally:
            metrics.requests_in_flight(-1)
            seconds = time.perf_counter() - began
            metrics.request_finished(_route(scope), status, seconds)
            if self._access_log:
                _log_access(scope["method"], _route(scope), status, seconds)
            request_context.leave(token)

    def _refuses(self, scope: Scope) -> bool:
        return self._drain.refusing and scope["path"] not in _SERVED_TO_THE_END


def _route(scope: Scope) -> str:
    """The template of the route, of which there are few; never the path that was asked for."""
    path: str = getattr(scope.get("route"), "path", "unmatched")
    return path


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    error = Unavailable("the gateway is being stopped", retry_after=1.0)
    await render(error, family_of(scope["path"], _FAMILIES))(scope, receive, send)


def _log_access(method: str, route: str, status: int, seconds: float) -> None:
    fields = {"method": method, "route": route, "status": status, "seconds": round(seconds, 6)}
    access_logger.info("%s %s %d %.1f ms", method, route, status, 1000 * seconds, extra={"fields": fields})


def _read_context(scope: Scope) -> RequestContext:
    """What the headers say of the request: its id, where that is short and plain, its trace and its lane."""
    context = RequestContext()
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            context.request_id = text if _REQUEST_ID.fullmatch(text) else ""
        elif name == b"traceparent":
            text = value.decode("latin-1")
            context.traceparent = text if _TRACEPARENT.fullmatch(text) else ""
        elif name == b"x-bouquet-lane":
            context.lane_header = value
    context.request_id = context.request_id or os.urandom(16).hex()
    return context
