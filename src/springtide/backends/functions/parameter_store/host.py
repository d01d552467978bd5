"""The parameter store of a job: runs while its functions synchronise, ends when they do not, restarts when it dies."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import msgspec

from springtide.backends.functions.parameter_store.redis_ping import answers
from springtide.core.decoding import decode_json
from springtide.core.errors import SpringtideError, StorageError
from springtide.storage.files import write_durable

_log = logging.getLogger(__name__)
# The interval of checking whether a server is alive; in between the last answer is used.
CHECK_S = 1.0
# A busy server answers late; a connection to one that is gone is refused at once.
PING_LIMIT_S = 10.0
# How long a server of an earlier platform waits for its job to be taken over.
ADOPTION_S = 120.0


class ParameterHost(Protocol):
    """Keeps jobs' parameter stores running. Thread-safe; `acquire` and `renew` may take a minute."""

    def acquire(self, job_id: str) -> str:
        """The address of the job's store, once it answers; the same until it is released.

        Raises InvalidRequest, BackendError or StorageError in one sentence.
        """
        ...

    def is_alive(self, job_id: str) -> bool:
        """Whether a held store answers; False: what it held is gone, and `renew` makes a fresh one."""
        ...

    def renew(self, job_id: str) -> str:
        """Start an empty store in place of one that has died, at the same address if possible."""
        ...

    def release(self, job_id: str, *, lingers: bool = True) -> None:
        """The job's functions have ended. The store lingers for its next ones, unless the job is over."""
        ...

    def used_s(self, job_id: str) -> float:
        """The job's total uptime of its store in seconds, for the bill."""
        ...

    def close(self, *, ends: bool) -> None:
        """End all stores, or leave those in use to the next platform."""
        ...


class ParameterStoreHost(msgspec.Struct, frozen=True, kw_only=True):
    """One server: its address for functions, its id for the kind that started it, and its start in Unix time."""

    url: str
    identity: str
    began_at_s: float


class ServerKind(Protocol):
    """How servers are started and ended: processes of this machine, or tasks of a container service."""

    def start(self, job_id: str, before: ParameterStoreHost | None) -> ParameterStoreHost:
        """Start a store and wait until it answers; at the address of the previous one, if possible.

        Raises InvalidRequest, BackendError.
        """
        ...

    def is_alive(self, server: ParameterStoreHost) -> bool:
        """Whether it is up and answers."""
        ...

    def end(self, server: ParameterStoreHost) -> None:
        """End it; one that has ended already is no trouble. Raises BackendError."""
        ...


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a job's server on disk, for the next platform."""

    job_id: str
    server: ParameterStoreHost
    used_before_s: float = 0.0


class _Entry:
    """A job's server; the thread that starts or ends it holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.server: ParameterStoreHost | None = None
        self.used_before_s = 0.0
        self.is_held = False
        self.timer: threading.Timer | None = None
        self.checked_at_s = -CHECK_S
        self.was_alive = False


class FixedHost:
    """A store that is always there: nothing is started or ended; its seconds are those in which a job held it."""

    def __init__(
        self,
        url: str,
        *,
        now_s: Callable[[], float] = time.monotonic,
        ping: Callable[[str, float], bool] = answers,
    ) -> None:
        self.url = url
        self._now_s = now_s
        self._ping = ping
        self._lock = threading.Lock()
        self._since_s: dict[str, float] = {}
        self._used_s: dict[str, float] = {}

    def acquire(self, job_id: str) -> str:
        with self._lock:
            self._since_s.setdefault(job_id, self._now_s())
        return self.url

    def is_alive(self, job_id: str) -> bool:
        return self._ping(self.url, PING_LIMIT_S)

    def renew(self, job_id: str) -> str:
        """Its address: its operator must bring it back. Raises StorageError while it does not answer."""
        if not self._ping(self.url, PING_LIMIT_S):
            raise StorageError("the parameter store does not answer: start it again, or name another one")
        return self.acquire(job_id)

    def release(self, job_id: str, *, lingers: bool = True) -> None:
        """Stop counting the job's time."""
        with self._lock:
            since_s = self._since_s.pop(job_id, None)
            if since_s is not None:
                self._used_s[job_id] = self._used_s.get(job_id, 0.0) + self._now_s() - since_s

    def used_s(self, job_id: str) -> float:
        """The seconds in which the job held it."""
        with self._lock:
            since_s = self._since_s.get(job_id)
            held_s = 0.0 if since_s is None else self._now_s() - since_s
            return self._used_s.get(job_id, 0.0) + held_s

    def close(self, *, ends: bool) -> None:
        """Nothing to do: the store is permanent."""


class HostedParameters:
    """Servers of one kind, one for each job: each with its own password, memory limit, lifetime and bill.

    One that is released lives for `linger_s` more, so that jobs that come back soon find it. What runs is noted in
    `folder`: a platform that is restarted takes it over, and ends what no job asks for. `now_s` is Unix time.
    """

    def __init__(
        self,
        kind: ServerKind,
        folder: Path,
        *,
        linger_s: float,
        now_s: Callable[[], float] = time.time,
        check_s: float = CHECK_S,
        adoption_s: float = ADOPTION_S,
    ) -> None:
        self._kind = kind
        self._folder = folder
        self._linger_s = linger_s
        self._now_s = now_s
        self._check_s = check_s
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.json")):
            self._take_over(path, adoption_s)

    def acquire(self, job_id: str) -> str:
        """The address of the job's server, started if it is not up."""
        entry = self._entry(job_id)
        with entry.lock:
            self._keep(entry)
            entry.is_held = True
            if entry.server is None or not self._kind.is_alive(entry.server):
                return self._restart(job_id, entry)
            entry.was_alive = True
            return entry.server.url

    def is_alive(self, job_id: str) -> bool:
        """Whether the job's server answers, checked at most `check_s` ago."""
        entry = self._entry(job_id)
        with entry.lock:
            now_s = time.monotonic()
            if now_s - entry.checked_at_s >= self._check_s:
                entry.was_alive = entry.server is not None and self._kind.is_alive(entry.server)
                entry.checked_at_s = now_s
            return entry.was_alive

    def renew(self, job_id: str) -> str:
        """A new server for the job, if its present one is really dead."""
        entry = self._entry(job_id)
        with entry.lock:
            self._keep(entry)
            entry.is_held = True
            if entry.server is not None and self._kind.is_alive(entry.server):
                entry.was_alive = True
                return entry.server.url
            return self._restart(job_id, entry)

    def release(self, job_id: str, *, lingers: bool = True) -> None:
        """End the job's server after a while, or at once. Raises nothing: what cannot be ended is logged."""
        entry = self._entry(job_id)
        with entry.lock:
            entry.is_held = False
            self._keep(entry)
            if entry.server is None:
                return
            if not lingers or self._linger_s <= 0.0:
                self._end(job_id, entry)
            else:
                self._expire_in(job_id, entry, self._linger_s)

    def used_s(self, job_id: str) -> float:
        """The uptime of the job's servers in seconds, those of an earlier platform included."""
        entry = self._entry(job_id)
        server = entry.server
        return entry.used_before_s + (max(0.0, self._now_s() - server.began_at_s) if server is not None else 0.0)

    def close(self, *, ends: bool) -> None:
        """End all servers, or those that no job uses."""
        with self._lock:
            entries = list(self._entries.items())
        for job_id, entry in entries:
            with entry.lock:
                self._keep(entry)
                if entry.server is not None and (ends or not entry.is_held):
                    self._end(job_id, entry)

    # --- with the entry's lock held --------------------------------------------------------------------------------

    def _start(self, job_id: str, entry: _Entry, before: ParameterStoreHost | None) -> None:
        entry.server = self._kind.start(job_id, before)
        entry.was_alive = True
        entry.checked_at_s = time.monotonic()
        try:
            self._write(job_id, entry)
        except StorageError:
            self._end(job_id, entry)
            raise

    def _restart(self, job_id: str, entry: _Entry) -> str:
        before = entry.server
        if before is not None:
            _log.warning("the parameter store of %s has died; another one is started", job_id)
            self._settle(entry)
            # Parts of a server that does not answer may still run.
            with contextlib.suppress(SpringtideError):
                self._kind.end(before)
        self._start(job_id, entry, before)
        assert entry.server is not None
        return entry.server.url

    def _end(self, job_id: str, entry: _Entry) -> None:
        server = entry.server
        assert server is not None
        try:
            self._kind.end(server)
        except SpringtideError as error:
            _log.error("the parameter store of %s could not be ended: %s", job_id, error)
        self._settle(entry)
        self._path(job_id).unlink(missing_ok=True)

    def _settle(self, entry: _Entry) -> None:
        if entry.server is not None:
            entry.used_before_s += max(0.0, self._now_s() - entry.server.began_at_s)
        entry.server = None
        entry.was_alive = False

    def _expire_in(self, job_id: str, entry: _Entry, delay_s: float) -> None:
        entry.timer = threading.Timer(delay_s, self._expire, (job_id,))
        entry.timer.daemon = True
        entry.timer.start()

    @staticmethod
    def _keep(entry: _Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None

    # --- the rest --------------------------------------------------------------------------------------------------

    def _expire(self, job_id: str) -> None:
        """Called by a timer: the job has not acquired it again."""
        entry = self._entry(job_id)
        with entry.lock:
            if not entry.is_held and entry.server is not None and threading.current_thread() is entry.timer:
                self._end(job_id, entry)

    def _entry(self, job_id: str) -> _Entry:
        with self._lock:
            return self._entries.setdefault(job_id, _Entry())

    def _path(self, job_id: str) -> Path:
        return self._folder / f"{quote(job_id, safe='')}.json"

    def _write(self, job_id: str, entry: _Entry) -> None:
        assert entry.server is not None
        note = _Note(job_id=job_id, server=entry.server, used_before_s=entry.used_before_s)
        write_durable(self._path(job_id), msgspec.json.encode(note))

    def _take_over(self, path: Path, adoption_s: float) -> None:
        """What an earlier platform left: for its job, if that goes on; else it ends after a while."""
        try:
            note = decode_json(path.read_bytes(), _Note)
        except (OSError, ValueError) as error:
            _log.warning("%s cannot be read (%s); a parameter store may run on", path, error)
            path.unlink(missing_ok=True)
            return
        entry = self._entry(note.job_id)
        with entry.lock:
            entry.server = note.server
            entry.used_before_s = note.used_before_s
            self._expire_in(note.job_id, entry, adoption_s)
