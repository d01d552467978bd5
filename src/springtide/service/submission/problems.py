"""Errors that only HTTP has, and the answer to every error: {"error": {"code", "message"}}.

Below /v2 it is {"error": sentence}, because clients of the Open Inference Protocol fail on anything but a text there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from springtide.core.errors import BackendError, CapacityError, InvalidRequest, SpringtideError, StorageError

LOG = logging.getLogger("springtide.api")
_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_CODES = {404: "not_found", 405: "method_not_allowed", 401: "unauthorized", 413: "too_large"}


class Malformed(InvalidRequest):
    """The bytes are not what their content type says."""

    status = 400
    code = "malformed_request"


class RequestForbidden(InvalidRequest):
    """The request comes from a host or an origin that is not allowed."""

    status = 403
    code = "forbidden"


class TooSlow(InvalidRequest):
    """The body stopped arriving, or comes too slowly."""

    status = 408
    code = "too_slow"


class TooLarge(InvalidRequest):
    """The body is larger than any valid one."""

    status = 413
    code = "too_large"


class UnsupportedMediaType(InvalidRequest):
    """The body is not JSON."""

    status = 415
    code = "unsupported_media_type"


class HeadersTooLarge(InvalidRequest):
    """The headers or the address are larger than any valid ones."""

    status = 431
    code = "headers_too_large"


def is_inference_protocol(path: str) -> bool:
    """Whether the path belongs to the Open Inference Protocol, which has its own form of errors."""
    return path == "/v2" or path.startswith("/v2/")


class _Problem(Response):
    """An error's answer. Its form is that of the request's path, which is known when it is sent."""

    media_type = "application/json"

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None) -> None:
        self._message = message
        super().__init__(msgspec.json.encode({"error": {"code": code, "message": message}}), status, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        if is_inference_protocol(scope["path"]):
            self.body = msgspec.json.encode({"error": self._message})
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def problem(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """Return an answer in the shape that all errors of its path have."""
    return _Problem(status, code, message, headers)


_HEADERS: Mapping[int, dict[str, str]] = MappingProxyType(
    {401: {"WWW-Authenticate": 'Bearer realm="springtide"'}, 429: {"Retry-After": "60"}}
)


def problem_of(error: SpringtideError) -> Response:
    """Return the answer for an error that Springtide raised on purpose."""
    if isinstance(error, InvalidRequest):
        return problem(error.status, error.code, str(error), _HEADERS.get(error.status))
    if isinstance(error, CapacityError):
        return problem(503, "no_capacity", str(error), {"Retry-After": str(max(1, round(error.retry_after_s)))})
    if isinstance(error, BackendError | StorageError):
        return problem(503, "unavailable", str(error), {"Retry-After": "1"})
    LOG.error("unexpected %s: %s", type(error).__name__, error)
    return problem(500, "internal", f"{type(error).__name__}: {error}")


def _allowed(request: Request) -> str:
    """The methods of all routes with the request's path; a route's own 405 names only its own."""
    routes = request.app.router.routes
    scopes = ({**request.scope, "method": method} for method in _METHODS)
    return ", ".join(
        str(scope["method"]) for scope in scopes if any(route.matches(scope)[0] is Match.FULL for route in routes)
    )


def add_problem_handlers(app: FastAPI) -> None:
    """Answer every error of the application in the shape of `problem`."""

    async def on_springtide_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, SpringtideError)
        return problem_of(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        sentence = str(error.detail)
        if error.status_code == 404:
            sentence = f"there is no {request.url.path[:200]!r} here; GET /openapi.json lists every path"
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = _allowed(request)
            sentence = f"{request.method} is not possible on {request.url.path[:200]!r}; use {headers['Allow']}"
        return problem(error.status_code, _CODES.get(error.status_code, "http_error"), sentence, headers)

    async def on_bad_query(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        sentences = (f"{detail['loc'][-1]}: {detail['msg']}" for detail in error.errors()[:5])
        return problem(422, InvalidRequest.code, "the address does not fit: " + "; ".join(sentences))

    async def on_client_gone(request: Request, error: Exception) -> Response:
        # The client has left; what matters is that this is no defect.
        return problem(499, "client_gone", "the client left while it sent the body")

    async def on_defect(request: Request, error: Exception) -> Response:
        LOG.error("a defect while answering %s %s", request.method, request.url.path, exc_info=error)
        return problem(
            500, "internal", "a defect of Springtide, not of your request; the platform's log has the details"
        )

    app.add_exception_handler(SpringtideError, on_springtide_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_bad_query)
    app.add_exception_handler(ClientDisconnect, on_client_gone)
    app.add_exception_handler(Exception, on_defect)
