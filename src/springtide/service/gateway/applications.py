"""Requests to the paths of an application: what of them reaches it, and what of its answer reaches the client."""

from __future__ import annotations

from starlette.types import Scope

from springtide.core.errors import InvalidRequest
from springtide.serving.frames import HttpHead, HttpStart
from springtide.serving.schema import ServiceSchema

APPLICATION_METHODS = ("DELETE", "GET", "OPTIONS", "PATCH", "POST", "PUT")
# Of the connection alone, and the platform's token, which the user's code must not see.
_NOT_PASSED = frozenset({b"authorization", b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te"})
_SESSION = b"springtide_"
# Pages of users' code have the dashboard's address, and must not act with the session of those who look at them.
_SANDBOX = (b"content-security-policy", b"sandbox allow-scripts allow-forms allow-popups allow-downloads")


def http_head(scope: Scope) -> HttpHead:
    """The head of the request as the application gets it."""
    headers = [(name, _cookies(value) if name == b"cookie" else value) for name, value in scope["headers"]]
    passed = tuple((name, value) for name, value in headers if name not in _NOT_PASSED and (value or name != b"cookie"))
    # A revision that is named in the path is none of the application's business.
    named, path = scope["path_params"]["name"], scope["path"]
    path = path.replace(f"/f/{named}", f"/f/{named.partition('@')[0]}", 1)
    return HttpHead(scope["method"], scope.get("scheme", "http"), path, scope["query_string"], passed)


def application_headers(start: HttpStart) -> tuple[tuple[bytes, bytes], ...]:
    """The headers of an application's answer for the client."""
    passed = tuple((name, value) for name, value in start.headers if name.lower() not in _NOT_PASSED)
    return (*passed, _SANDBOX)


def refuse_application(schema: ServiceSchema, name: str) -> None:
    """Raise InvalidRequest if the service is an application, which has no `predict`."""
    if schema.kind == "asgi":
        raise InvalidRequest(f"{name!r} is an application; its paths are below /f/{name}/")


def _cookies(value: bytes) -> bytes:
    """The cookies without that of the dashboard's session."""
    kept = [part for part in value.split(b";") if not part.strip().startswith(_SESSION)]
    return b";".join(kept).strip()
