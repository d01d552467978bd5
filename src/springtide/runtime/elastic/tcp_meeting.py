"""The rendezvous store of a group on several machines: the first member's process holds the keys for all members.

torch's TCPStore resolves the name of every peer, which takes ten seconds if the name service does not answer, and waits
without a limit for a host that vanished. Here every request has a deadline, and no name is resolved.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
from torch._C import _distributed_c10d as c10d

from springtide.core.decoding import msgpack_decoder
from springtide.runtime.elastic.handshake import Entrance, prove, receive_exactly

_POLL_S = 0.005
_CONNECT_POLL_S = 0.05
# A host that does not answer a request within this time counts as gone.
_REQUEST_S = 5.0
_MAX_FRAME_BYTES = 1 << 22
# One for the group, and up to two for the streams to and from joiners.
_CONNECTIONS_OF_A_MEMBER = 3
_SPARE_CONNECTIONS = 32
_LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder()
_REQUEST = msgpack_decoder(tuple[str, list[str], bytes])
_ANSWER = msgpack_decoder(tuple[bool, bytes])


class MeetingHost:
    """The server: holds the keys of one group in the first member's process, with one thread for each connection."""

    def __init__(self, host: str, port: int, generation: int, num_members: int, key: str = "") -> None:
        """Listen. Raises OSError if the address is not available.

        Members have to prove that they know the `key`, if there is one.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._generation = str(generation)
        self._has_key = bool(key)
        self._listener = socket.create_server((host, port), family=family)
        self._entrance = Entrance(self._listener, key=key, max_waiting=num_members + _SPARE_CONNECTIONS)
        self._max_members = _CONNECTIONS_OF_A_MEMBER * num_members + _SPARE_CONNECTIONS
        self._lock = threading.Lock()
        self._keys: dict[str, bytes] = {}
        self._members: set[socket.socket] = set()
        self._is_closed = False
        threading.Thread(target=self._accept, name="springtide-meeting", daemon=True).start()

    def close(self) -> None:
        """Disconnect every member and stop listening. Safe from any thread, and repeatedly."""
        with self._lock:
            self._is_closed = True
            # The thread that accepts wakes up, and closes the listening socket.
            members = [self._listener, *self._members]
        for member in members:
            with contextlib.suppress(OSError):
                member.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.closing(self._entrance), contextlib.suppress(OSError):
            while True:
                member = self._entrance.admit()
                assert member is not None, "without a time limit it waits for one"
                with self._lock:
                    if self._is_closed or len(self._members) >= self._max_members:
                        member.close()
                        continue
                    self._members.add(member)
                threading.Thread(target=self._serve, args=(member,), name="springtide-meeting", daemon=True).start()

    def _serve(self, member: socket.socket) -> None:
        with member, contextlib.suppress(OSError, ValueError):
            member.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not self._has_key:
                # A silent connection does not hold a member's place.
                member.settimeout(_REQUEST_S)
            while True:
                verb, keys, value = _REQUEST.decode(_receive(member))
                _send(member, self._answer(verb, keys, value))
                member.settimeout(None)
        with self._lock:
            self._members.discard(member)

    def _answer(self, verb: str, keys: list[str], value: bytes) -> tuple[bool, bytes]:
        known, key = self._keys, keys[0]
        with self._lock:
            if verb == "join":
                # A late member of an earlier group that used the same port may connect here.
                return key == self._generation, b""
            if verb == "set":
                known[key] = value
                return True, b""
            if verb == "add":
                known[key] = str(int(known.get(key, b"0")) + int(value)).encode()
                return True, known[key]
            if verb == "delete":
                return known.pop(key, None) is not None, b""
            is_there = all(name in known for name in keys)
            return is_there, known[key] if verb == "get" and is_there else b""


class TcpMeeting(c10d.Store):
    """The client: a c10d store over one connection to the MeetingHost. Thread-safe.

    Like torch's stores it raises RuntimeError if the host is gone or on a timeout.
    """

    def __init__(
        self,
        host: str,
        port: int,
        generation: int,
        timeout_s: float,
        is_wanted: Callable[[], bool] = lambda: True,
        key: str = "",
    ) -> None:
        """Connect, waiting for the host while `is_wanted` returns true. With a `key`, the host must know it too."""
        super().__init__()
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        self._address = f"{host}:{port}"
        self._link = self._connect(host, port, generation, is_wanted, key)

    def __del__(self) -> None:
        # `_link` is missing if __init__ could not connect.
        if hasattr(self, "_link"):
            self._link.close()

    def set(self, key: str, value: str | bytes) -> None:
        self._request("set", [key], value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for the key and return its value."""
        end_s = time.monotonic() + self._timeout_s
        while True:
            is_there, value = self._request("get", [key])
            if is_there:
                return value
            self._pause(end_s, [key])

    def check(self, keys: Sequence[str]) -> bool:
        return not keys or self._request("check", list(keys))[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        end_s = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            self._pause(end_s, keys)

    def add(self, key: str, amount: int) -> int:
        """Add to an integer key, which starts at 0; returns the sum."""
        return int(self._request("add", [key], str(amount).encode())[1])

    def delete_key(self, key: str) -> bool:
        """Remove the key; returns whether it was set."""
        return self._request("delete", [key])[0]

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of `wait` and `get`."""
        self._timeout_s = timeout.total_seconds()

    def _connect(self, host: str, port: int, generation: int, is_wanted: Callable[[], bool], key: str) -> socket.socket:
        end_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return _connect_once(host, port, generation, key)
            except (OSError, ValueError) as error:
                if time.monotonic() > end_s or not is_wanted():
                    raise RuntimeError(f"no member hosts the meeting at {self._address}: {error}") from error
            time.sleep(_CONNECT_POLL_S)

    def _pause(self, end_s: float, keys: Sequence[str]) -> None:
        if time.monotonic() > end_s:
            raise RuntimeError(f"no member has set {', '.join(keys)} in time")
        time.sleep(_POLL_S)

    def _request(self, verb: str, keys: list[str], value: bytes = b"") -> tuple[bool, bytes]:
        with self._lock:
            try:
                _send(self._link, (verb, keys, value))
                return _ANSWER.decode(_receive(self._link))
            except (OSError, ValueError) as error:
                # A late answer to this request would be read as the answer to the next one.
                self._link.close()
                raise RuntimeError(f"{self._address} does not answer: {error}") from error


def _connect_once(host: str, port: int, generation: int, key: str) -> socket.socket:
    """Connect and join. Raises OSError if that may succeed later, and RuntimeError if another group meets there."""
    link = socket.create_connection((host, port), timeout=_REQUEST_S)
    try:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if key:
            prove(link, key)
            link.settimeout(_REQUEST_S)
        _send(link, ("join", [str(generation)], b""))
        is_this, _ = _ANSWER.decode(_receive(link))
        if not is_this:
            raise RuntimeError(f"at {host}:{port} another group meets")
    except BaseException:
        link.close()
        raise
    return link


def _send(link: socket.socket, message: Any) -> None:
    body = _ENCODER.encode(message)
    link.sendall(_LENGTH.pack(len(body)) + body)


def _receive(link: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(receive_exactly(link, _LENGTH.size))
    if length > _MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return receive_exactly(link, length)
