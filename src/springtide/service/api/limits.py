"""Limits on a request's address and headers, and on size, time and pauses of its body, checked while it arrives."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from springtide.core.errors import InvalidRequest
from springtide.service.submission.problems import HeadersTooLarge, Malformed, TooLarge, TooSlow, problem_of

MAX_API_BODY_BYTES = 2 * 1024 * 1024
# One shard of a dataset or one file of a folder, which their routes stream to a file.
MAX_DATA_BODY_BYTES = 256 * 1024 * 1024
# Many small files of a folder together.
MAX_CONTENTS_BODY_BYTES = 16 * 1024 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_HEADER_BYTES = 16 * 1024
MAX_ADDRESS_BYTES = 8 * 1024
MAX_BODY_PAUSE_S = 10.0
# A body may take this long, and longer for as many bytes as have come: a shard of 256 MiB a little over an hour.
BODY_S = 20.0
LOWEST_BYTES_PER_S = 64 * 1024


class RequestLimits:
    """ASGI middleware that stops reading a request at its limits.

    A body has at most 2 MiB for the control API, more for uploads of datasets and folders; the gateway has a lower
    limit for calls. Only the time in which the platform waits for the body counts, so that a busy platform blames no
    client.
    """

    def __init__(self, app: ASGIApp, *, max_body_pause_s: float = MAX_BODY_PAUSE_S, body_s: float = BODY_S) -> None:
        self._app = app
        self._max_body_pause_s = max_body_pause_s
        self._body_s = body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a bounded body, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        limit_bytes = _limit_of(scope["path"])
        try:
            _check_head(scope, limit_bytes)
        except InvalidRequest as error:
            await problem_of(error)(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        body = _BoundedBody(receive, limit_bytes, self._max_body_pause_s, self._body_s)

        async def sender(message: Message) -> None:
            body.is_answered = True
            await send(message)

        await self._app(scope, body.receive, sender)


class _BoundedBody:
    """The messages of one request, whose body ends at the limits."""

    def __init__(self, receive: Receive, limit_bytes: int, max_pause_s: float, body_s: float) -> None:
        self._receive = receive
        self._limit_bytes = limit_bytes
        self._max_pause_s = max_pause_s
        self._body_s = body_s
        self._num_bytes = 0
        self._waited_s = 0.0
        self._is_complete = False
        self.is_answered = False

    async def receive(self) -> Message:
        """The next message. Raises TooSlow, TooLarge; once the answer has begun, the client counts as gone instead."""
        if self._is_complete:
            # Only the disconnect is still to come, and that has no time limit.
            return await self._receive()
        try:
            return await self._next()
        except InvalidRequest:
            if not self.is_answered:
                raise
            self._is_complete = True
            return {"type": "http.disconnect"}

    async def _next(self) -> Message:
        loop = asyncio.get_running_loop()
        left_s = self._body_s + self._num_bytes / LOWEST_BYTES_PER_S - self._waited_s
        began_s = loop.time()
        try:
            async with asyncio.timeout(min(self._max_pause_s, left_s)):
                message = await self._receive()
        except TimeoutError:
            if left_s < self._max_pause_s:
                raise TooSlow(
                    f"the body comes too slowly: {self._num_bytes:,} bytes took {self._waited_s + left_s:.0f} s; send "
                    f"at least {LOWEST_BYTES_PER_S // 1024} KiB a second"
                ) from None
            raise TooSlow(f"the body stopped for {self._max_pause_s:.0f} s; send it in one go") from None
        self._waited_s += loop.time() - began_s
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
            if self._num_bytes > self._limit_bytes:
                raise _too_large(self._limit_bytes)
        return message


def _limit_of(path: str) -> int:
    if path.startswith("/v1/data/") and "/shards/" in path:
        return MAX_DATA_BODY_BYTES
    if path == "/v1/contents":
        return MAX_CONTENTS_BODY_BYTES
    if path.startswith("/v1/contents/"):
        return MAX_DATA_BODY_BYTES
    return MAX_API_BODY_BYTES if path.startswith("/v1/") else MAX_BODY_BYTES


def _check_head(scope: Scope, limit_bytes: int) -> None:
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_ADDRESS_BYTES:
        raise HeadersTooLarge(f"the address is longer than {MAX_ADDRESS_BYTES} bytes; shorten it")
    if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        raise HeadersTooLarge(f"the headers are longer than {MAX_HEADER_BYTES} bytes together; send fewer")
    for name, value in scope["headers"]:
        if name != b"content-length":
            continue
        if not value.isdigit():
            raise Malformed("the Content-Length header is not a number; leave it to your HTTP library")
        if len(value) > 18 or int(value) > limit_bytes:
            raise _too_large(limit_bytes)


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit_bytes // 1024 // 1024} MiB; send less, refer to data by its path")
