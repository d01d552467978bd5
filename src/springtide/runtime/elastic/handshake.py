"""Who may connect to a worker: the members of its group. They prove that they know the group's key without sending it.

The side that listens draws a challenge and the other side a nonce; each computes a digest of both and the key. So a
recorded proof is useless later, and who has taken over a member's old address learns nothing from those who connect to
it. What follows is not encrypted.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass, field

from springtide.core.tokens import proof_of

PROVE_S = 2.0
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_MAX_WAITING = 32
_PAUSE_S = 0.02
_CREDENTIALS = struct.Struct("3i")
_NOTHING_FREE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def receive_exactly(link: socket.socket, num_bytes: int) -> bytes:
    """Receive so many bytes. Raises OSError if the connection ends before."""
    data = bytearray()
    while len(data) < num_bytes:
        part = link.recv(num_bytes - len(data))
        if not part:
            raise OSError("the connection ended")
        data += part
    return bytes(data)


def prove(link: socket.socket, key: str) -> None:
    """Prove to an `Entrance` that this side knows the key, and check its proof. Raises OSError."""
    end_s = time.monotonic() + PROVE_S
    challenge = _receive_by(link, _NONCE_BYTES, end_s)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    link.sendall(nonce + proof_of(key, b"member", challenge, nonce))
    if not hmac.compare_digest(_receive_by(link, _PROOF_BYTES, end_s), proof_of(key, b"host", challenge, nonce)):
        raise OSError("who listens there does not know the key of this group")


def _receive_by(link: socket.socket, num_bytes: int, end_s: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        link.settimeout(max(0.001, end_s - time.monotonic()))
        part = link.recv(num_bytes - len(data))
        if not part:
            raise OSError("who listens there ended the connection before the keys were compared")
        data += part
    return data


@dataclass(eq=False)
class _Guest:
    """A connection that has not proved itself yet."""

    link: socket.socket
    until_s: float
    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE_BYTES))
    received: bytearray = field(default_factory=bytearray)


class Entrance:
    """Accepts connections, and hands on those that prove themselves within a time limit, however many others there are.

    With a `key`, the other end does that by `prove`; with a `token` instead, by sending it; with neither, none has to.
    On unix sockets it must also be a process of this account. For one thread only.
    """

    def __init__(
        self, listener: socket.socket, *, key: str = "", token: bytes = b"", max_waiting: int = _MAX_WAITING
    ) -> None:
        """Take over the listening socket. At most `max_waiting` connections are kept before they have proved it."""
        self._listener = listener
        self._key = key
        self._token = token
        self._max_waiting = max_waiting
        self._num_expected = _NONCE_BYTES + _PROOF_BYTES if key else len(token)
        # In the order in which they came.
        self._waiting: dict[socket.socket, _Guest] = {}
        self._admitted: deque[socket.socket] = deque()
        listener.setblocking(False)
        self._selector = selectors.PollSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def admit(self, timeout_s: float | None = None) -> socket.socket | None:
        """Wait for a connection that has proved itself; None if there is none in time.

        Raises OSError once the listening socket was shut down.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        is_over = False
        while not self._admitted and not is_over:
            is_over = end_s is not None and time.monotonic() >= end_s
            self._turn(end_s)
        return self._admitted.popleft() if self._admitted else None

    def close(self) -> None:
        """Stop listening, and close what has not been handed on."""
        self._selector.close()
        for link in (self._listener, *self._waiting, *self._admitted):
            link.close()
        self._waiting.clear()
        self._admitted.clear()

    def _turn(self, end_s: float | None) -> None:
        limits_s = [guest.until_s for guest in self._waiting.values()][:1]
        if end_s is not None:
            limits_s.append(end_s)
        timeout_s = max(0.0, min(limits_s) - time.monotonic()) if limits_s else None
        for key, _ in self._selector.select(timeout_s):
            guest = key.data
            if guest is None:
                self._accept()
            elif guest.link in self._waiting:
                self._read(guest)
        # After reading: what has arrived meanwhile counts, also if this thread was held up.
        now_s = time.monotonic()
        for guest in [guest for guest in self._waiting.values() if guest.until_s <= now_s]:
            self._drop(guest)

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in _NOTHING_FREE:
                raise
            if self._waiting:
                self._drop_oldest()
            else:
                time.sleep(_PAUSE_S)
            return
        if not _is_own_account(link):
            link.close()
            return
        if len(self._waiting) >= self._max_waiting:
            # Members prove themselves at once.
            self._drop_oldest()
        link.setblocking(False)
        guest = _Guest(link, time.monotonic() + PROVE_S)
        self._waiting[link] = guest
        self._selector.register(link, selectors.EVENT_READ, guest)
        try:
            if self._key:
                link.send(guest.challenge)
        except OSError:
            self._drop(guest)
            return
        self._read(guest)

    def _read(self, guest: _Guest) -> None:
        try:
            self._take_proof(guest)
            guest.link.setblocking(True)
        except BlockingIOError:
            return
        except OSError:
            self._drop(guest)
            return
        self._forget(guest)
        self._admitted.append(guest.link)

    def _take_proof(self, guest: _Guest) -> None:
        """Read the proof and answer it. Raises BlockingIOError until all of it is there, OSError if it is wrong."""
        while missing := self._num_expected - len(guest.received):
            part = guest.link.recv(missing)
            if not part:
                raise OSError("the connection ended")
            guest.received += part
        given, answer, expected = bytes(guest.received), b"", self._token
        if self._key:
            nonce, given = given[:_NONCE_BYTES], given[_NONCE_BYTES:]
            expected = proof_of(self._key, b"member", guest.challenge, nonce)
            answer = proof_of(self._key, b"host", guest.challenge, nonce)
        if not hmac.compare_digest(given, expected):
            raise OSError("this is no member of the group")
        guest.link.sendall(answer)

    def _drop_oldest(self) -> None:
        self._drop(next(iter(self._waiting.values())))

    def _drop(self, guest: _Guest) -> None:
        self._forget(guest)
        guest.link.close()

    def _forget(self, guest: _Guest) -> None:
        del self._waiting[guest.link]
        self._selector.unregister(guest.link)


def _is_own_account(link: socket.socket) -> bool:
    """Whether the other end of a unix socket belongs to this account; true for other sockets, which do not tell."""
    if link.family is not socket.AF_UNIX:
        return True
    with contextlib.suppress(OSError):
        _, user_id, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return bool(user_id == os.geteuid())
    return False
