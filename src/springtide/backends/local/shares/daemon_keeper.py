"""Keeping a share daemon running: adopting a living one, starting one if there is none, restarting a dead one."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from springtide.backends.control_channel.reactor import FramedConnection, Timer
from springtide.backends.control_channel.replica_table import ReplicaTable
from springtide.backends.local.members import ProcessHandle
from springtide.backends.processes import ProcessIdentity, identify, last_line, live_stat, reap, spawn_detached
from springtide.backends.sharing.gpu.table import GpuDaemonStatus
from springtide.backends.sharing.table import DaemonStatus, SharerEntry, status_of
from springtide.core.errors import BackendError
from springtide.core.status.shares import TenantStatus

_log = logging.getLogger(__name__)
T = TypeVar("T", bound=msgspec.Struct)

CONNECT_INTERVAL_S = 0.02
START_TIMEOUT_S = 60.0
MAX_STARTS_IN_A_ROW = 3
# A status older than this is ignored.
_FRESH_S = 2.0
_RETRY_S = 5.0
_END_S = 2.0
_POLL_S = 0.01


class DaemonKeeper(Generic[T]):
    """Keeps one daemon running and sends it tables of type T; found by its socket. Runs on the I/O thread.

    `on_up` is called when a daemon is connected, `on_gone` when it is lost; `name` is for messages. The daemon lives on
    after this platform, as do the sharers that it limits.
    """

    def __init__(
        self,
        workers: ReplicaTable[ProcessHandle],
        name: str,
        table: type[T],
        command: list[str],
        environment: Mapping[str, str],
        socket_path: Path,
        log_path: Path,
        *,
        on_up: Callable[[], None],
        on_gone: Callable[[], None],
    ) -> None:
        self.name = name
        self.command = command
        self._workers = workers
        self._table = table
        self._environment = environment
        self._socket_path = socket_path
        self._log_path = log_path
        self._on_up = on_up
        self._on_gone = on_gone
        # Read by any thread: the process number of the connected daemon, and why there is none.
        self.pid = 0
        self.failure = ""
        self._connection: FramedConnection[T] | None = None
        self._process: ProcessIdentity | None = None
        self._started_pid: int | None = None
        self._retry: Timer | None = None
        self._num_starts = 0
        self._num_attempts = 0
        self._is_closed = False

    @property
    def is_up(self) -> bool:
        return self._connection is not None

    def ensure(self) -> None:
        """Start connecting, and start a daemon if there is none; returns at once."""
        if self._connection is None and self._retry is None and not self._is_closed:
            self._num_attempts = 0
            self._try_connect()

    def send(self, table: T) -> None:
        assert self._connection is not None, "no daemon is connected"
        try:
            self._connection.send(table)
        except BackendError as error:
            self.failure = str(error)

    def close(self) -> None:
        """Disconnect from the daemon, which lives on."""
        self._is_closed = True
        if self._retry is not None:
            self._retry.cancel()
        if self._connection is not None:
            self._connection.close()

    def problem(self, found: DaemonStatus | GpuDaemonStatus | None) -> str:
        """Why shares are not enforced now, given the daemon's status; "" if they are. Thread-safe."""
        if self.failure:
            return self.failure
        # The status may be left over from an earlier daemon.
        if found is None or found.pid != self.pid:
            return f"the {self.name} is being started, no sharer is held yet"
        age_s = time.monotonic() - found.written_at_s
        return "" if 0.0 <= age_s <= _FRESH_S else f"the {self.name} has said nothing for {age_s:.1f} s"

    def end(self) -> None:
        """End the daemon, which lifts every limit first. Blocks shortly; used when the platform goes down."""
        process = self._process
        if process is not None and live_stat(process) is not None:
            os.kill(process.pid, signal.SIGTERM)
            end_s = time.monotonic() + _END_S
            while live_stat(process) is not None:
                if time.monotonic() > end_s:
                    # Its guard lifts the limits instead.
                    os.kill(process.pid, signal.SIGKILL)
                    end_s = time.monotonic() + _END_S
                time.sleep(_POLL_S)
        self._reap()

    def _try_connect(self) -> None:
        self._retry = None
        if self._is_closed or self._connection is not None:
            return
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.setblocking(False)
            stream.connect(str(self._socket_path))
        except OSError:
            stream.close()
            self._start_or_wait()
            return
        connection: FramedConnection[T] = FramedConnection(
            self._workers.reactor, stream, self._table, lambda connection, message: None, self._on_close
        )
        if connection.peer_uid != os.getuid():
            connection.close(f"the {self.name} belongs to another user")
            return
        self._connection = connection
        self.pid = connection.peer_pid
        self._process = identify(connection.peer_pid)
        self.failure = ""
        self._on_up()

    def _start_or_wait(self) -> None:
        """No daemon answers: start one unless one is starting, and try to connect again shortly."""
        self._reap()
        is_coming = self._process is not None and live_stat(self._process) is not None
        if is_coming and self._num_attempts * CONNECT_INTERVAL_S > START_TIMEOUT_S and self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            is_coming = False
        if not is_coming:
            if self._num_starts >= MAX_STARTS_IN_A_ROW:
                self._give_up(f"the {self.name} does not come up")
                return
            self._num_starts += 1
            self._num_attempts = 0
            self._workers.counts["share_daemons"] += 1
            try:
                self._started_pid = spawn_detached(self.command, self._environment, self._log_path)
            except BackendError as error:
                self._give_up(str(error))
                return
            self._process = identify(self._started_pid)
        self._num_attempts += 1
        self._retry = self._workers.reactor.after(CONNECT_INTERVAL_S, self._try_connect)

    def _give_up(self, reason: str) -> None:
        """Record the failure and retry later; sharers run unlimited meanwhile."""
        line = last_line(self._log_path)
        self.failure = f"{reason}: {line}" if line else reason
        _log.error("%s", self.failure)
        self._num_starts = 0
        self._retry = self._workers.reactor.after(_RETRY_S, self._try_connect)

    def _on_close(self, connection: FramedConnection[T], reason: str) -> None:
        if self._connection is not connection:
            return
        self._connection = None
        self.pid = 0
        if self._is_closed:
            return
        _log.warning("the %s is gone: %s", self.name, reason or "it closed the connection")
        if self._process is not None and live_stat(self._process) is None:
            # It was up, so its death is not a failure to start, unless it dies again and again.
            self._num_starts = min(self._num_starts, 1)
        self._on_gone()

    def _reap(self) -> None:
        for pid in (self._started_pid, self._process.pid if self._process is not None else None):
            if pid is not None:
                reap(pid)


def starting(entry: SharerEntry, reason: str) -> TenantStatus:
    """The status of a sharer whose share is not enforced yet."""
    return msgspec.structs.replace(status_of(entry), granted=1.0, reason=reason)


def all_starting(entries: Sequence[SharerEntry], reason: str) -> tuple[TenantStatus, ...]:
    """The status of several sharers whose shares are not enforced yet."""
    return tuple(starting(entry, reason) for entry in entries)
