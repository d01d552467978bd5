"""Authentication of the API: the token, its file, and the middleware that checks every request."""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from springtide.core.errors import InvalidRequest, SpringtideError, StorageError, Unauthorized
from springtide.service.api.api_keys import KEY_PREFIX, ApiKeys, service_of_path
from springtide.service.api.service_callers import SERVICE_PREFIX, ServiceCallers
from springtide.service.api.sessions import BrowserSessions
from springtide.service.gateway.endpoint import CALLER, REQUEST_ID, identified
from springtide.service.gateway.protocol import WITHOUT_TOKEN, is_readiness
from springtide.service.submission.problems import RequestForbidden, is_inference_protocol, problem, problem_of
from springtide.storage.files import write_durable

_COOKIE_AGE_S = 7 * 86400
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/favicon.ico"})
_TOKEN_PLACE = "the state directory's token file"
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_TOKEN_BYTES = 32
SECURITY_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_HOW_TO_GET_IN = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Springtide: not signed in</title></head>
<body><h1>Springtide</h1>
<p>This browser is not signed in. Run <code>springtide dashboard</code> in a terminal on this machine and open the
address that it prints.</p></body></html>
"""


def load_or_create_token(state_dir: Path) -> str:
    """Return the platform's token, created on first use. Raises InvalidRequest if others can read it, StorageError."""
    path = state_dir / "token"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        write_durable(path, token.encode() + b"\n", mode=0o600)
        return token
    except OSError as error:
        raise StorageError(f"the token file {path} cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise InvalidRequest(f"the token file {path} is not a plain file of yours; remove it, a new one is made")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise InvalidRequest(
                f"the token file {path} can be read by others; run `chmod 600 {path}`, "
                "or remove it so that a new token is made"
            )
        token = file.read(1024).decode("ascii", "replace").strip()
    if len(token) < 16 or not token.isprintable() or not token.isascii():
        raise InvalidRequest(f"the token file {path} holds no token; remove it, a new one is made")
    return token


# Called with the scope of a request, the service that it is for (empty: none), the status and the seconds.
NoteRefused = Callable[[Scope, str, int, float], None]


class AccessControl:
    """ASGI middleware: allows loopback hosts only, rejects other origins, and requires the token except on open paths.

    So it is with WebSockets too, whose handshake it refuses.

    The holder of one of `keys` may call the services of that key, so often a second, and nothing else; so may a replica
    with the identity of its service, as `callers` knows it. `note_refused` is called for each request that is refused
    here.

    With `is_open_to_network` any Host header is allowed: the name of a Service or an ingress, or an address. Pages of
    other sites still cannot use the API, because a browser sends them neither the token nor the cookie. `token_place`
    tells users where to find the token. A browser shows the secret of its session, in a cookie that is named after the
    port, since browsers send cookies to every port of a host.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str,
        sessions: BrowserSessions,
        keys: ApiKeys,
        callers: ServiceCallers,
        note_refused: NoteRefused = lambda scope, name, status, seconds: None,
        is_open_to_network: bool = False,
        token_place: str = _TOKEN_PLACE,
    ) -> None:
        self._app = app
        self._sessions = sessions
        self._keys, self._callers, self._note_refused = keys, callers, note_refused
        self._token = token.encode()
        self._is_open_to_network = is_open_to_network
        self._token_place = token_place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it here with a login page, a redirect or a refusal."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        began_s, is_socket = time.perf_counter(), scope["type"] == "websocket"
        if is_socket:
            # It begins with a GET, but what it then sends may change anything.
            scope["method"] = "GET"
        sender = send if is_socket else _with_security_headers(send)
        headers = Headers(scope=scope)
        try:
            if not self._is_open_to_network:
                _check_host(headers)
            _check_origin("POST" if is_socket else scope["method"], headers, may_be_encrypted=self._is_open_to_network)
            key = _bearer(headers)
            if key.startswith(KEY_PREFIX) and not self._is_token(key):
                answer = await self._by_key(scope, key)
            else:
                answer = self._answer(scope, headers)
        except SpringtideError as error:
            answer = problem_of(error)
        if answer is None:
            await self._app(scope, receive, sender)
        else:
            if answer.status_code >= 400:
                answer.headers[REQUEST_ID.decode()] = identified(scope).decode()
                name = service_of_path(scope["path"]) or ""
                self._note_refused(scope, name, answer.status_code, time.perf_counter() - began_s)
            await answer(scope, receive, sender)

    async def _by_key(self, scope: Scope, key: str) -> Response | None:
        """The refusal of a request with an API key or an identity; None passes it on. Raises SpringtideError."""
        path: str = scope["path"]
        if _is_open(path):
            return None
        if is_readiness(path):
            # Clients ask for it with their key, and it needs none.
            scope[WITHOUT_TOKEN] = True
            return None
        if key.startswith(SERVICE_PREFIX):
            caller = self._callers.known(key)
            scope[CALLER] = f"service:{caller.name}"
            if service_of_path(path) in caller.calls:
                return None
            may = ", ".join(caller.calls) or "no service"
            return problem_of(RequestForbidden(f"the service {caller.name!r} may call {may}, and nothing else"))
        if not self._keys.is_loaded:
            await run_in_threadpool(self._keys.load)
        scope[CALLER], refusal = self._keys.admit(key, path)
        return refusal

    def _answer(self, scope: Scope, headers: Headers) -> Response | None:
        """The middleware's own answer; None passes the request on. Raises Unauthorized."""
        path: str = scope["path"]
        is_login = path == "/login"
        if is_login and scope["method"] in ("GET", "HEAD"):
            return self._login(scope, headers)
        if _is_open(path):
            return None
        if self._has_token(headers):
            sentence = f"{scope['method']} is not possible on '/login'; use GET, HEAD"
            return problem(405, "method_not_allowed", sentence, {"Allow": "GET, HEAD"}) if is_login else None
        if is_readiness(path):
            scope[WITHOUT_TOKEN] = True
            return None
        is_page = not path.startswith("/v1/") and not is_inference_protocol(path)
        if is_page and scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            return HTMLResponse(_HOW_TO_GET_IN, status_code=401, headers={"Cache-Control": "no-store"})
        if "authorization" in headers:
            raise Unauthorized(
                f"the token is wrong; send `Authorization: Bearer TOKEN` with what {self._token_place} holds"
            )
        raise Unauthorized(f"no token; send `Authorization: Bearer TOKEN` with what {self._token_place} holds")

    def _login(self, scope: Scope, headers: Headers) -> Response:
        try:
            query = parse_qs(scope["query_string"].decode("ascii", "replace"), max_num_fields=8)
        except ValueError:
            query = {}
        codes, tokens = query.get("code", []), query.get("token", [])
        session: str | None = None
        if scope["method"] == "GET" and (len(codes), len(tokens)) == (1, 0):
            session = self._sessions.sign_in(codes[0])
        elif (len(codes), len(tokens)) == (0, 1) and self._is_token(tokens[0]):
            session = self._sessions.open()
        if session is None:
            return HTMLResponse(_HOW_TO_GET_IN, status_code=401, headers={"Cache-Control": "no-store"})
        answer = RedirectResponse("/", status_code=303, headers={"Cache-Control": "no-store"})
        answer.set_cookie(
            cookie_name(headers), session, httponly=True, samesite="strict", path="/", max_age=_COOKIE_AGE_S
        )
        return answer

    def _has_token(self, headers: Headers) -> bool:
        if self._is_token(_bearer(headers)):
            return True
        # A wrong Authorization header is refused even together with a valid cookie.
        if "authorization" in headers:
            return False
        return self._sessions.is_open(cookie_parser(headers.get("cookie", "")).get(cookie_name(headers), ""))

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token)


def _is_open(path: str) -> bool:
    """Whether a request to this path needs neither a token nor a key."""
    return path in _OPEN_PATHS or path.startswith("/static/")


def _bearer(headers: Headers) -> str:
    """What the Authorization header says after "Bearer"; empty if it does not."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def cookie_name(headers: Headers) -> str:
    """The name of the session's cookie: the port in it is the one that the browser has connected to."""
    port = headers.get("host", "").rpartition(":")[2]
    return f"springtide_{port if port.isdecimal() and len(port) <= 5 else 'default'}"


def _check_host(headers: Headers) -> None:
    """Refuse another host's name (DNS rebinding). Raises RequestForbidden."""
    hosts = headers.getlist("host")
    if len(hosts) != 1 or _HOST.fullmatch(hosts[0]) is None:
        raise RequestForbidden(
            f"the Host header {', '.join(hosts)!r:.100} is not this machine; use 127.0.0.1 or localhost"
        )


def _check_origin(method: str, headers: Headers, *, may_be_encrypted: bool) -> None:
    """Refuse a change requested by another site's page (request forgery). Raises RequestForbidden."""
    if method in _SAFE_METHODS:
        return
    host = headers.get("host", "").lower()
    own = {f"http://{host}", *((f"https://{host}",) if may_be_encrypted else ())}
    origins = headers.getlist("origin")
    if any(origin.lower() not in own for origin in origins):
        raise RequestForbidden(
            f"a page of {', '.join(origins)!r:.100} must not change anything here; use the dashboard's own address"
        )


def _with_security_headers(send: Send) -> Send:
    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sender
