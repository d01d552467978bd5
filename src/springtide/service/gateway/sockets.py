"""A WebSocket between a client and an application: its messages in both directions, and what closes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from starlette.types import Message, Receive, Send
from uvicorn.protocols.utils import ClientDisconnected

from springtide.service.gateway.streams import SocketStream
from springtide.serving.socket_messages import BadMessage, MessageReader, SocketMessage, close_message

# How long the application may go on after its client has closed, or it has itself, before it is cancelled.
_END_S = 8.0
_CODE_S = 0.5
_NO_CODE = 1005
_ABNORMAL = 1006
_TOO_BIG = 1009
_FAILED = 1011
_PROTOCOL = b"sec-websocket-protocol"


class SocketRelay:
    """Passes messages on between a client, by ASGI, and an application, until one of them closes.

    A message of the client may have `max_bytes`; one of the application that the client does not take within
    `send_timeout_s` ends the connection by `abort`. `lost` is done when the client's connection is.
    """

    def __init__(
        self,
        stream: SocketStream,
        *,
        max_bytes: int,
        send_timeout_s: float,
        abort: Callable[[], None],
        lost: asyncio.Future[None],
    ) -> None:
        self._stream = stream
        self._lost = lost
        self._max_bytes = max_bytes
        self._send_timeout_s = send_timeout_s
        self._abort = abort

    async def run(self, receive: Receive, send: Send, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Accept the WebSocket and relay. `headers` are those of the answer to the handshake."""
        stream = self._stream
        tasks: list[asyncio.Task[SocketMessage | None]] = []
        try:
            await send(_accept(headers))
            inward, outward = tasks = [
                asyncio.create_task(self._from_client(receive)),
                asyncio.create_task(self._to_client(send)),
            ]
            ends: list[asyncio.Future[Any]] = [*tasks, self._lost]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done() and not outward.done():
                # Its code may be on the way, unless the application takes nothing.
                await asyncio.wait([inward], timeout=_CODE_S)
                if not inward.done():
                    raise ClientDisconnected
            closing = (inward if inward.done() else outward).result()
            if closing is not None:
                # Not by the client: the application has closed it, or is lost, or a limit is passed.
                async with asyncio.timeout(self._send_timeout_s):
                    await send({"type": "websocket.close", "code": closing.code, "reason": closing.body.decode()})
                stream.give_now(closing)
        except ClientDisconnected:
            stream.give_now(close_message(_ABNORMAL))
        except TimeoutError:
            stream.status = 408
            stream.give_now(close_message(_ABNORMAL))
            self._abort()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._until_end()

    async def _until_end(self) -> None:
        """Give the application's code a while to end, then cancel it."""
        try:
            async with asyncio.timeout(_END_S):
                while await self._stream.next():
                    pass
        except TimeoutError:
            pass
        finally:
            self._stream.cancel()

    async def _from_client(self, receive: Receive) -> SocketMessage | None:
        """Pass the client's messages on; returns when it has closed, or with what to close it with."""
        while (message := await receive())["type"] == "websocket.receive":
            text = message.get("text")
            body = message["bytes"] if text is None else text.encode("utf-8", "replace")
            if len(body) > self._max_bytes:
                return close_message(_TOO_BIG, f"a message may have {self._max_bytes >> 20} MiB here")
            await self._stream.give(SocketMessage("bytes" if text is None else "text", body))
        self._stream.give_now(close_message(message.get("code") or _NO_CODE, message.get("reason") or ""))
        return None

    async def _to_client(self, send: Send) -> SocketMessage:
        """Pass the application's messages on; returns with what to close the client with."""
        reader = MessageReader()
        while part := await self._stream.next():
            try:
                messages = reader.feed(part)
            except BadMessage as error:
                return close_message(_FAILED, str(error))
            for message in messages:
                if message.kind == "close":
                    return close_message(_sendable(message.code), message.body.decode("utf-8", "replace"))
                value = message.body.decode("utf-8", "replace") if message.kind == "text" else message.body
                async with asyncio.timeout(self._send_timeout_s):
                    await send({"type": "websocket.send", message.kind: value})
        failed = self._stream.error
        return close_message() if failed is None else close_message(_FAILED, str(failed))


def _accept(headers: Iterable[tuple[bytes, bytes]]) -> Message:
    chosen = [value for name, value in headers if name == _PROTOCOL]
    passed = [(name, value) for name, value in headers if not name.startswith(b"sec-websocket-")]
    accept: dict[str, Any] = {"type": "websocket.accept", "headers": passed}
    if chosen:
        accept["subprotocol"] = chosen[0].decode("latin-1")
    return accept


def _sendable(code: int) -> int:
    """The code, or that of a failure for one that may not be sent."""
    return code if 1000 <= code < 5000 and code not in (1004, _NO_CODE, _ABNORMAL, 1015) else _FAILED
