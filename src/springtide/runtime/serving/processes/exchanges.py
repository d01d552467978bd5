"""HTTP/1.1 to a command's port: connections that are kept, with one exchange at a time on each.

httptools parses the heads of answers; the bytes of their bodies are passed on as they come.
"""

from __future__ import annotations

import asyncio
from typing import cast

import httptools

from springtide.serving.frames import HttpHead, HttpStart

# Servers close connections that nobody uses after some seconds; one that is not older than this is hardly ever lost.
_IDLE_S = 1.0
_MAX_IDLE = 64
_CONNECT_S = 5.0
_MAX_HEAD_BYTES = 64 << 10
# Read ahead of the client no further than this.
_MAX_BUFFERED_BYTES = 256 << 10
_FIRST_FINAL = 200


class UpstreamLost(Exception):
    """The connection ended, or brought no HTTP, before the answer was complete; `has_begun` if a part had come."""

    def __init__(self, sentence: str, *, has_begun: bool = False) -> None:
        super().__init__(sentence)
        self.has_begun = has_begun


class Exchange(asyncio.Protocol):
    """One connection, and the answer that comes on it."""

    def __init__(self) -> None:
        self.is_reused = False
        self.is_complete = False
        self.may_be_kept = False
        self.idle_since_s = 0.0
        self.transport: asyncio.Transport | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._start: HttpStart | None = None
        self._parts: list[bytes] = []
        self._num_buffered = self._num_received = 0
        self._is_head = self._is_until_end = self._is_paused = False
        self._trouble = ""
        self._waiting: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)

    def ask(self, request: bytes, *, is_head: bool = False) -> None:
        """Send a request; of the answer to a HEAD only the head comes."""
        assert self.transport is not None, "it is connected"
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._start, self._num_received = [], None, 0
        self._is_head, self._is_until_end = is_head, False
        self.is_complete = self.may_be_kept = False
        self.transport.write(request)

    async def head(self) -> HttpStart:
        """The head of the answer. Raises UpstreamLost."""
        while self._start is None:
            self._raise_if_lost()
            await self._wait()
        return self._start

    async def next(self) -> bytes:
        """What has come of the body since the last call; empty at its end. Raises UpstreamLost."""
        while not self._parts and not self.is_complete:
            self._raise_if_lost()
            await self._wait()
        return self.taken()

    def taken(self) -> bytes:
        """What has come of the body, without waiting."""
        if not self._parts:
            return b""
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._num_buffered = 0
        if self._is_paused and self.transport is not None:
            self._is_paused = False
            self.transport.resume_reading()
        return body

    def abort(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.is_complete:
            # It was not asked for more.
            self.abort()
            return
        self._num_received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("it answered with another protocol than HTTP")
        except httptools.HttpParserError as error:
            self._fail(f"its answer is no HTTP ({str(error) or type(error).__name__})")
        if self._start is None and self._num_received > _MAX_HEAD_BYTES:
            self._fail(f"the head of its answer is longer than {_MAX_HEAD_BYTES} bytes")
        self._wake()

    def eof_received(self) -> None:
        """Close the connection too: nothing more comes on it."""

    def connection_lost(self, exc: Exception | None) -> None:
        if self._start is not None and self._is_until_end and exc is None:
            self.is_complete = True
        self.may_be_kept = False
        self._trouble = self._trouble or "it closed the connection"
        self.transport = None
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL:
            # One that only says that another follows.
            self._headers = []
            return
        names = dict(self._headers)
        is_chunked = b"chunked" in names.get(b"transfer-encoding", b"").lower()
        self._is_until_end = not is_chunked and b"content-length" not in names
        self._start = HttpStart(status, tuple(self._headers))
        if self._is_head:
            self.is_complete = True

    def on_body(self, body: bytes) -> None:
        if self.is_complete:
            return
        self._parts.append(body)
        self._num_buffered += len(body)
        if self._num_buffered > _MAX_BUFFERED_BYTES and not self._is_paused and self.transport is not None:
            self._is_paused = True
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._start is not None and not self.is_complete:
            self.is_complete = True
            self.may_be_kept = bool(self._parser.should_keep_alive())

    def _fail(self, sentence: str) -> None:
        self._trouble = sentence
        self.abort()

    def _raise_if_lost(self) -> None:
        if self._trouble:
            raise UpstreamLost(self._trouble, has_begun=self._num_received > 0)

    async def _wait(self) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class Upstream:
    """The connections to one port. Everything runs on one event loop."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._idle: list[Exchange] = []

    async def connection(self, *, is_new: bool = False) -> Exchange:
        """A connection for one exchange, a kept one unless it is to be new. Raises OSError, TimeoutError."""
        loop = asyncio.get_running_loop()
        while self._idle and not is_new:
            kept = self._idle.pop()
            if kept.transport is not None and not kept.transport.is_closing():
                if loop.time() - kept.idle_since_s < _IDLE_S:
                    kept.is_reused = True
                    return kept
                kept.abort()
        async with asyncio.timeout(_CONNECT_S):
            _, exchange = await loop.create_connection(Exchange, self.host, self.port)
        return exchange

    def give_back(self, exchange: Exchange) -> None:
        """Keep the connection for another exchange if its answer allows that, else close it."""
        if exchange.may_be_kept and exchange.transport is not None and len(self._idle) < _MAX_IDLE:
            exchange.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(exchange)
        else:
            exchange.abort()

    def close(self) -> None:
        """Close all that is kept."""
        for exchange in self._idle:
            exchange.abort()
        self._idle.clear()


def written_request(head: HttpHead, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    """The bytes of a request for `target`, with a length that fits the body."""
    lines = [head.method.encode(), b" ", target, b" HTTP/1.1\r\n"]
    for name, value in headers:
        lines += [name, b": ", value, b"\r\n"]
    if body or head.method in ("POST", "PUT", "PATCH"):
        lines.append(b"content-length: %d\r\n" % len(body))
    return b"".join([*lines, b"\r\n", body])
