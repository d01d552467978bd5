"""Waking other processes of one machine: each waiter has a datagram socket named after the key it waits for.

A killed process leaves a socket that refuses connections; the next sender removes it. No other waiter is delayed.
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
    """The sockets in one folder, made when the first waiter comes. Safe between threads and processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def listening(self, key: str) -> Iterator[socket.socket]:
        """A socket that becomes readable when `key` is woken from now on. Raises StorageError if there can be none."""
        name = f"{_mark(key)}.{secrets.token_hex(8)}"
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
                # Not there yet, or taken away because it was empty.
                with contextlib.suppress(FileNotFoundError, FileExistsError):
                    os.makedirs(self._folder, mode=0o700, exist_ok=True)
            except OSError as error:
                raise StorageError(f"cannot wait in {self._folder}: {error.strerror or error}") from error
        raise StorageError(f"cannot wait in {self._folder}: it is taken away again and again")

    @contextlib.contextmanager
    def _opened(self) -> Iterator[str]:
        """A short name of the folder: a socket's has at most 107 characters."""
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)

    def wake(self, key: str) -> None:
        """Wake the waiters for `key`; never blocks and never fails: waiters look again by themselves now and then."""
        self._poke(_mark(key) + ".")

    def sweep(self) -> None:
        """Remove the sockets of the dead; the living wake up for nothing."""
        self._poke("")

    def _poke(self, beginning: str) -> None:
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
                    # Gone meanwhile, or it already has as many wake-ups as it can hold.
                    continue


def _mark(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
