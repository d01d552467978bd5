"""The HTTP server of a control plane that does not lead: it answers health checks and refuses everything else."""

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
from springtide.service.submission.problems import problem

RETRY_AFTER_S = 2
_JOIN_S = 10.0
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Standby:
    """Serves health checks and refusals on a socket that stays open, so that the platform can serve on it next.

    `role` returns what this control plane is doing (`standby` or `starting`) and `leader` the identity of the leader,
    empty if not known; both are called at each request. A standby counts as ready, because it can lead at any moment.
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
        # The duplicate shares the queue of connections: clients that connect between the two servers wait there.
        listener_copy = listener.dup()
        self._thread = threading.Thread(
            target=self._server.run, args=([listener_copy],), name="springtide-standby", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop serving. The listener passed to the constructor stays open."""
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
        return problem(503, "unavailable", message, {"Retry-After": str(RETRY_AFTER_S)})


def _json(status: int, value: object) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
