"""The connection to the zygote, the process that forks warm workers. It outlives control planes."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import springtide
from springtide.backends.control_channel.reactor import FramedConnection, Reactor, Timer
from springtide.backends.processes import ProcessIdentity, identify, last_line, live_stat, reap, spawn_detached
from springtide.core.errors import BackendError
from springtide.core.wire.workers import ChildExited, Held, Spawned, SpawnRequest, WorkerSpec, ZygoteMessage
from springtide.core.workload import ReplicaId

_log = logging.getLogger(__name__)

# The variable of its environment that says which code a zygote runs.
CODE = "SPRINGTIDE_CODE"
CONNECT_INTERVAL_S = 0.05
# Seconds. A zygote imports torch first: that takes seconds on an idle machine, a minute on an overloaded one.
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 20.0
# For a worker that waits for an import: longer than the zygote lets an import take.
HELD_TIMEOUT_S = 150.0
MAX_STARTS_IN_A_ROW = 3
_OLD_EVENTS_S = 0.3


class ZygoteClient:
    """Connects to a living zygote or starts one. Runs on the I/O thread.

    `on_spawned(replica_id, pid)`, `on_exited(replica_id, pid, exit_code)` and `on_failed(replica_id, reason)` report
    the outcome of a request; `on_request_lost(replica_id)` that a zygote died with it, so that it must be repeated;
    `on_stray(replica_id, pid)` that a worker was forked which is no longer wanted. A zygote of an earlier executor that
    is not `is_usable` is replaced; its workers live on.
    """

    def __init__(
        self,
        reactor: Reactor,
        command: Sequence[str],
        environment: Mapping[str, str],
        socket_path: Path,
        log_path: Path,
        *,
        on_spawned: Callable[[ReplicaId, int], None],
        on_exited: Callable[[ReplicaId, int, int], None],
        on_failed: Callable[[ReplicaId, str], None],
        on_request_lost: Callable[[ReplicaId], None],
        on_stray: Callable[[ReplicaId, int], None],
        is_usable: Callable[[int], bool] = lambda pid: True,
    ) -> None:
        self._reactor = reactor
        self._command = [*command, "--socket", str(socket_path)]
        self._environment = environment
        self._socket_path = socket_path
        self._log_path = log_path
        self._on_spawned, self._on_exited = on_spawned, on_exited
        self._on_failed, self._on_request_lost, self._on_stray = on_failed, on_request_lost, on_stray
        self._is_usable = is_usable
        self._connection: FramedConnection[ZygoteMessage] | None = None
        self._child: ProcessIdentity | None = None
        self._started_pid: int | None = None
        self._waiting: list[WorkerSpec] = []
        self._requested: dict[ReplicaId, Timer] = {}
        self._retry: Timer | None = None
        self._num_starts = 0
        self._num_attempts = 0
        self._may_request = False
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        """Whether a zygote is connected."""
        return self._connection is not None

    @property
    def process(self) -> ProcessIdentity | None:
        """The zygote in use, if any."""
        return self._child

    def ensure(self) -> None:
        """Start connecting, and start a zygote if there is none; returns at once."""
        if self._connection is None and self._retry is None and not self._is_closed:
            self._num_attempts = 0
            self._try_connect()

    def spawn(self, spec: WorkerSpec) -> None:
        """Request a worker, now or as soon as a zygote is connected."""
        if self._connection is None or not self._may_request:
            self._waiting.append(spec)
            self.ensure()
            return
        replica_id = spec.replica_id
        try:
            sent = self._connection.send(SpawnRequest(spec=spec))
        except BackendError as error:
            self._on_failed(replica_id, str(error))
            return
        if sent:
            self._requested[replica_id] = self._reactor.after(ANSWER_TIMEOUT_S, self._give_up)
        else:
            self._on_request_lost(replica_id)

    def withdraw(self, replica_id: ReplicaId) -> None:
        """Stop waiting for this worker; if it is forked nevertheless, it is reported as a stray."""
        self._waiting = [spec for spec in self._waiting if spec.replica_id != replica_id]
        timer = self._requested.pop(replica_id, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Disconnect from the zygote, which lives on."""
        self._is_closed = True
        if self._retry is not None:
            self._retry.cancel()
        for timer in self._requested.values():
            timer.cancel()
        self._requested.clear()
        if self._connection is not None:
            self._connection.close()

    def terminate(self) -> None:
        """Ask the zygote to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the zygote; its workers live on."""
        self._signal(signal.SIGKILL)

    def reap(self) -> None:
        """Collect the zygote if it was this process's child and has ended."""
        for pid in (self._started_pid, self._child.pid if self._child is not None else None):
            if pid is not None:
                reap(pid)

    def _signal(self, number: int) -> None:
        if self._child is not None and live_stat(self._child) is not None:
            os.kill(self._child.pid, number)

    def _try_connect(self) -> None:
        self._retry = None
        if self._is_closed or self._connection is not None:
            return
        try:
            stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            # No descriptor is free: that says nothing about the zygote.
            _log.warning("cannot connect to the zygote yet: %s", error)
            self._retry_soon()
            return
        try:
            stream.setblocking(False)
            stream.connect(str(self._socket_path))
        except OSError:
            stream.close()
            self._start_or_wait()
            return
        connection = FramedConnection(self._reactor, stream, ZygoteMessage, self._on_message, self._on_close)
        is_ours = connection.peer_uid == os.getuid()
        if is_ours:
            self._child = identify(connection.peer_pid)
        self._connection = connection
        if not is_ours:
            self._retry_soon()
            connection.close("the zygote belongs to another user")
        elif self._num_starts == 0 and not self._is_usable(connection.peer_pid):
            self.kill()
            # Its socket accepts connections until it is dead.
            self._retry_soon()
            connection.close("it was started for other workers than are needed now")
        elif self._num_starts == 0:
            # A zygote of an earlier control plane first reports the workers which that one requested. These reports
            # must not be taken for answers to new requests.
            self._reactor.after(_OLD_EVENTS_S, self._request_waiting)
        else:
            self._request_waiting()

    def _request_waiting(self) -> None:
        if self._connection is None:
            return
        self._may_request = True
        waiting, self._waiting = self._waiting, []
        for spec in waiting:
            self.spawn(spec)

    def _start_or_wait(self) -> None:
        """No zygote answers: start one unless one is starting, and try to connect again shortly."""
        self.reap()
        is_coming = self._child is not None and live_stat(self._child) is not None
        if is_coming and self._num_attempts * CONNECT_INTERVAL_S > START_TIMEOUT_S:
            self.kill()
            is_coming = False
        if not is_coming:
            if self._num_starts >= MAX_STARTS_IN_A_ROW:
                self._fail_waiting()
                return
            self._num_starts += 1
            self._num_attempts = 0
            try:
                self._started_pid = spawn_detached(self._command, self._environment, self._log_path)
            except BackendError as error:
                _log.error("%s", error)
                self._fail_waiting()
                return
            self._child = identify(self._started_pid)
        self._num_attempts += 1
        self._retry_soon()

    def _retry_soon(self) -> None:
        self._retry = self._reactor.after(CONNECT_INTERVAL_S, self._try_connect)

    def _fail_waiting(self) -> None:
        self._num_starts = 0
        line = last_line(self._log_path)
        reason = "the process that starts workers does not come up" + (f": {line}" if line else "")
        waiting, self._waiting = self._waiting, []
        for spec in waiting:
            self._on_failed(spec.replica_id, reason)

    def _on_message(self, connection: FramedConnection[ZygoteMessage], message: ZygoteMessage) -> None:
        if isinstance(message, Spawned):
            self._num_starts = 0
            notify = self._on_spawned if message.replica_id in self._requested else self._on_stray
            self.withdraw(message.replica_id)
            notify(message.replica_id, message.pid)
        elif isinstance(message, Held):
            if message.replica_id in self._requested:
                self.withdraw(message.replica_id)
                self._requested[message.replica_id] = self._reactor.after(HELD_TIMEOUT_S, self._give_up)
        elif isinstance(message, ChildExited):
            self._on_exited(message.replica_id, message.pid, message.exit_code)

    def _on_close(self, connection: FramedConnection[ZygoteMessage], reason: str) -> None:
        self._connection = None
        self._may_request = False
        requested, self._requested = self._requested, {}
        for timer in requested.values():
            timer.cancel()
        if self._is_closed:
            return
        _log.warning("the zygote is gone: %s", reason or "it closed the connection")
        if requested:
            # It was up, so its death is not a failure to start; attempts of the request itself are counted elsewhere.
            self._num_starts = min(self._num_starts, 1)
        for replica_id in requested:
            self._on_request_lost(replica_id)
        # Start a new one now, so that the next worker need not wait for it.
        self.ensure()

    def _give_up(self) -> None:
        """Kill a zygote that does not answer: its requests are then repeated to the next one."""
        self.kill()
        if self._connection is not None:
            self._connection.close("it did not answer in time")


def code_stamp() -> str:
    """What changes whenever another interpreter or other files of this package are used: a digest of 32 digits."""
    root = Path(springtide.__file__).parent
    digest = hashlib.blake2b(f"{sys.executable} {springtide.__version__} {root}".encode(), digest_size=16)
    for path in sorted(root.rglob("*.py")):
        seen = path.stat()
        digest.update(f"{path.relative_to(root)} {seen.st_size} {seen.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def has_stamp(pid: int, stamp: str) -> bool:
    """Whether a process was started with this stamp in its environment; False where that cannot be read."""
    try:
        return f"{CODE}={stamp}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
