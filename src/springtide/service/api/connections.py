"""How many connections there may be, and how long and how large the head of a request: bounds below the application.

Without them a client that opens connections and says nothing, or never ends a header, holds descriptors and memory
that the control plane needs.
"""

from __future__ import annotations

import asyncio
import logging
import resource

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_log = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 64 * 1024
WANTED_DESCRIPTORS = 65_536
# The journal, workers, replicas and log files need descriptors whatever happens on the port.
_RESERVED_DESCRIPTORS = 256


def raise_descriptor_limit() -> int:
    """Let this process open as many files as it may by itself (at most 65,536 are of use). Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else WANTED_DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class BoundedConnection(HttpToolsProtocol):
    """One HTTP connection: a request's head has to arrive within 10 s and 64 KiB; too many connections are refused."""

    max_connections = 4096
    head_timeout_s = HEAD_TIMEOUT_S
    _head_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, if there is room for one more."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless the head that it belongs to grows without end."""
        super().data_received(data)
        if self._head_timer is None:
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._close()

    def on_message_begin(self) -> None:
        """The first byte of a request: from here on its head is waited for."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """The head is there; what follows is bounded by the application."""
        self._stop_timer()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._num_head_bytes = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._close)

    def _stop_timer(self) -> None:
        timer, self._head_timer = self._head_timer, None
        if timer is not None:
            timer.cancel()

    def _close(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.close()


def connection_class(num_descriptors: int) -> type[BoundedConnection]:
    """The protocol for a process that may open `num_descriptors` files: connections never take the last of them."""

    class Connection(BoundedConnection):
        max_connections = max(64, min(BoundedConnection.max_connections, num_descriptors - _RESERVED_DESCRIPTORS))

    return Connection
