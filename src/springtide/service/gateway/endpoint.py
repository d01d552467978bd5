"""HTTP for the gateway's handlers: bounded bodies in, answers and errors out, on bare ASGI."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from springtide.core.errors import InvalidRequest, SpringtideError
from springtide.service.gateway.compression import BadCompression, compressed, decompressed
from springtide.service.gateway.requests import ClientGone, RequestRefused, until_disconnected
from springtide.service.gateway.sockets import SocketRelay
from springtide.service.gateway.streams import AnswerStream, SocketStream
from springtide.service.submission.problems import is_inference_protocol
from springtide.serving.events import EVENT_STREAM

_LOG = logging.getLogger("springtide.gateway")
JSON_TYPE = b"application/json"
# A client that takes nothing of a streamed answer for so long has left, though its connection stands.
SEND_TIMEOUT_S = 30.0
# The key in a request's scope of what closes its connection without waiting for what was written to it.
ABORT = "springtide:abort"
# And of the future that is done when the connection of a WebSocket is lost.
LOST = "springtide:lost"
# Below this, compression saves less than its own work and its header cost.
_MIN_COMPRESSED_BYTES = 1024
# Clients of OpenAI's API send what was refused twice more within seconds, which under overload helps none of them.
_NO_RETRY = ((b"x-should-retry", b"false"),)
REQUEST_ID = b"x-request-id"
_MAX_ID_BYTES = 128
# Under this key of the scope is the queue that has answered, after the answer.
ANSWERED_BY = "springtide:answered_by"
# And under this one the name of the API key that the request came with, or `service:` and that of the calling service.
CALLER = "springtide:caller"
# What stands between must neither keep the parts of a stream back nor answer with old ones.
STREAM_HEADERS = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
Headers = tuple[tuple[bytes, bytes], ...]
_CODES = {
    400: "malformed_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "too_slow",
    413: "too_large",
    415: "unsupported_media_type",
    422: "invalid_request",
    429: "overloaded",
    500: "internal",
    502: "replica_lost",
    503: "unavailable",
    504: "too_late",
}


class HttpReply(msgspec.Struct, frozen=True, eq=False):
    """An HTTP answer."""

    status: int
    body: bytes
    headers: Headers = ()
    media_type: bytes = JSON_TYPE
    # A body that comes in parts, instead of `body`.
    stream: AnswerStream | None = None
    # The most that one message of a WebSocket may have.
    max_bytes: int = 0


class HttpError(SpringtideError):
    """An error answer with the given HTTP status; `details` are merged into the error object."""

    def __init__(self, status: int, message: str, headers: Headers = (), details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.details = details or {}


Handler = Callable[[Scope, Receive], Awaitable[HttpReply]]


class Endpoint:
    """A raw ASGI application for one path: calls the method's handler, turns errors into answers, counts requests.

    Each request has an X-Request-Id, its own or one that is made here, which an application is given and every answer
    names.
    """

    def __init__(
        self,
        handlers: dict[str, Handler],
        count: Callable[[Scope, int, float], None],
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        self.handlers = handlers
        self._count = count
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or talk on one WebSocket."""
        started_s = time.perf_counter()
        if scope["type"] == "websocket":
            # It begins with a GET, and is refused like one.
            scope["method"] = "GET"
            await receive()
            send = _as_refusal(send)
        request_id = identified(scope)
        try:
            reply = _naming(request_id, await self._answer(scope, receive))
        except ClientGone:
            self._count(scope, 499, time.perf_counter() - started_s)
            return
        if isinstance(reply.stream, SocketStream):
            relay = SocketRelay(
                reply.stream,
                max_bytes=reply.max_bytes,
                send_timeout_s=self._send_timeout_s,
                abort=scope[ABORT],
                lost=scope[LOST],
            )
            await relay.run(receive, send, reply.headers)
            self._count(scope, reply.stream.status, time.perf_counter() - started_s)
            return
        if reply.stream is not None:
            await self._relay(reply, reply.stream, scope, receive, send)
            self._count(scope, reply.stream.status, time.perf_counter() - started_s)
            return
        self._count(scope, reply.status, time.perf_counter() - started_s)
        length = str(len(reply.body)).encode()
        headers = [(b"content-type", reply.media_type), (b"content-length", length), *reply.headers]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else reply.body
        await send({"type": "http.response.body", "body": body})

    async def _relay(self, reply: HttpReply, stream: AnswerStream, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a streamed answer part by part. What comes while the client takes a part is the next one.

        A server's `send` raises nothing when the client has left, so a task listens for that.
        """
        watch = asyncio.create_task(until_disconnected(receive))
        watch.add_done_callback(lambda task: None if task.cancelled() else stream.cancel())
        headers = [*([(b"content-type", reply.media_type)] if reply.media_type else []), *reply.headers]
        try:
            await send({"type": "http.response.start", "status": reply.status, "headers": headers})
            more = True
            while more and (part := await stream.next()):
                # The last part goes with the end, if that is known by now.
                more = not stream.is_whole
                async with asyncio.timeout(self._send_timeout_s):
                    await send({"type": "http.response.body", "body": part, "more_body": more})
            if stream.is_broken:
                await _abort(scope)
            elif more and stream.status != 499:
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            stream.cancel(408)
            await _abort(scope)
        finally:
            watch.cancel()
            stream.cancel()

    async def _answer(self, scope: Scope, receive: Receive) -> HttpReply:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        handler = self.handlers.get(method)
        if handler is None:
            allowed = ", ".join(sorted([*self.handlers, *(["HEAD"] if "GET" in self.handlers else [])]))
            return _error(scope, 405, f"use {allowed} here", ((b"allow", allowed.encode()),))
        try:
            return await handler(scope, receive)
        except ClientGone:
            raise
        except RequestRefused as error:
            retry_after = None if error.retry_after_s is None else str(math.ceil(error.retry_after_s)).encode()
            headers = () if retry_after is None else ((b"retry-after", retry_after),)
            return _error(scope, error.status, str(error), headers + _NO_RETRY if error.status == 429 else headers)
        except HttpError as error:
            return _error(scope, error.status, str(error), error.headers, error.details)
        except InvalidRequest as error:
            return _error(scope, error.status, str(error))
        except Exception:
            _LOG.exception("the gateway failed on %s %s", scope["method"], scope["path"])
            return _error(scope, 500, "the gateway failed; the platform's log has the details")


def _error(
    scope: Scope, status: int, message: str, headers: Headers = (), details: dict[str, Any] | None = None
) -> HttpReply:
    """Return an error in the format of the path: a sentence for v2, else the format of the control API."""
    # The message may quote the caller's text, which may contain lone surrogates.
    sentence = message.encode("utf-8", "replace").decode()
    if is_inference_protocol(scope["path"]):
        return HttpReply(status, msgspec.json.encode({"error": sentence}), headers)
    problem = {"code": _CODES.get(status, "http_error"), "message": sentence, **(details or {})}
    return HttpReply(status, msgspec.json.encode({"error": problem}), headers)


async def _abort(scope: Scope) -> None:
    """Close the client's connection, whatever was written to it."""
    if (abort := scope.get(ABORT)) is not None:
        abort()
        # The server hears of it in its next turn.
        await asyncio.sleep(0)


def identified(scope: Scope) -> bytes:
    """The request's id: what it came with, if that is up to 128 printable characters, else a new one, which it gets."""
    given = header_of(scope, REQUEST_ID)
    if given and len(given) <= _MAX_ID_BYTES and given.isascii() and given.decode().isprintable():
        return given
    made = secrets.token_hex(16).encode()
    scope["headers"] = [*(pair for pair in scope["headers"] if pair[0] != REQUEST_ID), (REQUEST_ID, made)]
    return made


def _naming(request_id: bytes, reply: HttpReply) -> HttpReply:
    """The reply with the request's id, unless an application has named one itself."""
    if any(name == REQUEST_ID for name, _ in reply.headers):
        return reply
    return msgspec.structs.replace(reply, headers=(*reply.headers, (REQUEST_ID, request_id)))


def _as_refusal(send: Send) -> Send:
    """A `send` for WebSockets that takes the messages of HTTP too: with them the handshake is refused."""

    async def sender(message: Message) -> None:
        if message["type"].startswith("http."):
            message = {**message, "type": "websocket." + message["type"]}
        await send(message)

    return sender


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """The value of the request's first header of this name, in lower case; None without one."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def accepts_sse(scope: Scope) -> bool:
    """Whether the client asks for server-sent events, and not for less than that."""
    given = header_of(scope, b"accept")
    if given is None or b"event-stream" not in given:
        return False
    accepted = given.decode("latin-1").lower()
    return any(part.partition(";")[0].strip() == EVENT_STREAM for part in accepted.split(","))


async def read_body(scope: Scope, receive: Receive, limit_mib: int, *, is_as_sent: bool = False) -> bytes:
    """Read the whole body, and decompress one in gzip or deflate, unless it is wanted as it was sent.

    Raises HttpError: 413 above the limit, before or after decompression, 415 for another Content-Encoding, 400 if the
    compressed data is damaged.
    """
    encoding = b"identity" if is_as_sent else (header_of(scope, b"content-encoding") or b"identity").strip().lower()
    if encoding not in (b"identity", b"gzip", b"deflate"):
        raise HttpError(415, "send the body as it is, or with Content-Encoding gzip or deflate")
    limit_bytes = limit_mib << 20
    too_large = HttpError(
        413, f"the body is over {limit_mib} MiB; send fewer items per request, or deploy with a higher max_body"
    )
    length = header_of(scope, b"content-length")
    if length is not None and length.isdigit() and (len(length) > 12 or int(length) > limit_bytes):
        raise too_large
    chunks: list[bytes] = []
    num_bytes = 0
    is_complete = False
    while not is_complete:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left while it sent the body")
        chunks.append(message.get("body", b""))
        num_bytes += len(chunks[-1])
        if num_bytes > limit_bytes:
            raise too_large
        is_complete = not message.get("more_body", False)
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if encoding == b"identity":
        return body
    try:
        found = decompressed(body, encoding.decode(), limit_bytes)
    except BadCompression as error:
        raise HttpError(400, str(error)) from None
    if found is None:
        raise too_large
    return found


def compressed_if_asked(scope: Scope, reply: HttpReply) -> HttpReply:
    """The reply with its body compressed, if the request's Accept-Encoding names gzip or deflate; small ones as is."""
    asked = (header_of(scope, b"accept-encoding") or b"").decode("latin-1")
    if not asked or len(reply.body) < _MIN_COMPRESSED_BYTES:
        return reply
    found = compressed(reply.body, asked)
    if found is None:
        return reply
    encoding, body = found
    headers = (*reply.headers, (b"content-encoding", encoding.encode()), (b"vary", b"accept-encoding"))
    return msgspec.structs.replace(reply, body=body, headers=headers)
