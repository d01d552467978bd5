"""The socket on which tenants' processes ask for their share, once per device: a request, an answer, closed.

The processes run user code. An invalid request is answered by closing the connection, a missing one by closing it
after a second; and the number of connections without a request is bounded.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from springtide.backends.sharing.gpu.segments import BAD, HELLO, LAYOUT, MAGIC, OK, UNKNOWN, WELCOME, may_keep
from springtide.backends.sharing.gpu.tenants import RETRY_MS, TenantReply
from springtide.backends.sockets import peer_process

_BACKLOG = 512
_MAX_SILENT = 128
_SILENCE_S = 1.0
# The most answers before the loop continues: thousands of simultaneous connections must not delay ticks.
_ANSWERS_AT_ONCE = 16
_UNKNOWN_S = 10.0
_MAX_UNKNOWN = 4096
# A pidfd of the process that connected, from Linux 6.5 on (asm-generic/socket.h).
_SO_PEERPIDFD = 77


class Clients:
    """Listens at `path` and answers with the result of `find`. The loop calls the other methods.

    `find` gets the client's process id and user id, the device's UUID, and a function that says whether it still lives.
    """

    def __init__(
        self, path: Path, epoll: select.epoll, find: Callable[[int, int, bytes, Callable[[], bool]], TenantReply]
    ) -> None:
        self._epoll = epoll
        self._find = find
        self._silent: dict[int, tuple[socket.socket, float]] = {}
        self._unknown: dict[int, float] = {}
        self.num_answers = 0
        self.num_refused = 0
        # One descriptor in reserve: without one, a connection could not even be rejected, and the loop would spin.
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        self._listener.setblocking(False)
        self._listener.bind(str(temporary))
        # Each request is checked by its process and user; root serves every process that reaches the directory.
        temporary.chmod(0o666 if os.getuid() == 0 else 0o600)
        self._listener.listen(_BACKLOG)
        temporary.rename(path)
        self.path, self._inode = path, path.stat().st_ino
        epoll.register(self._listener, select.EPOLLIN)

    def is_current(self) -> bool:
        """Whether the socket at the path is still this one."""
        with contextlib.suppress(OSError):
            return self.path.stat().st_ino == self._inode
        return False

    def num_unknown(self, now_s: float) -> int:
        """How many processes without a tenant have asked lately."""
        self._unknown = {pid: at_s for pid, at_s in self._unknown.items() if now_s - at_s < _UNKNOWN_S}
        return len(self._unknown)

    def handle(self, descriptor: int) -> bool:
        """Handle a ready descriptor. Returns whether it belongs to this socket."""
        if descriptor == self._listener.fileno():
            self._accept()
            return True
        held = self._silent.get(descriptor)
        if held is not None:
            self._read_request(held[0])
        return held is not None

    def expire(self, now_s: float) -> None:
        """Close connections that have sent nothing for too long."""
        for stream, since_s in list(self._silent.values()):
            if now_s - since_s > _SILENCE_S:
                self._refuse(stream)

    def close(self) -> None:
        """Stop listening; the socket is removed if it is still this one's."""
        for stream, _ in list(self._silent.values()):
            self._forget(stream)
        if self.is_current():
            self.path.unlink(missing_ok=True)
        self._listener.close()
        os.close(self._reserve)

    def _accept(self) -> None:
        for _ in range(_ANSWERS_AT_ONCE):
            try:
                stream, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._reject()
                return
            stream.setblocking(False)
            if not may_keep(stream.fileno()):
                self._refuse(stream)
                continue
            if len(self._silent) >= _MAX_SILENT:
                self._refuse(next(iter(self._silent.values()))[0])
            self._silent[stream.fileno()] = (stream, time.monotonic())
            try:
                self._epoll.register(stream, select.EPOLLIN)
            except OSError:
                self._refuse(stream)
                continue
            # Usually the request has arrived already.
            self._read_request(stream)

    def _reject(self) -> None:
        os.close(self._reserve)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
            self.num_refused += 1
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _read_request(self, stream: socket.socket) -> None:
        try:
            data = stream.recv(HELLO.size + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            magic, layout, uuid = HELLO.unpack(data)
            pid, user_id = peer_process(stream)
        except (struct.error, OSError):
            self._refuse(stream)
            return
        if magic != MAGIC:
            self._refuse(stream)
        elif layout != LAYOUT:
            self._answer(stream, TenantReply(BAD))
        else:
            answer = self._find(pid, user_id, uuid, lambda: _lives(stream))
            if answer.status == UNKNOWN and len(self._unknown) < _MAX_UNKNOWN:
                self._unknown[pid] = time.monotonic()
            elif answer.status == OK:
                self._unknown.pop(pid, None)
            self._answer(stream, answer)

    def _answer(self, stream: socket.socket, answer: TenantReply) -> None:
        retry_ms = 0 if answer.status == OK else RETRY_MS
        data = WELCOME.pack(MAGIC, LAYOUT, answer.status, answer.slot, answer.segment_id, retry_ms, 0)
        passed = array.array("i", answer.descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)] if answer.descriptors else []
        try:
            stream.sendmsg([data], ancillary, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            self.num_answers += 1
        except OSError:
            # The client is gone or does not read: it may ask again.
            self.num_refused += 1
        self._forget(stream)

    def _refuse(self, stream: socket.socket) -> None:
        self.num_refused += 1
        self._forget(stream)

    def _forget(self, stream: socket.socket) -> None:
        self._silent.pop(stream.fileno(), None)
        stream.close()


def _lives(stream: socket.socket) -> bool:
    """Whether the process that connected lives: then no other process can have its number."""
    try:
        pidfd = stream.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        # An older kernel does not support this.
        return error.errno == errno.ENOPROTOOPT
    try:
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        return not ended.poll(0)
    finally:
        os.close(pidfd)
