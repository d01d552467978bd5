"""One stream from a worker to another: by a private name on one machine, over tcp between machines."""

from __future__ import annotations

import secrets
import socket

_UNIX = "unix:"
_TCP = "tcp:"


def listen_for_stream(host: str) -> tuple[socket.socket, str]:
    """A socket that one other worker may connect to, and the address to give it. Raises OSError.

    `host` is where others reach this worker; empty where they are on its machine.
    """
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=1)
        return listener, f"{_TCP}{host}:{listener.getsockname()[1]}"
    # An abstract name has no length limit of a path and no file to clean up.
    name = f"springtide-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(1)
    return listener, _UNIX + name


def connect_stream(address: str, timeout_s: float) -> socket.socket:
    """Connect to what `listen_for_stream` has named. Raises OSError, ValueError for what is no such address."""
    if address.startswith(_UNIX):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(timeout_s)
        try:
            link.connect(f"\0{address.removeprefix(_UNIX)}")
        except OSError:
            link.close()
            raise
        return link
    if not address.startswith(_TCP):
        raise ValueError(f"{address!r} is no address of a stream")
    host, _, port = address.removeprefix(_TCP).rpartition(":")
    link = socket.create_connection((host, int(port)), timeout=timeout_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link
