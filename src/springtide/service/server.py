"""Serves one application on one socket: the server, the signals that end it, and the crash points for tests."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from springtide.core.errors import BackendError, InvalidRequest
from springtide.service.api.connections import SOCKET_SETTINGS, connection_class, raise_descriptor_limit
from springtide.service.gateway.application import Gateway

LOOPBACK = "127.0.0.1"
CRASH_AT = "SPRINGTIDE_CRASH_AT"


def server_of(app: ASGIApp) -> uvicorn.Server:
    """A server for the application; pass the sockets to `run`. It logs only warnings and errors."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=connection_class(raise_descriptor_limit()),
            **SOCKET_SETTINGS,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
            # A process that stood still for some seconds would close connections as idle that hold a request.
            timeout_keep_alive=20,
            lifespan="on",
        )
    )


def lifespan_of(gateway: Gateway) -> Callable[[Any], contextlib.AbstractAsyncContextManager[None]]:
    """The application's lifespan: start the gateway's tasks before serving and end them afterwards."""

    @contextlib.asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        await gateway.startup()
        try:
            yield
        finally:
            await gateway.shutdown()

    return lifespan


def bind(port: int, host: str = LOOPBACK) -> socket.socket:
    """Listen on a TCP port (0: a free one). Raises BackendError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise BackendError(
            f"port {port} of {host} cannot be used ({error.strerror}); choose another with --port, or --port 0"
        ) from error
    return listener


@contextlib.contextmanager
def signals_end(server: uvicorn.Server) -> Iterator[None]:
    """Make SIGTERM, SIGINT and SIGHUP (a closed terminal) end the server, without interrupting the cleanup after it.

    uvicorn raises a caught signal again after it has ended: then these handlers run instead of the default ones.
    """
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {name: signal.signal(name, lambda *_: setattr(server, "should_exit", True)) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def crash_point_of(setting: str) -> Callable[[str], None]:
    """Parse "name:n": the process ends without any cleanup when it reaches the named crash point for the n-th time.

    Used by tests that kill the control plane between two effects. An empty setting does nothing.
    Raises InvalidRequest if n is not a number.
    """
    if not setting:
        return lambda name: None
    wanted, _, count = setting.rpartition(":")
    if not count.isdigit():
        raise InvalidRequest(f"{CRASH_AT} must read name:n, got {setting!r}")
    left = [int(count)]
    lock = threading.Lock()

    def crash_point(name: str) -> None:
        if name != wanted:
            return
        with lock:
            left[0] -= 1
            if left[0] == 0:
                os._exit(137)

    return crash_point


def configure_logging() -> None:
    """Log to standard error with time and level; `springtide up` redirects that to platform.log."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # The HTTP client logs a line for every call to an API server, which would hide everything else.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
