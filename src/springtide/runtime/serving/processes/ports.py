"""A port for a command to listen on, which no other replica of this machine is given meanwhile."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from springtide.core.errors import BackendError

LOOPBACK = "127.0.0.1"
# Below the ports that systems give to outgoing connections.
_FIRST = 20_000
_LAST = 32_000
_ATTEMPTS = 200


@contextmanager
def held_port() -> Iterator[int]:
    """A free port of 127.0.0.1, held for the length of the `with` block. Raises BackendError if none is found.

    Holding the port itself would keep many programs from listening on it. So its number is held, by a name that goes
    with this process, and only among replicas: another program can still take the port.
    """
    for _ in range(_ATTEMPTS):
        port = random.randrange(_FIRST, _LAST)
        with socket.socket(socket.AF_UNIX) as name, socket.socket(socket.AF_INET) as probe:
            try:
                if sys.platform == "linux":
                    name.bind(f"\0springtide-port-{port}")
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            probe.close()
            yield port
            return
    raise BackendError(f"no port of {LOOPBACK} between {_FIRST} and {_LAST} is free for the command")
