"""A WebSocket to a command's port: the client's side of the protocol, by wsproto."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import wsproto
from wsproto import events
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from springtide.runtime.serving.calls import AsyncCall
from springtide.runtime.serving.processes.exchanges import UpstreamLost
from springtide.serving.frames import BatchOutcome, HttpHead, HttpStart
from springtide.serving.socket_messages import MAX_MESSAGE_BYTES, NORMAL_CLOSURE, SocketMessage, close_message

_READ_BYTES = 64 << 10
_SWITCHING = 101
_CLOSE_S = 5.0
# Of the handshake of one connection alone.
_OF_HANDSHAKE = frozenset(
    {b"sec-websocket-accept", b"sec-websocket-extensions", b"sec-websocket-key", b"sec-websocket-version"}
)
_PROTOCOL = b"sec-websocket-protocol"


class UpstreamSocket:
    """One WebSocket to the command, for one call."""

    def __init__(self, call: AsyncCall, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._call = call
        self._reader = reader
        self._writer = writer
        self._protocol = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._is_closed = False

    async def relay(self, head: HttpHead, target: bytes, headers: list[tuple[bytes, bytes]]) -> BatchOutcome:
        """Open it, and pass messages on both ways until either side closes it. Raises UpstreamLost, OSError."""
        await self._write(self._request(target, headers))
        from_client: asyncio.Task[None] | None = None
        try:
            async for event in self._events():
                if isinstance(event, events.RejectConnection):
                    return await self._refused(event)
                if isinstance(event, events.AcceptConnection):
                    await self._call.send_part(b"", HttpStart(_SWITCHING, _accepted_headers(event)))
                    from_client = asyncio.create_task(self._from_client())
                elif isinstance(event, events.TextMessage | events.BytesMessage):
                    await self._from_command(event)
                elif isinstance(event, events.Ping):
                    await self._write(event.response())
                elif isinstance(event, events.CloseConnection):
                    if self._protocol.state is wsproto.connection.ConnectionState.REMOTE_CLOSING:
                        await self._write(event.response())
                    if not self._is_closed:
                        code = NORMAL_CLOSURE if event.code in (1005, None) else int(event.code)
                        await self._call.send_message(close_message(code, event.reason or ""))
                    return BatchOutcome("ok", b"")
        finally:
            if from_client is not None:
                from_client.cancel()
        if self._is_closed:
            return BatchOutcome("ok", b"")
        raise UpstreamLost("it closed the connection", has_begun=self._call.has_begun)

    def _request(self, target: bytes, headers: list[tuple[bytes, bytes]]) -> events.Request:
        host = next((value for name, value in headers if name == b"host"), b"localhost")
        offered = [part.strip() for name, value in headers if name == _PROTOCOL for part in value.split(b",")]
        left_out = (*_OF_HANDSHAKE, _PROTOCOL, b"host")
        extra = [(name, value) for name, value in headers if name not in left_out]
        return events.Request(
            host=host.decode("latin-1"),
            target=target.decode("latin-1"),
            extra_headers=extra,
            subprotocols=[name.decode("latin-1") for name in offered if name],
        )

    async def _events(self) -> AsyncIterator[events.Event]:
        while data := await self._reader.read(_READ_BYTES):
            try:
                self._protocol.receive_data(data)
                for event in self._protocol.events():
                    yield event
            except RemoteProtocolError as error:
                raise UpstreamLost(f"what it sent is no WebSocket ({error})", has_begun=self._call.has_begun) from None

    async def _from_client(self) -> None:
        """Pass the client's messages on, and its end, after which the command has a while to close too."""
        while (message := await self._call.next_message()).kind != "close":
            if message.kind == "text":
                await self._write(events.TextMessage(data=message.body.decode()))
            else:
                await self._write(events.BytesMessage(data=message.body))
        self._is_closed = True
        # 1005 and 1006 say that there was no code, and cannot be sent.
        code = message.code if 1000 <= message.code < 5000 and message.code not in (1004, 1005, 1006, 1015) else 1000
        await self._write(events.CloseConnection(code=code, reason=message.body.decode() or None))
        await asyncio.sleep(_CLOSE_S)
        self._writer.transport.abort()

    async def _from_command(self, event: events.TextMessage | events.BytesMessage) -> None:
        """Pass a message on once all of its parts have come."""
        is_text = isinstance(event, events.TextMessage)
        part = event.data.encode() if isinstance(event, events.TextMessage) else bytes(event.data)
        self._num_bytes += len(part)
        if self._num_bytes > MAX_MESSAGE_BYTES:
            raise UpstreamLost(f"its message is longer than {MAX_MESSAGE_BYTES >> 20} MiB", has_begun=True)
        self._parts.append(part)
        if event.message_finished:
            body, self._parts, self._num_bytes = b"".join(self._parts), [], 0
            await self._call.send_message(SocketMessage("text" if is_text else "bytes", body))

    async def _refused(self, refusal: events.RejectConnection) -> BatchOutcome:
        """Pass on an answer that is no WebSocket."""
        headers = tuple((name.lower(), value) for name, value in refusal.headers)
        start: HttpStart | None = HttpStart(refusal.status_code, headers)
        if refusal.has_body:
            async for event in self._events():
                if isinstance(event, events.RejectData):
                    await self._call.send_part(bytes(event.data), start)
                    start = None
                    if event.body_finished:
                        break
        if start is not None:
            await self._call.send_part(b"", start)
        return BatchOutcome("ok", b"")

    async def _write(self, event: events.Event) -> None:
        try:
            self._writer.write(self._protocol.send(event))
        except LocalProtocolError:
            # The other side has closed it meanwhile.
            return
        await self._writer.drain()


def _accepted_headers(event: events.AcceptConnection) -> tuple[tuple[bytes, bytes], ...]:
    own = [] if event.subprotocol is None else [(_PROTOCOL, event.subprotocol.encode("latin-1"))]
    left_out = (*_OF_HANDSHAKE, _PROTOCOL, b"connection", b"upgrade", b"date", b"server")
    return (*((name, value) for name, value in event.extra_headers if name.lower() not in left_out), *own)
