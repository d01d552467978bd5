"""The IP sockets of this process, found by its descriptors: those that gloo opened are reachable in no other way."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import socket
import stat
import struct
import sys
from collections.abc import Iterator

_IP = (socket.AF_INET, socket.AF_INET6)
# From asm-generic/socket.h and linux/bpf_common.h; Python has no names for them.
_SO_ATTACH_FILTER = 26
_BPF_RET = 0x06


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open descriptors to the hard one: gloo ends the process when it cannot accept."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connected_sockets(peers: frozenset[str] = frozenset(), port: int = 0) -> dict[int, int]:
    """The inodes of this process's connected IP sockets, by descriptor; only those to `peers` and `port`, if given."""
    found: dict[int, int] = {}
    for descriptor, inode, duplicate in _ip_sockets():
        if not _is_listening(duplicate):
            with contextlib.suppress(OSError):
                host, its_port = duplicate.getpeername()[:2]
                # A dual-stack server sees IPv4 peers as IPv4-mapped IPv6 addresses.
                if (not peers or str(host).removeprefix("::ffff:") in peers) and port in (0, its_port):
                    found[descriptor] = inode
    return found


def refuse_connections(addresses: bytes) -> int:
    """Have the kernel drop every new connection to the listening sockets whose socket address is in `addresses`.

    Established connections go on; the filter ends with its socket. Returns the number of sockets that were found. Where
    the kernel refuses filters, that is said once, and the sockets stay as they are.
    """
    instruction = ctypes.create_string_buffer(struct.pack("@HBBI", _BPF_RET, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(instruction))
    num_found = 0
    for _, _, duplicate in _ip_sockets():
        if _is_listening(duplicate) and _socket_address(duplicate) in addresses:
            num_found += 1
            try:
                duplicate.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            except OSError as error:
                _say(f"other accounts of this machine can connect to this worker: no socket filter, {error.strerror}")
    if not num_found:
        _say("other accounts of this machine can connect to this worker: gloo's listening socket was not found")
    return num_found


def _ip_sockets() -> Iterator[tuple[int, int, socket.socket]]:
    """Descriptor, inode and a duplicate, open until the next one is asked for, of each IP socket."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptor = int(name)
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                    if duplicate.family in _IP:
                        yield descriptor, status.st_ino, duplicate


def _is_listening(link: socket.socket) -> bool:
    return bool(link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _socket_address(link: socket.socket) -> bytes:
    """The beginning of the C structure with the socket's own address, as gloo publishes it."""
    host, port, *more = link.getsockname()
    flow = struct.pack("!I", more[0]) if more else b""
    return struct.pack("=H", link.family) + struct.pack("!H", port) + flow + socket.inet_pton(link.family, host)


@functools.cache
def _say(sentence: str) -> None:
    sys.stderr.write(f"springtide: {sentence}\n")
