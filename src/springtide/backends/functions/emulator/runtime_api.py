"""The functions' side of the emulator: the Lambda Runtime API. Each instance has its own port.

The API has no token; other users of the machine are kept out by the owner of their end of the connection.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from springtide.backends.functions.emulator.fleet import Fleet
from springtide.backends.functions.emulator.instances import Instance

_V1 = "/2018-06-01/runtime"
_MAX_BODY_BYTES = 6 * 1024 * 1024
_ACCEPTED = b'{"status":"OK"}'


class RuntimeApi:
    """The routes: next, response, error, init/error. One invocation at a time for each instance."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.routes = [
            Route(f"{_V1}/invocation/next", _own_users(self._next), methods=["GET"]),
            Route(_V1 + "/invocation/{id}/response", _own_users(self._response), methods=["POST"]),
            Route(_V1 + "/invocation/{id}/error", _own_users(self._error), methods=["POST"]),
            Route(f"{_V1}/init/error", _own_users(self._init_error), methods=["POST"]),
        ]

    def _instance(self, request: Request) -> Instance | None:
        instance = self._fleet.instances.get(request.scope["server"][1])
        return instance if instance is not None and instance.is_alive else None

    async def _next(self, request: Request) -> Response:
        instance = self._instance(request)
        order = await instance.next_order() if instance is not None else None
        if order is None:
            return Response(b'{"errorMessage":"this function has ended"}', 410, media_type="application/json")
        invocation, headers = order
        return Response(invocation.payload, headers=headers, media_type="application/json")

    async def _response(self, request: Request) -> Response:
        return await self._answer(request, "")

    async def _error(self, request: Request) -> Response:
        return await self._answer(request, "Unhandled")

    async def _answer(self, request: Request, function_error: str) -> Response:
        instance = self._instance(request)
        body = await _body(request)
        current = instance.current if instance is not None else None
        if current is None or current.id != request.path_params["id"]:
            text = b'{"errorMessage":"no such invocation here","errorType":"InvalidRequestID"}'
            return Response(text, 400, media_type="application/json")
        if body is None:
            limit = _MAX_BODY_BYTES
            current.fail("Function.ResponseSizeTooLarge", f"Response payload size exceeded {limit} bytes")
            return Response(b'{"errorMessage":"too large"}', 413, media_type="application/json")
        current.answer(function_error, body)
        return Response(_ACCEPTED, 202, media_type="application/json")

    async def _init_error(self, request: Request) -> Response:
        body = await _body(request)
        self._fleet.fail_init(request.scope["server"][1], body or b"{}")
        return Response(_ACCEPTED, 202, media_type="application/json")


def peer_uid(host: str, port: int, table: Path = Path("/proc/net/tcp")) -> int | None:
    """The id of the user that owns the IPv4 socket at that address of this machine, or None if there is none."""
    wanted = f"{int.from_bytes(bytes(map(int, host.split('.'))), sys.byteorder):08X}:{port:04X}"
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if fields[1] == wanted:
            return int(fields[7])
    return None


def _own_users(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def guarded(request: Request) -> Response:
        client = request.client
        uid = peer_uid(client.host, client.port) if client is not None else None
        if uid is not None and uid != os.getuid():
            text = b'{"errorMessage":"this function belongs to another user","errorType":"Forbidden"}'
            return Response(text, 403, media_type="application/json")
        return await handler(request)

    return guarded


async def _body(request: Request) -> bytes | None:
    """The body, or None if it is too large (all of it is read, so that the sender hears the answer)."""
    data = bytearray()
    is_too_large = False
    async for part in request.stream():
        is_too_large = is_too_large or len(data) + len(part) > _MAX_BODY_BYTES
        if not is_too_large:
            data += part
    return None if is_too_large else bytes(data)
