"""Where a serving replica listens: a private socket of its machine, or an address of its own behind a secret."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Protocol

import msgspec

from springtide.core.workload import ReplicaId

MAX_CONNECTIONS = 16
_BACKLOG = 64
_MAX_SOCKET_PATH_BYTES = 100


class HandshakeGuard(msgspec.Struct, frozen=True):
    """Where a replica listens that others reach over a network, and the secret that they share with it."""

    host: str
    port: int
    token: str


class ReplicaListener(Protocol):
    """A listening socket. `address` is what the gateway connects to; a client that does not know `token` is refused."""

    address: str
    token: str
    listener: socket.socket

    def remove(self) -> None:
        """Take away what listening has left behind; the socket is closed already."""
        ...


class PrivateDoor:
    """A unix socket (0600) in a directory that only this user can enter. Raises OSError."""

    token = ""

    def __init__(self, directory: Path, replica_id: ReplicaId) -> None:
        self._path, self._own_directory = _socket_path(directory, replica_id)
        self.address = f"unix://{self._path}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The directory is private before the socket is in it, so there is no instant at which it is not.
            self.listener.bind(str(self._path))
            os.chmod(self._path, 0o600)
            self.listener.listen(MAX_CONNECTIONS)
        except OSError:
            self.listener.close()
            raise

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        if self._own_directory is not None:
            self._own_directory.cleanup()


class GuardedDoor:
    """A TCP socket at the replica's own address, and at no other of the machine. Raises OSError."""

    def __init__(self, guard: HandshakeGuard) -> None:
        self.token = guard.token
        family = socket.AF_INET6 if ":" in guard.host else socket.AF_INET
        self.listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.listener.bind((guard.host, guard.port))
            self.listener.listen(_BACKLOG)
        except OSError:
            self.listener.close()
            raise
        self.address = tcp_address(guard.host, self.listener.getsockname()[1])

    def remove(self) -> None:
        """A port leaves nothing behind."""


def tcp_address(host: str, port: int) -> str:
    """The address of a host and a port, as gateways and workers take it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _socket_path(directory: Path, replica_id: ReplicaId) -> tuple[Path, tempfile.TemporaryDirectory[str] | None]:
    """Return a path short enough for a unix socket, in a directory that only this user can enter."""
    private = directory / "sockets"
    path = private / f"{replica_id}.sock"
    if len(os.fsencode(path)) < _MAX_SOCKET_PATH_BYTES:
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
        private.chmod(0o700)
        path.unlink(missing_ok=True)
        return path, None
    own = tempfile.TemporaryDirectory(prefix="springtide-")
    return Path(own.name) / "replica.sock", own
