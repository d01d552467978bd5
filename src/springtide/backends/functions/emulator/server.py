"""The emulator as one process: its sockets, the record by which clients find it, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from springtide.backends.functions.emulator.admin_api import AdminApi
from springtide.backends.functions.emulator.boxes import Boxes
from springtide.backends.functions.emulator.config import EmulatorConfig
from springtide.backends.functions.emulator.fleet import Fleet
from springtide.backends.functions.emulator.lambda_api import LambdaApi
from springtide.backends.functions.emulator.launch import RECORD_NAME, EmulatorAddress
from springtide.backends.functions.emulator.logs import LogIndex
from springtide.backends.functions.emulator.runtime_api import RuntimeApi
from springtide.backends.processes import identify
from springtide.core.errors import BackendError
from springtide.storage.files import make_private

_MAX_INSTANCES = 512
# Warm instances beyond the concurrency limit.
_SPARE_INSTANCES = 8
_BACKLOG = 256
_MAX_OPEN_FILES = 16_384
# Long enough that a connection which a client keeps is not closed during its next call.
_KEEP_ALIVE_S = 3600
_IDLE_CHECK_S = 1.0


def run(config: EmulatorConfig, state_dir: Path, token: str, port: int) -> int:
    """Serve until told to stop. Raises BackendError if another emulator has this state directory."""
    make_private(state_dir)
    with (state_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BackendError(f"another emulator runs on {state_dir}") from None
        # Left over from an emulator that was killed; its functions died with it.
        for name in ("instances", "code"):
            shutil.rmtree(state_dir / name, ignore_errors=True)
        # Each instance has a socket and a pipe; the usual 1,024 descriptors would be too few for hundreds.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MAX_OPEN_FILES)), hard))
        asyncio.run(_serve(config, state_dir, token, port))
    return 0


async def _serve(config: EmulatorConfig, state_dir: Path, token: str, port: int) -> None:
    front = _listen(port)
    num_instances = min(config.service.concurrency + _SPARE_INSTANCES, _MAX_INSTANCES)
    backs = [_listen(0) for _ in range(num_instances)]
    addresses = {back.getsockname()[1]: f"127.0.0.1:{back.getsockname()[1]}" for back in backs}
    logs = LogIndex(lambda: round(time.time() * 1000))
    fleet = Fleet(config, Boxes(config, state_dir, logs), addresses)
    own_port = front.getsockname()[1]

    def stop() -> None:
        # First: what waits for a function would hold up the server's end.
        fleet.end_all()
        server.should_exit = True

    admin = AdminApi(fleet, token, stop)
    app = _by_port(
        own_port,
        Starlette(routes=[*LambdaApi(fleet, logs, token, state_dir).routes, *admin.routes]),
        Starlette(routes=RuntimeApi(fleet).routes),
    )
    server: uvicorn.Server = _Server(
        stop,
        uvicorn.Config(
            app,
            loop="asyncio",
            http="httptools",
            ws="none",
            lifespan="off",
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            # A request that still waits for a function at the end would wait for the function's lifetime.
            timeout_graceful_shutdown=1,
        ),
    )
    record = state_dir / RECORD_NAME
    idle = asyncio.get_running_loop().create_task(_stop_when_idle(config, fleet, stop))
    try:
        _write_record(record, own_port, token)
        if sys.stdout.isatty():
            sys.stdout.write(f"functions at http://127.0.0.1:{own_port}; the token is in {record}\n")
        await server.serve(sockets=[front, *backs])
    finally:
        idle.cancel()
        record.unlink(missing_ok=True)
        await fleet.close()
        for one in (front, *backs):
            with contextlib.suppress(OSError):
                one.close()


class _Server(uvicorn.Server):
    """Uvicorn raises a caught signal again at its end, before the functions could be ended: handle signals here."""

    def __init__(self, stop: Callable[[], None], config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop = stop

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM request the end, however often they are received."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        yield


def _by_port(own_port: int, outside: ASGIApp, inside: ASGIApp) -> ASGIApp:
    """The provider's API on its port, the Runtime API on all others."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        server = scope.get("server")
        await (outside if server is not None and server[1] == own_port else inside)(scope, receive, send)

    return app


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        raise BackendError(f"the emulator cannot listen on port {port}: {error.strerror}") from error
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _write_record(path: Path, port: int, token: str) -> None:
    """For clients that look for a running emulator; it holds the token, so only its owner may read it."""
    identity = identify(os.getpid())
    assert identity is not None
    address = EmulatorAddress(endpoint=f"http://127.0.0.1:{port}", token=token, process=identity)
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(address))
    temporary.replace(path)


async def _stop_when_idle(config: EmulatorConfig, fleet: Fleet, stop: Callable[[], None]) -> None:
    while config.exit_idle_s:
        await asyncio.sleep(_IDLE_CHECK_S)
        if not fleet.num_running and time.monotonic() - fleet.used_at_s > config.exit_idle_s:
            stop()
            return


def ignore_hang_up() -> None:
    """Ignore the hang-up of a terminal: the emulator runs in the background."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
