"""Signing browsers in: a code that works once opens a session, which ends by itself or when it is revoked."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from springtide.core.decoding import decode_json
from springtide.core.errors import StorageError
from springtide.core.status.logins import NewLogin, SignedOut
from springtide.service.api import openapi
from springtide.service.api.routes import encoded, read_nothing
from springtide.storage.files import write_durable

LOG = logging.getLogger("springtide.api")
SESSIONS_FILE = "browser_sessions.json"
CODE_S = 600.0
# A session that is not used for so long ends; each use begins the time anew.
IDLE_S = 12 * 3600.0
MAX_SESSIONS = 64
MAX_CODES = 16
_RENEW_S = 600.0
_SECRET_BYTES = 32
_MAX_FILE_BYTES = 64 * 1024


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


class BrowserSessions:
    """The open sessions and login codes. Only digests are kept, the sessions' in `path` so that they survive a restart.

    Without a path they end with the process. Times are Unix seconds.
    """

    def __init__(self, path: Path | None = None, now_s: Callable[[], float] = time.time) -> None:
        self._path = path
        self._now_s = now_s
        self._codes: dict[str, float] = {}
        self._ends_at_s: dict[str, float] = self._read()

    def new_code(self) -> str:
        """A code that opens one session within the next ten minutes."""
        now_s = self._now_s()
        self._codes = {digest: end_s for digest, end_s in self._codes.items() if end_s > now_s}
        while len(self._codes) >= MAX_CODES:
            del self._codes[next(iter(self._codes))]
        code = secrets.token_urlsafe(_SECRET_BYTES)
        self._codes[_digest(code)] = now_s + CODE_S
        return code

    def sign_in(self, code: str) -> str | None:
        """Open a session; returns its secret, or None if the code is wrong, was used or is too old."""
        end_s = self._codes.pop(_digest(code), 0.0)
        return self.open() if end_s > self._now_s() else None

    def open(self) -> str:
        """Open a session without a code, for a caller who has shown the token; returns its secret."""
        now_s = self._now_s()
        kept = {digest: end_s for digest, end_s in self._ends_at_s.items() if end_s > now_s}
        while len(kept) >= MAX_SESSIONS:
            del kept[min(kept, key=kept.__getitem__)]
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        kept[_digest(secret)] = now_s + IDLE_S
        self._ends_at_s = kept
        self._write()
        return secret

    def is_open(self, secret: str) -> bool:
        """Whether a session with this secret is open; its time begins anew."""
        if not secret:
            return False
        digest, now_s = _digest(secret), self._now_s()
        end_s = self._ends_at_s.get(digest, 0.0)
        if end_s <= now_s:
            return False
        if now_s + IDLE_S - end_s > _RENEW_S:
            self._ends_at_s[digest] = now_s + IDLE_S
            self._write()
        return True

    def close_all(self) -> int:
        """End every session and forget every code; returns how many sessions were open."""
        now_s = self._now_s()
        num_open = sum(end_s > now_s for end_s in self._ends_at_s.values())
        self._codes, self._ends_at_s = {}, {}
        self._write()
        return num_open

    def _read(self) -> dict[str, float]:
        if self._path is None:
            return {}
        with contextlib.suppress(OSError, msgspec.DecodeError), self._path.open("rb") as file:
            return decode_json(file.read(_MAX_FILE_BYTES), dict[str, float])
        return {}

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            write_durable(self._path, msgspec.json.encode(self._ends_at_s))
        except StorageError as error:
            LOG.warning("browsers will have to sign in again after a restart: %s", error)


def login_routes(sessions: BrowserSessions) -> APIRouter:
    """The routes that make login codes and sign browsers out; both need the token or a session."""
    router = APIRouter(prefix="/v1", tags=["platform"])

    @router.post(
        "/logins",
        summary="Make a code that signs one browser in",
        status_code=201,
        responses=openapi.answers(
            openapi.reference(NewLogin), "The code, for `/login?code=`.", 400, 413, 415, 422, status=201
        ),
    )
    async def make_login(request: Request) -> Response:
        await read_nothing(request)
        return encoded(NewLogin(code=sessions.new_code(), expires_in_s=CODE_S), 201)

    @router.delete(
        "/logins",
        summary="Sign every browser out",
        responses=openapi.answers(openapi.reference(SignedOut), "How many were signed in.", 400, 413, 415, 422),
    )
    async def sign_out(request: Request) -> Response:
        await read_nothing(request)
        return encoded(SignedOut(num_sessions=sessions.close_all()))

    return router
