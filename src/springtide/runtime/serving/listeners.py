"""Where a serving replica listens: a private unix socket, or a TCP address that requires a handshake with a secret."""

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
    """The address at which a replica listens for other machines, and the secret that it shares with gateways."""

    host: str
    port: int
    token: str


class ReplicaListener(Protocol):
    """A listening socket. The gateway connects to `address`; with a `token`, clients must prove that they know it."""

    address: str
    token: str
    socket: socket.socket

    def remove(self) -> None:
        """Remove what listening has left behind. The caller has closed the socket."""
        ...


class UnixListener:
    """A unix socket (mode 0600) in a directory that only this user can enter. The constructor raises OSError."""

    token = ""

    def __init__(self, directory: Path, replica_id: ReplicaId) -> None:
        self._path, self._own_directory = _socket_path(directory, replica_id)
        self.address = f"unix://{self._path}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The directory is private already, so the socket is never reachable for other users before chmod.
            self.socket.bind(str(self._path))
            os.chmod(self._path, 0o600)
            self.socket.listen(MAX_CONNECTIONS)
        except OSError:
            self.socket.close()
            raise

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        if self._own_directory is not None:
            self._own_directory.cleanup()


class TcpListener:
    """A TCP socket at the replica's own address only, not at all of the machine's. The constructor raises OSError."""

    def __init__(self, guard: HandshakeGuard) -> None:
        self.token = guard.token
        family = socket.AF_INET6 if ":" in guard.host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind((guard.host, guard.port))
            self.socket.listen(_BACKLOG)
        except OSError:
            self.socket.close()
            raise
        self.address = tcp_address(guard.host, self.socket.getsockname()[1])

    def remove(self) -> None:
        """Does nothing: a port leaves nothing behind."""


def tcp_address(host: str, port: int) -> str:
    """`tcp://host:port`, with an IPv6 host in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _socket_path(directory: Path, replica_id: ReplicaId) -> tuple[Path, tempfile.TemporaryDirectory[str] | None]:
    """A socket path below the system's length limit, in a private directory; a temporary one if `directory` is long."""
    private = directory / "sockets"
    path = private / f"{replica_id}.sock"
    if len(os.fsencode(path)) < _MAX_SOCKET_PATH_BYTES:
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
        private.chmod(0o700)
        path.unlink(missing_ok=True)
        return path, None
    own = tempfile.TemporaryDirectory(prefix="springtide-")
    return Path(own.name) / "replica.sock", own
