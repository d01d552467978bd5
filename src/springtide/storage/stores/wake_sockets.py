"""Wakes waiting processes of one machine: each waiter has a datagram socket that is named after its key.

A killed process leaves a socket that refuses datagrams; the next sender removes it. Other waiters are not delayed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from springtide.core.errors import StorageError


class WakeSockets:
    """The sockets in one folder, which the first waiter creates. Safe between threads and processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def listening(self, key: str) -> Iterator[socket.socket]:
        """Yield a socket that becomes readable when `key` is woken. Raises StorageError if it cannot be created."""
        name = f"{_key_digest(key)}.{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            self._bind(listener, name)
            try:
                yield listener
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(self._folder / name)

    def _bind(self, listener: socket.socket, name: str) -> None:
        for _ in range(100):
            try:
                with self._opened() as folder:
                    listener.bind(f"{folder}/{name}")
                    return
            except FileNotFoundError:
                # The folder does not exist yet, or was removed because it was empty.
                with contextlib.suppress(FileNotFoundError, FileExistsError):
                    os.makedirs(self._folder, mode=0o700, exist_ok=True)
            except OSError as error:
                raise StorageError(f"cannot wait in {self._folder}: {error.strerror or error}") from error
        raise StorageError(f"cannot wait in {self._folder}: it is taken away again and again")

    @contextlib.contextmanager
    def _opened(self) -> Iterator[str]:
        """Yield a short path of the folder: a socket's path has at most 107 characters."""
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)

    def wake(self, key: str) -> None:
        """Wake the waiters for `key`. Never blocks and never raises: waiters that miss it also poll now and then."""
        self._send_to(_key_digest(key) + ".")

    def sweep(self) -> None:
        """Remove the sockets of processes that have died. Living waiters wake up once and wait again."""
        self._send_to("")

    def _send_to(self, beginning: str) -> None:
        try:
            names = [name for name in os.listdir(self._folder) if name.startswith(beginning)]
        except OSError:
            return
        if not names:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
            self._opened() as folder,
        ):
            sender.setblocking(False)
            for name in names:
                try:
                    sender.sendto(b"!", f"{folder}/{name}")
                except ConnectionRefusedError:
                    with contextlib.suppress(OSError):
                        os.unlink(self._folder / name)
                except OSError:
                    # The socket is gone, or its queue of wake-ups is full.
                    continue


def _key_digest(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
