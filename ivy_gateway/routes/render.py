"""Errors as HTTP, once for all dialects: status, body shape and headers by route family.

Family T (TEI-shaped routes) and family O (OpenAI-, Cohere-, Jina-, vLLM-shaped ones) differ because existing
clients insist: one needs `error` to be a string, the other an object.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from ivy_gateway import errors, metrics
from ivy_gateway.routes.docs import error_response
from ivy_gateway.routes.schema import O_PROBLEM, T_PROBLEM, Schema

logger = logging.getLogger(__name__)

JSON = "application/json"
CLIENT_CLOSED_REQUEST = 499  # nginx's code for a client that hung up; only logs and metrics ever see it


class Family(enum.Enum):
    """Which clients a route is shaped for."""

    T = "tei"
    O = "openai"  # noqa: E741


@dataclass(frozen=True, slots=True)
class Rendering:
    """One row of the table: how an error class looks in either family."""

    t_status: int
    t_type: str
    o_status: int
    o_type: str = "invalid_request_error"
    o_code: str | None = None


_TABLE: dict[type[errors.IvyError], Rendering] = {
    errors.EmptyInput: Rendering(400, "Empty", 400),
    errors.MalformedJson: Rendering(400, "Validation", 400),
    errors.InvalidHeader: Rendering(400, "Validation", 400),
    errors.InvalidField: Rendering(422, "Validation", 400),
    errors.InvalidValue: Rendering(422, "Validation", 400),
    errors.TooLong: Rendering(422, "Validation", 400, o_code="context_length_exceeded"),
    errors.TooManyInputs: Rendering(422, "Validation", 400),
    errors.BodyTooLarge: Rendering(413, "Validation", 413),
    errors.UnsupportedMediaType: Rendering(415, "Validation", 400),
    errors.UnsupportedTask: Rendering(424, "Backend", 400, o_code="model_not_supported"),
    errors.UnknownModel: Rendering(404, "Validation", 404, o_code="model_not_found"),
    errors.Unauthorized: Rendering(401, "Unauthorized", 401, "authentication_error", "invalid_api_key"),
    errors.UnknownRoute: Rendering(404, "NotFound", 404, "not_found_error"),
    errors.Overloaded: Rendering(429, "Overloaded", 429, "rate_limit_error", "rate_limit_exceeded"),
    errors.DeadlineExceeded: Rendering(503, "Overloaded", 503, "server_error", "timeout"),
    errors.Unavailable: Rendering(503, "Unhealthy", 503, "server_error", "unavailable"),
    errors.InferenceFailed: Rendering(424, "Backend", 500, "server_error", "internal_error"),
}
_BUG = Rendering(500, "Backend", 500, "server_error", "internal_error")


def render(error: errors.IvyError, family: Family) -> Response:
    """The HTTP response for `error` on a route of `family`; counts it too."""
    metrics.error_raised(type(error).__name__)
    row = next((_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE), _BUG)
    status = row.t_status if family is Family.T else row.o_status
    if isinstance(error, errors.UnknownRoute):
        status = error.status
    body = _t_body(error, row, status) if family is Family.T else _o_body(error, row, status)
    return Response(orjson.dumps(body), status, headers=_headers(error), media_type=JSON)


def _t_body(error: errors.IvyError, row: Rendering, status: int) -> dict[str, Any]:
    return {
        "error": error.message,
        "error_type": row.t_type,
        "message": error.message,
        "type": row.t_type,
        "code": status,
    }


def _o_body(error: errors.IvyError, row: Rendering, status: int) -> dict[str, Any]:
    nested = {"message": error.message, "type": row.o_type, "param": error.param, "code": row.o_code}
    return {"detail": error.message, **_t_body(error, row, status), "error": nested}


def _headers(error: errors.IvyError) -> dict[str, str]:
    if isinstance(error, errors.Unauthorized):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, errors.BodyTooLarge):
        return {"connection": "close"}  # the rest of the body is never read
    if isinstance(error, errors.ServiceError) and not isinstance(error, errors.InferenceFailed):
        seconds = error.retry_after
        return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(1000 * seconds))}
    return {}


class ClientGone(Exception):
    """The client hung up; nobody reads the answer."""


Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class DialectRoute(APIRoute):
    """A documented route that hands the plain request to its handler and renders what it raises.

    It bypasses the framework's own parameter and body handling, which costs more than the handlers do.
    A handler that serves both families sets `request.state.family`.
    """

    family: Family
    problem: Schema

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:  # noqa: ANN401
        described = {"default": error_response(self.problem)} | (settings.get("responses") or {})
        super().__init__(path, endpoint, **settings | {"responses": described})

    def get_route_handler(self) -> Handler:
        """The handler with its errors rendered."""
        endpoint: Handler = self.endpoint
        default = self.family

        async def handle(request: Request) -> Response:
            try:
                return await endpoint(request)
            except errors.IvyError as error:
                return render(error, getattr(request.state, "family", default))
            except ClientGone:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            except Exception:
                logger.exception("this is a bug: %s %s", request.method, self.path)
                bug = errors.IvyError("internal error; the server's log says more")
                return render(bug, getattr(request.state, "family", default))

        return handle


def families(routes: Iterable[BaseRoute]) -> dict[str, Family]:
    """The family of every path that is served."""
    return {route.path: route.family for route in routes if isinstance(route, DialectRoute)}


def family_of(path: str, known: Mapping[str, Family]) -> Family:
    """The family of a `known` path, and of any other by the company it keeps; stray slashes do not count."""
    plain = "/" + "/".join(part for part in path.split("/") if part)
    openai_like = plain.startswith(("/v1/", "/v2/", "/perplexity/"))
    return known.get(plain, Family.O if openai_like else Family.T)


class TeiRoute(DialectRoute):
    """A route whose errors look like TEI's."""

    family = Family.T
    problem = T_PROBLEM


class OpenAiRoute(DialectRoute):
    """A route whose errors look like OpenAI's."""

    family = Family.O
    problem = O_PROBLEM
