"""What a control plane answers while another one leads: that it is alive, which one leads, and when to ask again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import springtide
from springtide.service.server import server_of

RETRY_AFTER_S = 2
_JOIN_S = 10.0
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Standby:
    """Serves health and refusals on a socket that is kept open for whatever is served there next.

    `role` says what this control plane does meanwhile (`standby`, `starting`), `leader` which one leads, as far as is
    known; both are asked at each request. `standby` counts as ready, since it can lead at any moment; `starting` does
    not.
    """

    def __init__(self, listener: socket.socket, role: Callable[[], str], leader: Callable[[], str]) -> None:
        self._role = role
        self._leader = leader
        self._server = server_of(
            Starlette(
                routes=[
                    Route("/healthz", self._health),
                    Route("/readyz", self._readiness),
                    Route("/{path:path}", self._refusal, methods=list(_METHODS)),
                ]
            )
        )
        # Both share one queue of connections: what comes between the two servers waits there.
        socket_of_its_own = listener.dup()
        self._thread = threading.Thread(
            target=self._server.run, args=([socket_of_its_own],), name="springtide-standby", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Answer no more; the socket that was given stays open."""
        self._server.should_exit = True
        self._thread.join(_JOIN_S)

    async def _health(self, request: Request) -> Response:
        return _json(200, {"status": "ok", "role": self._role(), "version": springtide.__version__})

    async def _readiness(self, request: Request) -> Response:
        role = self._role()
        return _json(200 if role == "standby" else 503, {"status": role, "leader": self._leader()})

    async def _refusal(self, request: Request) -> Response:
        leader = self._leader()
        doing = "is starting" if self._role() == "starting" else "stands by"
        who = f"; {leader} leads" if leader else ""
        message = f"this control plane {doing}{who}: ask again in a moment, or ask the platform's Service"
        answer = _json(503, {"error": {"code": "unavailable", "message": message}})
        answer.headers["Retry-After"] = str(RETRY_AFTER_S)
        return answer


def _json(status: int, value: object) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
