"""The private directory of the control and zygote sockets, and helpers for sockets."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import struct
import tempfile
from pathlib import Path

from springtide.core.errors import BackendError

# Linux allows 107 bytes. The longest name in the directory is that of a zygote's socket before it listens.
MAX_SOCKET_PATH_BYTES = 100
_LONGEST_NAME = "zygote.sock.4194304"
_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 256
_KEEPALIVE_S = 10


def socket_directory(state_dir: Path) -> Path:
    """Return the private directory (0700, owned by this user) for this state directory's sockets; creates it.

    It lies in the state directory, or in the user's runtime or temporary directory if that path is too long.
    Raises BackendError if the directory belongs to another user.
    """
    directory = state_dir / "run"
    if len(os.fsencode(directory / _LONGEST_NAME)) >= MAX_SOCKET_PATH_BYTES:
        digest = hashlib.sha256(os.fsencode(state_dir.resolve())).hexdigest()[:16]
        name = f"springtide-{os.getuid()}-{digest}"
        directory = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / name
        if len(os.fsencode(directory / _LONGEST_NAME)) >= MAX_SOCKET_PATH_BYTES:
            directory = Path("/tmp") / name
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700, parents=True)
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise BackendError(f"{directory} belongs to another user; remove it, or use another state directory")
        directory.chmod(0o700)
    except OSError as error:
        raise BackendError(f"cannot make the socket directory {directory}: {error.strerror}") from error
    return directory


def remove_outside(directory: Path, state_dir: Path) -> None:
    """Remove the directory of an executor that has ended, if it lies outside the state directory it belongs to."""
    if directory.is_relative_to(state_dir):
        return
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


def listen(path: Path) -> socket.socket:
    """Return a listening unix socket (0600), replacing what an earlier process left at the path."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise BackendError(f"cannot listen on {path}: {error.strerror}") from error
    return listener


def peer_process(connection: socket.socket) -> tuple[int, int]:
    """Return the process number and the user id at the other end of a unix socket, as the kernel knows them."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user_id, _ = _CREDENTIALS.unpack(data)
    return pid, user_id


def free_tcp_port() -> int:
    """Return a port of the loopback interface that is free at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def listen_tcp(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; port 0 takes a free one. Raises BackendError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise BackendError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def prepare_tcp(connection: socket.socket) -> str:
    """Disable Nagle's algorithm and enable keepalive on a TCP connection; return the host at the other end."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    try:
        return str(connection.getpeername()[0])
    except OSError:
        # The other end is gone already; the next read will fail.
        return ""
