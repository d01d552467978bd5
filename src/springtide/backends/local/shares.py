"""The executor's side of shares: slots for sharers, the daemon that holds them, and what people are told of it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from springtide.backends.local.members import Phase, Replica
from springtide.backends.local.reactor import Connection, Timer
from springtide.backends.local.share_enforcers import describe_enforcer
from springtide.backends.local.share_table import (
    MECHANISM_VARIABLE,
    SOCKET_NAME,
    STATUS_NAME,
    SharerEntry,
    ShareTable,
    read_status,
    slots_path,
)
from springtide.backends.local.workers import Workers
from springtide.backends.processes import (
    ProcessIdentity,
    identify,
    last_line,
    live_stat,
    reap,
    signal_group,
    spawn_detached,
)
from springtide.core.actions import SetShare
from springtide.core.errors import BackendError
from springtide.core.resources import DeviceKind
from springtide.core.share_status import SharingStatus, TenantStatus
from springtide.core.share_wire import NUM_SLOTS, clear_slot, make_slots
from springtide.core.shares import Share

_log = logging.getLogger(__name__)

CONNECT_INTERVAL_S = 0.02
START_TIMEOUT_S = 60.0
MAX_STARTS_IN_A_ROW = 3
# A status older than this is not believed any more.
_FRESH_S = 2.0
_RETRY_S = 5.0
_END_S = 2.0
_POLL_S = 0.01
_ON_GPU = (
    "shares of a GPU are planned and counted, not enforced: processes on it take turns as its driver lets them, and "
    "each sees the whole memory"
)


class Shares:
    """Who shares what on this machine. Runs on the I/O thread, but for `sharing`, which any thread may call.

    The daemon is started at the first share and lives on after this platform, as the sharers do.
    """

    def __init__(
        self,
        workers: Workers,
        directory: Path,
        device_cpus: float,
        kinds: Mapping[str, DeviceKind],
        environment: Mapping[str, str],
        python: str = sys.executable,
    ) -> None:
        self._workers = workers
        self._directory = directory
        self._device_cpus = device_cpus
        self._kinds = kinds
        self._command = [python, "-m", "springtide.backends.local.share_daemon", str(directory)]
        self._environment = environment
        self._slots_path = slots_path(directory)
        self._next_slot = 0
        self._may_tell = False
        self._is_closed = False
        self._table: tuple[SharerEntry, ...] = ()
        self._failure = ""
        self._daemon_pid = 0
        self._untried: tuple[str, str] | None = None
        self._connection: Connection[ShareTable] | None = None
        self._process: ProcessIdentity | None = None
        self._started_pid: int | None = None
        self._retry: Timer | None = None
        self._num_starts = 0
        self._num_attempts = 0

    # --- sharers -----------------------------------------------------------------------------------------------------

    def slot_of(self, replica: Replica) -> tuple[str, int]:
        """Return (path, slot) for a replica that is about to be started; an empty path if it needs none."""
        share = self._share_of(replica)
        if share is None:
            return "", 0
        self._start_daemon_early()
        if replica.share_slot is None:
            replica.share_slot = self._free_slot()
            try:
                clear_slot(self._slots_path, replica.share_slot)
            except BackendError:
                # The first sharer of this boot, or a file that somebody spoilt: nobody alive can have it mapped as it
                # is, or what they write is lost and the daemon goes by what is used.
                try:
                    make_slots(self._slots_path)
                except BackendError as error:
                    _log.error("%s; sharers do not tell what they do", error)
                    return "", 0
        return str(self._slots_path), replica.share_slot

    def take(self, replica: Replica) -> None:
        """A replica has its process now: if it holds a share, it is held to it from now on."""
        if self._share_of(replica) is not None:
            if replica.share_slot is None:
                replica.share_slot = self._free_slot()
            self._changed()

    def set_share(self, action: SetShare) -> None:
        """Put another share of a living replica in force; for one that is still to be started it is kept."""
        replica = self._workers.replicas.get(action.replica_id)
        if replica is None or replica.action is None:
            self._workers.counts["stale_actions"] += 1
            return
        if replica.action.share == action.share:
            self._workers.counts["repeated_actions"] += 1
            return
        replica.action = replace(replica.action, share=action.share)
        if replica.share_slot is None:
            replica.share_slot = self._free_slot()
        self._changed()

    def release(self, replica: Replica) -> None:
        """The replica is gone."""
        if any(entry.replica_id == replica.replica_id for entry in self._table):
            self._changed()

    def begin(self) -> None:
        """What should run is known from now on: the table is whole and may be told."""
        self._may_tell = True
        self._changed()

    def _share_of(self, replica: Replica) -> Share | None:
        return replica.action.share if replica.action is not None else None

    def _free_slot(self) -> int:
        """Slots are given out in turn, so that a worker that lives a little too long writes into nobody's."""
        taken = {replica.share_slot for replica in self._workers.replicas.values()}
        for _ in range(NUM_SLOTS):
            slot, self._next_slot = self._next_slot, (self._next_slot + 1) % NUM_SLOTS
            if slot not in taken:
                return slot
        raise BackendError(f"more than {NUM_SLOTS} replicas share devices of this machine; it holds no more of them")

    def _entries(self) -> tuple[SharerEntry, ...]:
        entries = []
        for replica in self._workers.replicas.values():
            share = self._share_of(replica)
            action = replica.action
            if share is None or action is None or replica.identity is None or replica.has_exited:
                continue
            entries.append(
                SharerEntry(
                    workload_id=replica.workload_id,
                    replica_id=replica.replica_id,
                    device_id=action.device_id,
                    share=share,
                    slot=replica.share_slot or 0,
                    process=replica.identity,
                    is_slo=not replica.is_job,
                )
            )
        return tuple(sorted(entries, key=lambda entry: entry.replica_id))

    # --- what people are told ----------------------------------------------------------------------------------------

    def sharing(self) -> SharingStatus:
        """How this machine shares its devices now; any thread may ask."""
        table = self._table
        if not table:
            return self._nobody()
        if all(self._kinds.get(entry.device_id) == "gpu" for entry in table):
            return SharingStatus(enforced=_ON_GPU, tenants=tuple(_starting(entry, _ON_GPU) for entry in table))
        found = read_status(self._directory / STATUS_NAME)
        if found is not None and found.pid != self._daemon_pid:
            # What the one before has left behind says nothing about now.
            found = None
        age_s = time.monotonic() - found.written_at_s if found is not None else 0.0
        if self._failure or found is None or not 0.0 <= age_s <= _FRESH_S:
            reason = self._failure or (
                "the share daemon is being started, nobody is held yet"
                if found is None
                else f"the share daemon has said nothing for {age_s:.1f} s"
            )
            told = f"shares are not enforced at this moment: {reason}"
            return SharingStatus(
                enforced=told, device_cpus=self._device_cpus, tenants=tuple(_starting(entry, told) for entry in table)
            )
        known = {tenant.replica_id: tenant for tenant in found.sharing.tenants}
        return replace(
            found.sharing,
            tenants=tuple(
                known.get(entry.replica_id) or _starting(entry, "its share is about to be enforced") for entry in table
            ),
        )

    def _nobody(self) -> SharingStatus:
        """What is told before anybody shares: what will hold them. Found out once, by trying."""
        if self._untried is None:
            if "cpu" in self._kinds.values():
                self._untried = describe_enforcer(self._environment.get(MECHANISM_VARIABLE, ""))
            else:
                self._untried = "none", _ON_GPU
        mechanism, enforced = self._untried
        return SharingStatus(
            mechanism=mechanism,
            enforced=f"no device is shared yet; once one is, {enforced}",
            device_cpus=self._device_cpus,
        )

    # --- the daemon --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the daemon, which lives on and holds the sharers as they are."""
        self._is_closed = True
        if self._retry is not None:
            self._retry.cancel()
        if self._connection is not None:
            self._connection.close()

    def end_daemon(self) -> None:
        """End the daemon, which lifts every limit first. Blocks for a moment; for the end of a platform."""
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
        self._slots_path.unlink(missing_ok=True)

    def _changed(self) -> None:
        if not self._may_tell or self._is_closed:
            return
        self._table = self._entries()
        if self._connection is not None:
            self._send()
        elif self._needs_daemon():
            self._ensure()

    def _needs_daemon(self) -> bool:
        return any(self._kinds.get(entry.device_id) != "gpu" for entry in self._table)

    def _start_daemon_early(self) -> None:
        """Before the first sharer is born, so that it is held from its first moments."""
        if self._may_tell and not self._is_closed and "cpu" in self._kinds.values():
            self._ensure()

    def _send(self) -> None:
        assert self._connection is not None
        held = tuple(entry for entry in self._table if self._kinds.get(entry.device_id) != "gpu")
        try:
            self._connection.send(
                ShareTable(
                    sharers=held,
                    slots_path=str(self._slots_path),
                    device_cpus=self._device_cpus,
                    sent_at_s=time.monotonic(),
                )
            )
        except BackendError as error:
            self._failure = str(error)

    def _ensure(self) -> None:
        if self._connection is None and self._retry is None and not self._is_closed:
            self._num_attempts = 0
            self._try_connect()

    def _try_connect(self) -> None:
        self._retry = None
        if self._is_closed or self._connection is not None:
            return
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.setblocking(False)
            stream.connect(str(self._directory / SOCKET_NAME))
        except OSError:
            stream.close()
            self._start_or_wait()
            return
        connection: Connection[ShareTable] = Connection(
            self._workers.reactor, stream, ShareTable, lambda connection, message: None, self._on_close
        )
        if connection.peer_uid != os.getuid():
            connection.close("the share daemon belongs to somebody else")
            return
        self._connection = connection
        self._daemon_pid = connection.peer_pid
        self._process = identify(connection.peer_pid)
        self._failure = ""
        if self._may_tell:
            self._send()

    def _start_or_wait(self) -> None:
        """Nobody answers: start a daemon unless one is on its way, and look again a little later."""
        self._reap()
        is_coming = self._process is not None and live_stat(self._process) is not None
        if is_coming and self._num_attempts * CONNECT_INTERVAL_S > START_TIMEOUT_S and self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            is_coming = False
        if not is_coming:
            if self._num_starts >= MAX_STARTS_IN_A_ROW:
                self._give_up("the share daemon does not come up")
                return
            self._num_starts += 1
            self._num_attempts = 0
            self._workers.counts["share_daemons"] += 1
            try:
                self._started_pid = spawn_detached(self._command, self._environment, self._log_path)
            except BackendError as error:
                self._give_up(str(error))
                return
            self._process = identify(self._started_pid)
        self._num_attempts += 1
        self._retry = self._workers.reactor.after(CONNECT_INTERVAL_S, self._try_connect)

    def _give_up(self, reason: str) -> None:
        """Say so, and try again a while later: sharers run unlimited meanwhile."""
        line = last_line(self._log_path)
        self._failure = f"{reason}: {line}" if line else reason
        _log.error("%s", self._failure)
        self._num_starts = 0
        self._retry = self._workers.reactor.after(_RETRY_S, self._try_connect)

    def _on_close(self, connection: Connection[ShareTable], reason: str) -> None:
        if self._connection is not connection:
            return
        self._connection = None
        self._daemon_pid = 0
        if self._is_closed:
            return
        _log.warning("the share daemon is gone: %s", reason or "it closed the connection")
        self._continue_all()
        if self._process is not None and live_stat(self._process) is None:
            # It had come up, so its death is no failure to start; one that dies again and again is, though.
            self._num_starts = min(self._num_starts, 1)
        if self._needs_daemon():
            self._ensure()

    def _continue_all(self) -> None:
        """Nobody stays stopped: the daemon's guard sees to that, and this does where the guard was ended as well."""
        for replica in self._workers.replicas.values():
            if replica.identity is not None and replica.phase is not Phase.GONE and self._share_of(replica) is not None:
                signal_group(replica.identity, signal.SIGCONT)

    def _reap(self) -> None:
        for pid in (self._started_pid, self._process.pid if self._process is not None else None):
            if pid is not None:
                reap(pid)

    @property
    def _log_path(self) -> Path:
        return self._workers.state_dir / "shares.log"


def _starting(entry: SharerEntry, reason: str) -> TenantStatus:
    return TenantStatus(
        workload_id=entry.workload_id,
        replica_id=entry.replica_id,
        device_id=entry.device_id,
        request=entry.share.request,
        limit=entry.share.limit,
        memory_mb=entry.share.memory_mb,
        granted=1.0,
        reason=reason,
    )
