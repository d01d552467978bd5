"""Limits on a request's address, headers and body, and on pauses in the body, checked while it arrives."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from springtide.core.errors import InvalidRequest
from springtide.service.submission.problems import HeadersTooLarge, Malformed, TooLarge, TooSlow, problem_of

MAX_API_BODY_BYTES = 2 * 1024 * 1024
# One shard of a dataset, which its route streams to a file.
MAX_DATA_BODY_BYTES = 256 * 1024 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_HEADER_BYTES = 16 * 1024
MAX_ADDRESS_BYTES = 8 * 1024
MAX_BODY_PAUSE_S = 10.0


class RequestLimits:
    """ASGI middleware that stops reading a request at its limit.

    The limit is 2 MiB for the control API and one shard for uploads of datasets; the gateway has a lower one for calls.
    """

    def __init__(self, app: ASGIApp, *, max_body_pause_s: float = MAX_BODY_PAUSE_S) -> None:
        self._app = app
        self._max_body_pause_s = max_body_pause_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a bounded body, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit_bytes = _limit_of(scope["path"])
        try:
            _check_head(scope, limit_bytes)
        except InvalidRequest as error:
            answer = problem_of(error)
            answer.headers["Connection"] = "close"
            await answer(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive, limit_bytes), send)

    def _bounded(self, receive: Receive, limit_bytes: int) -> Receive:
        num_bytes = 0
        is_complete = False

        async def receiver() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:
                # Only the disconnect is still to come, and that has no time limit.
                return await receive()
            try:
                async with asyncio.timeout(self._max_body_pause_s):
                    message = await receive()
            except TimeoutError:
                raise TooSlow(f"the body stopped for {self._max_body_pause_s:.0f} s; send it in one go") from None
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                if num_bytes > limit_bytes:
                    raise _too_large(limit_bytes)
            return message

        return receiver


def _limit_of(path: str) -> int:
    if path.startswith("/v1/data/") and "/shards/" in path:
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
