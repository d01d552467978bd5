"""The IP sockets of this process, found by its descriptors: those that gloo opened are reachable in no other way."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
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
# From linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h and netinet/tcp.h.
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI2s2s16s16sIII")
_REPLY = struct.Struct("=BBBB48xIIIII")
_ALL_STATES = _NO_COOKIE = 0xFFFFFFFF
_TCP_ESTABLISHED = 1
_TCP_LISTEN = 10


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
                host, its_port = _host_and_port(duplicate.getpeername())
                if (not peers or host in peers) and port in (0, its_port):
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
                say_once(
                    f"other accounts of this machine can connect to this worker: no socket filter, {error.strerror}"
                )
    if not num_found:
        say_once("other accounts of this machine can connect to this worker: gloo's listening socket was not found")
    return num_found


def is_from_member(link: socket.socket, peers: frozenset[str] = frozenset()) -> bool:
    """Whether an accepted TCP connection may come from a member: on this machine, one of this account.

    On another machine, one at a host of `peers`, if there are any.
    """
    try:
        host, port = _host_and_port(link.getpeername())
        own_host, own_port = _host_and_port(link.getsockname())
        is_here, account = _look_up((host, port), (own_host, own_port), _TCP_ESTABLISHED)
    except OSError:
        return False
    if is_here or host == own_host or ipaddress.ip_address(host).is_loopback:
        return account == os.geteuid()
    return not peers or host in peers


def tells_accounts() -> bool:
    """Whether the kernel tells which account a socket of this machine belongs to."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as listener:
        _, account = _look_up(listener.getsockname(), ("0.0.0.0", 0), _TCP_LISTEN)
        return account == os.geteuid()
    return False


def _look_up(own: tuple[str, int], other: tuple[str, int], state: int) -> tuple[bool, int | None]:
    """Whether this machine has the TCP socket that is at `own` and connected to `other`, and its account.

    The account is None unless the socket is in that `state`: sockets that no process holds any more count as root's.
    Raises OSError.
    """
    family = socket.AF_INET6 if ":" in own[0] else socket.AF_INET
    ports = [struct.pack("!H", port) for _, port in (own, other)]
    hosts = [socket.inet_pton(family, host.partition("%")[0]) for host, _ in (own, other)]
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES, *ports, *hosts, 0, _NO_COOKIE, _NO_COOKIE)
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as diagnosis:
        diagnosis.send(header + request)
        reply = diagnosis.recv(4096)
    if _HEADER.unpack_from(reply)[1] != _SOCK_DIAG_BY_FAMILY:
        return False, None
    _, its_state, *_, account, inode = _REPLY.unpack_from(reply, _HEADER.size)
    return True, account if its_state == state and inode else None


def _host_and_port(address: tuple[str, int]) -> tuple[str, int]:
    # A dual-stack server sees IPv4 peers as IPv4-mapped IPv6 addresses.
    return address[0].removeprefix("::ffff:"), address[1]


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
def say_once(sentence: str) -> None:
    sys.stderr.write(f"springtide: {sentence}\n")
