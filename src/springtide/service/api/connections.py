"""Limits on connections: their number, and the time and size of heads, and of bodies after the answer.

Without them a client that opens idle connections, never ends a header, or is refused and goes on sending, would use up
the descriptors and the memory of the control plane.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

from springtide.service.gateway.endpoint import ABORT, LOST
from springtide.serving.socket_messages import MAX_MESSAGE_BYTES

_log = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 64 * 1024
# What a client may still send of a body after the answer: many read an answer only when they have sent everything.
REST_TIMEOUT_S = 5.0
MAX_REST_BYTES = 8 * 1024 * 1024
WANTED_DESCRIPTORS = 65_536
# Reserved for the journal, workers, replicas and log files.
_RESERVED_DESCRIPTORS = 256


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of open files towards its hard limit, to 65,536 at most. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else WANTED_DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class BoundedConnection(HttpToolsProtocol):
    """An HTTP connection whose request heads must arrive within 10 s and 64 KiB; surplus connections are closed.

    A request that is answered before its body has come, like one without the token, may send the rest of it for 5 s.
    """

    max_connections = 4096
    head_timeout_s = HEAD_TIMEOUT_S
    rest_timeout_s = REST_TIMEOUT_S
    _timer: asyncio.TimerHandle | None = None
    _num_bytes_left = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection unless the maximum is reached."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; close the connection if a request's head or the rest of its body becomes too large."""
        super().data_received(data)
        if self._timer is None:
            return
        self._num_bytes_left -= len(data)
        if self._num_bytes_left < 0:
            self._close()

    def on_message_begin(self) -> None:
        """Start the timeout of the head with the first byte of a request."""
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[ABORT] = self.transport.abort
        if self._timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """Stop the timeout: RequestLimits checks the body."""
        self._stop_timer()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Start the timeout of a body that was not read to its end."""
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body and not self.transport.is_closing():
            self._start_timer(self.rest_timeout_s, MAX_REST_BYTES)

    def on_message_complete(self) -> None:
        """Wait for the next request if this one was answered before its body had come."""
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete:
            self._await_head()

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over, which sends no further request."""
        super().handle_websocket_upgrade()
        self._stop_timer()

    def _await_head(self) -> None:
        self._start_timer(self.head_timeout_s, MAX_HEAD_BYTES)

    def _start_timer(self, seconds: float, num_bytes: int) -> None:
        self._stop_timer()
        self._num_bytes_left = num_bytes
        self._timer = self.loop.call_later(seconds, self._close)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _close(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.close()


class BoundedSocket(WSProtocol):
    """A WebSocket. Its messages have a limit and its client must answer pings, as uvicorn's settings say."""

    _lost: asyncio.Future[None] | None = None

    def handle_connect(self, event: Any) -> None:
        """Let what answers close the connection without waiting for what was written to it, and hear of its loss."""
        super().handle_connect(event)
        self._lost = self.loop.create_future()
        cast(dict[str, Any], self.scope).update({ABORT: self.transport.abort, LOST: self._lost})

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell what answers, which may be waiting for something else than the client's next message."""
        super().connection_lost(exc)
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)


# uvicorn's settings for them. Compressed messages could be far longer than what comes.
SOCKET_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {"ws": BoundedSocket, "ws_max_size": MAX_MESSAGE_BYTES, "ws_per_message_deflate": False}
)


def connection_class(num_descriptors: int) -> type[BoundedConnection]:
    """The protocol class for a process that may open `num_descriptors` files, some of which stay reserved."""

    class Connection(BoundedConnection):
        max_connections = max(64, min(BoundedConnection.max_connections, num_descriptors - _RESERVED_DESCRIPTORS))

    return Connection
