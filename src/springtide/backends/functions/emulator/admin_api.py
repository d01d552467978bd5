"""What a test or a person asks of the emulator itself: how it stands, what should go wrong, and to end.

    GET  /admin/status            counts, faults, instances
    GET  /admin/service           the service that it stands for, as FunctionService (JSON)
    PUT  /admin/faults            Faults (JSON): chance from now on
    POST /admin/inject            Injection (JSON): what befalls the next invocations
    POST /admin/kill/INSTANCE     kill an instance now
    POST /admin/stop              end the emulator and everything in it

Each with `Authorization: Bearer TOKEN`.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from springtide.backends.functions.emulator.config import EmulatorFaults
from springtide.backends.functions.emulator.fleet import Fleet, Injection, summary
from springtide.core.decoding import decode_json

_MAX_BODY_BYTES = 1 << 16
_OK = b"{}"


class AdminApi:
    """The routes. `stop` is called when the emulator should end."""

    def __init__(self, fleet: Fleet, token: str, stop: Callable[[], None]) -> None:
        self._fleet = fleet
        self._token = token
        self._stop = stop
        self.routes = [
            Route("/admin/status", self._guarded(self._status), methods=["GET"]),
            Route("/admin/service", self._guarded(self._service), methods=["GET"]),
            Route("/admin/faults", self._guarded(self._faults), methods=["PUT"]),
            Route("/admin/inject", self._guarded(self._inject), methods=["POST"]),
            Route("/admin/kill/{instance}", self._guarded(self._kill), methods=["POST"]),
            Route("/admin/stop", self._guarded(self._end), methods=["POST"]),
        ]

    def _guarded(self, handler: Callable[[Request, bytes], Response]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                return _refused(401, "the emulator's token is missing or wrong")
            body = bytearray()
            async for part in request.stream():
                body += part
                if len(body) > _MAX_BODY_BYTES:
                    return _refused(413, f"at most {_MAX_BODY_BYTES} bytes")
            try:
                return handler(request, bytes(body))
            except msgspec.ValidationError as error:
                return _refused(422, str(error))
            except msgspec.DecodeError as error:
                return _refused(400, str(error))

        return guarded

    def _status(self, request: Request, body: bytes) -> Response:
        return Response(summary(self._fleet), media_type="application/json")

    def _service(self, request: Request, body: bytes) -> Response:
        return Response(msgspec.json.encode(self._fleet.config.service), media_type="application/json")

    def _faults(self, request: Request, body: bytes) -> Response:
        self._fleet.set_faults(decode_json(body, EmulatorFaults))
        return Response(_OK, media_type="application/json")

    def _inject(self, request: Request, body: bytes) -> Response:
        self._fleet.inject(decode_json(body, Injection))
        return Response(_OK, media_type="application/json")

    def _kill(self, request: Request, body: bytes) -> Response:
        if not self._fleet.kill(request.path_params["instance"]):
            return _refused(404, "no such instance")
        return Response(_OK, media_type="application/json")

    def _end(self, request: Request, body: bytes) -> Response:
        self._stop()
        return Response(_OK, media_type="application/json")


def _refused(status: int, message: str) -> Response:
    return Response(msgspec.json.encode({"message": message}), status, media_type="application/json")
