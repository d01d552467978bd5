"""Calls of the gateway by HTTP/1.1 on connections that are kept, and the events of its streamed answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from urllib.parse import urlsplit

from grpc import StatusCode

from springtide.runtime.serving.processes.exchanges import Exchange, Upstream, UpstreamLost, written_request
from springtide.service.grpc.translation import CallFailed, HttpAnswer, HttpCall
from springtide.serving.frames import HttpHead, HttpStart

_UNREACHABLE = "the gateway does not answer: it may be starting again; try again in some seconds"
Headers = list[tuple[bytes, bytes]]


class GatewayClient:
    """Sends calls to the gateway at `url`, whose host is an address. Everything runs on one event loop."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._upstream = Upstream(parts.hostname or "", parts.port or 80)
        self._host = parts.netloc.encode()

    async def ask(self, call: HttpCall, headers: Iterable[tuple[bytes, bytes]]) -> HttpAnswer:
        """The whole answer to a call. A call that is cancelled closes its connection. Raises CallFailed."""
        async with self.opened(call, headers) as (start, exchange):
            return await _whole(start, exchange)

    @contextlib.asynccontextmanager
    async def opened(
        self, call: HttpCall, headers: Iterable[tuple[bytes, bytes]]
    ) -> AsyncIterator[tuple[HttpStart, Exchange]]:
        """The head of the answer to a call, and the exchange on which its body comes. Raises CallFailed."""
        head = HttpHead(call.method, "http", call.target, b"", ())
        sent = [(b"host", self._host), *headers]
        if call.head_length is not None:
            sent.append((b"inference-header-content-length", b"%d" % call.head_length))
        request = written_request(head, call.target.encode("ascii"), sent, call.body)
        exchange: Exchange | None = None
        try:
            exchange = await self._upstream.connection()
            try:
                start = await _asked(exchange, request)
            except UpstreamLost as error:
                if error.has_begun or not exchange.is_reused:
                    raise
                # The gateway has closed a kept connection just when it was used again.
                exchange = await self._upstream.connection(is_new=True)
                start = await _asked(exchange, request)
            yield start, exchange
        except (OSError, UpstreamLost) as error:
            raise CallFailed(StatusCode.UNAVAILABLE, f"{_UNREACHABLE} ({error})") from None
        finally:
            if exchange is not None:
                self._upstream.give_back(exchange)

    def close(self) -> None:
        """Close the connections that are kept."""
        self._upstream.close()


async def _asked(exchange: Exchange, request: bytes) -> HttpStart:
    exchange.ask(request)
    return await exchange.head()


async def _whole(start: HttpStart, exchange: Exchange) -> HttpAnswer:
    parts: list[bytes] = []
    while part := await exchange.next():
        parts.append(part)
    return answer_of(start, parts[0] if len(parts) == 1 else b"".join(parts))


def answer_of(start: HttpStart, body: bytes) -> HttpAnswer:
    """The answer with this head and body."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in start.headers}
    return HttpAnswer(start.status, headers, body)


async def events_of(start: HttpStart, exchange: Exchange) -> AsyncIterator[tuple[str, str]]:
    """The type and the data of each server-sent event of an answer; the type is empty where none is named."""
    buffered = b""
    while part := await exchange.next():
        *events, buffered = (buffered + part).split(b"\n\n")
        for event in events:
            if written := event.strip(b"\n"):
                yield _event(written.decode("utf-8", "replace"))


def _event(written: str) -> tuple[str, str]:
    kind, data = "", []
    for line in written.split("\n"):
        field, _, value = line.partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))
        elif field == "event":
            kind = value.strip()
    return kind, "\n".join(data)
