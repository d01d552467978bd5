"""Requests to the paths of an application: what of them reaches it, and what of its answer reaches the client."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote, unquote_to_bytes

from starlette.types import Scope

from springtide.core.errors import InvalidRequest
from springtide.serving.frames import HttpHead, HttpStart
from springtide.serving.schema import ServiceSchema

APPLICATION_METHODS = ("DELETE", "GET", "OPTIONS", "PATCH", "POST", "PUT")
# Of the connection alone, and the platform's token, which the user's code must not see.
_NOT_PASSED = frozenset(
    {
        b"authorization",
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_MODIFIED = 304
_PROTOCOL = b"sec-websocket-protocol"
# A WebSocket's is made anew of what the server has read.
_NOT_SENT = _NOT_PASSED | {_PROTOCOL}
_SESSION = b"springtide_"
# Pages of users' code have the dashboard's address, and must not act with the session of those who look at them.
_SANDBOX = (b"content-security-policy", b"sandbox allow-scripts allow-forms allow-popups allow-downloads")


def http_head(scope: Scope) -> HttpHead:
    """The head of the request as the application gets it."""
    headers = [(name, _cookies(value) if name == b"cookie" else value) for name, value in scope["headers"]]
    left_out = _of_connection(headers) | _NOT_SENT
    passed = tuple((name, value) for name, value in headers if name not in left_out and (value or name != b"cookie"))
    if scope["type"] == "websocket" and scope["subprotocols"]:
        passed = (*passed, (_PROTOCOL, ", ".join(scope["subprotocols"]).encode("latin-1")))
    # A revision that is named in the path is none of the application's business.
    named, rest = scope["path_params"]["name"], scope["path_params"]["path"]
    prefix, raw = f"/f/{named.partition('@')[0]}/", scope.get("raw_path", b"").split(b"/", 3)
    # A slash that is written with a percent sign may have divided the path elsewhere.
    is_alike = len(raw) == 4 and unquote_to_bytes(raw[2]) == named.encode()
    raw_rest = raw[3] if is_alike else quote(rest).encode()
    scheme, query = scope.get("scheme", "http"), scope["query_string"]
    return HttpHead(scope["method"], scheme, prefix + rest, query, passed, prefix.encode() + raw_rest)


def application_headers(start: HttpStart) -> tuple[tuple[bytes, bytes], ...]:
    """The headers of an application's answer for the client."""
    headers = [(name.lower(), value) for name, value in start.headers]
    left_out = _NOT_PASSED | _of_connection(headers)
    if start.status == _NOT_MODIFIED:
        # It is the length of what is not sent.
        left_out |= {b"content-length"}
    return (*((name, value) for name, value in headers if name not in left_out), _SANDBOX)


def refuse_application(schema: ServiceSchema, name: str) -> None:
    """Raise InvalidRequest if the service is an application, which has no `predict`."""
    if schema.kind == "asgi":
        raise InvalidRequest(f"{name!r} is an application; its paths are below /f/{name}/")


def _of_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """The names of headers that the sender calls ones of the connection alone."""
    named = [value for name, value in headers if name == b"connection"]
    return frozenset(part.strip().lower() for value in named for part in value.split(b",")) if named else frozenset()


def _cookies(value: bytes) -> bytes:
    """The cookies without that of the dashboard's session."""
    kept = [part for part in value.split(b";") if not part.strip().startswith(_SESSION)]
    return b";".join(kept).strip()
