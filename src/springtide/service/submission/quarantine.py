"""What was being taken in when a control plane died: set aside after the second time, so that it cannot end each one.

Before a source is read, an entry for the request or the object is written beside the journal; it is removed when the
step that takes the source in is durable, or the source is refused. So the entries that a control plane finds at its
start are of those before it that died.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Protocol

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest, JournalError, StorageError

LOG = logging.getLogger("springtide.submission")
INTAKE_KEY = "intake"
MAX_ATTEMPTS = 2
# How long a request is set aside; an object until its generation changes.
SET_ASIDE_S = 86_400.0
MAX_ENTRIES = 1024
_OBJECT = "object "


class SetAside(InvalidRequest):
    """Control planes died while they took this in."""

    code = "set_aside"


class IntakeStore(Protocol):
    """Durable values by key that every candidate for leadership reads: a journal's metadata. Raises JournalError."""

    def meta(self, key: str) -> str | None:
        """The value under a key."""
        ...

    def set_meta(self, key: str, value: str) -> None:
        """Set the value under a key; it is durable when this returns."""
        ...


class Intake(msgspec.Struct, frozen=True):
    """How often a source began to be taken in without an end, and when it did last (Unix time)."""

    attempts: int
    at_unix_s: float


def request_key(body: bytes) -> str:
    """The key of a request: the same body is the same source, from every client."""
    return hashlib.sha256(body).hexdigest()


def object_key(uid: str, generation: int) -> str:
    """The key of an object of a cluster as it is now."""
    return f"{_OBJECT}{uid} {generation}"


class Quarantine:
    """Notes what is being taken in, and refuses what was being taken in when a control plane died for the second time.

    Thread-safe. What was being taken in once when one died is taken in alone the second time, so that a second death
    tells which of them it was.
    """

    def __init__(self, store: IntakeStore, now_unix_s: Callable[[], float] = time.time) -> None:
        """Read what the control planes before this one left. Raises JournalError."""
        self._store = store
        self._now_unix_s = now_unix_s
        self._suspects = threading.RLock()
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._left = self._read()
        # With the number of threads that take it in.
        self._begun: dict[str, tuple[Intake, int]] = {}
        self._num_changes = self._num_written = 0
        for key, intake in self._left.items():
            if intake.attempts >= MAX_ATTEMPTS:
                LOG.warning("%s is set aside: the control plane died %d times during its intake", key, intake.attempts)

    @contextmanager
    def taking_in(self, key: str) -> Iterator[None]:
        """Take a source in within this context. Raises SetAside, StorageError."""
        with self._lock:
            left = self._left.get(key)
            if left is not None and self._is_over(key, left):
                del self._left[key]
                left = None
        if left is None:
            with self._noted(key, Intake(1, self._now_unix_s())):
                yield
            return
        if left.attempts >= MAX_ATTEMPTS:
            raise SetAside(_sentence(key, left))
        with self._suspects, self._noted(key, Intake(left.attempts + 1, self._now_unix_s())):
            yield

    def close(self) -> None:
        """Forget what is being taken in: the control plane ends in order."""
        with self._lock:
            had_any = bool(self._begun)
            self._begun = {}
            self._num_changes += 1
        if had_any:
            self._write_ends()

    @contextmanager
    def _noted(self, key: str, intake: Intake) -> Iterator[None]:
        with self._lock:
            known, num_threads = self._begun.get(key, (intake, 0))
            self._begun[key] = (known, num_threads + 1)
            self._num_changes += 1
        try:
            self._write()
            yield
        finally:
            with self._lock:
                known, num_threads = self._begun.pop(key, (intake, 0))
                if num_threads > 1:
                    self._begun[key] = (known, num_threads - 1)
                self._left.pop(key, None)
                self._num_changes += 1
            self._write_ends()

    def _write_ends(self) -> None:
        """Write that something has ended; if that fails, the next write says it."""
        try:
            self._write()
        except StorageError as error:
            LOG.warning("%s", error)

    def _write(self) -> None:
        """Write all entries, unless another thread has written them since they changed."""
        with self._lock:
            wanted = self._num_changes
        with self._writing:
            with self._lock:
                if self._num_written >= wanted:
                    return
                changes = self._num_changes
                entries = self._left | {key: intake for key, (intake, _) in self._begun.items()}
            try:
                self._store.set_meta(INTAKE_KEY, msgspec.json.encode(entries).decode())
            except JournalError as error:
                raise StorageError(f"the platform cannot note what it takes in: {error}") from error
            self._num_written = changes

    def _read(self) -> dict[str, Intake]:
        text = self._store.meta(INTAKE_KEY)
        if text is None:
            return {}
        try:
            found = decode_json(text, dict[str, Intake])
        except msgspec.DecodeError as error:
            LOG.warning("what was being taken in cannot be read, and is forgotten: %s", error)
            return {}
        newest = sorted(found, key=lambda key: found[key].at_unix_s)[-MAX_ENTRIES:]
        return {key: found[key] for key in newest if not self._is_over(key, found[key])}

    def _is_over(self, key: str, intake: Intake) -> bool:
        return not key.startswith(_OBJECT) and self._now_unix_s() - intake.at_unix_s >= SET_ASIDE_S


def _sentence(key: str, intake: Intake) -> str:
    died = f"the control plane died {intake.attempts} times while it took this in, so it is set aside"
    if key.startswith(_OBJECT):
        return f"{died} until its spec changes; look for the cause in its source, and correct it"
    until = datetime.fromtimestamp(intake.at_unix_s + SET_ASIDE_S, UTC)
    return f"{died} until {until:%Y-%m-%d %H:%M} UTC; look for the cause in its source, and send a corrected one"
