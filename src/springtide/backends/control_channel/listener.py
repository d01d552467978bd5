"""The listener that workers connect to; it pauses while descriptors are exhausted."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable

from springtide.backends.control_channel.reactor import Reactor

_log = logging.getLogger(__name__)

_ACCEPT_PAUSE_S = 0.2


class WorkerListener:
    """Accepts connections on the I/O thread once it is opened. Owns the listening socket."""

    def __init__(self, reactor: Reactor, listener: socket.socket, welcome: Callable[[socket.socket], None]) -> None:
        self._reactor = reactor
        self._listener = listener
        self._welcome = welcome
        self._is_shut = False

    @property
    def port(self) -> int:
        """The TCP port; 0 for a unix socket."""
        name = self._listener.getsockname()
        return int(name[1]) if isinstance(name, tuple) else 0

    def open(self) -> None:
        """Accept workers from now on, unless it has been shut."""
        if not self._is_shut:
            self._reactor.watch(self._listener.fileno(), selectors.EVENT_READ, self._accept)

    def shut(self) -> None:
        """Accept no more connections; workers that try again find the next executor."""
        self._is_shut = True
        self._reactor.unwatch(self._listener.fileno())

    def close(self) -> None:
        """Close the socket, after the thread has ended."""
        self._listener.close()

    def _accept(self, mask: int) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Most likely out of descriptors: workers wait in the backlog until some are free again.
                _log.error("cannot accept a worker: %s", error.strerror)
                self._reactor.unwatch(self._listener.fileno())
                self._reactor.after(_ACCEPT_PAUSE_S, self.open)
                return
            self._welcome(stream)
