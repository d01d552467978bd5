"""Sharers of CPU devices: the daemon that enforces their shares, and its status for users."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from springtide.backends.control_channel.members import MemberPhase
from springtide.backends.control_channel.replica_table import ReplicaTable
from springtide.backends.local.members import ProcessHandle
from springtide.backends.local.shares.daemon_keeper import DaemonKeeper, all_starting, starting
from springtide.backends.processes import signal_group
from springtide.backends.sharing.cpu.enforcers import describe_enforcer
from springtide.backends.sharing.table import (
    MECHANISM_VARIABLE,
    SOCKET_NAME,
    STATUS_NAME,
    DaemonStatus,
    SharerEntry,
    ShareTable,
    read_whole,
)
from springtide.core.status.shares import SharingStatus

DAEMON = "springtide.backends.sharing.cpu.daemon"


class CpuShares:
    """Has the shares of CPU devices enforced. Runs on the I/O thread, except for `sharing` and `idle_status`.

    A device is `device_cpus` cores; `is_here` says whether this machine has any such device.
    """

    def __init__(
        self,
        workers: ReplicaTable[ProcessHandle],
        directory: Path,
        slots_path: Path,
        environment: Mapping[str, str],
        device_cpus: float,
        *,
        is_here: bool,
        python: str = sys.executable,
        on_up: Callable[[], None],
    ) -> None:
        self.is_here = is_here
        self._workers = workers
        self._directory = directory
        self._slots_path = slots_path
        self._device_cpus = device_cpus
        self._environment = environment
        self._held: tuple[SharerEntry, ...] = ()
        self._mechanism: tuple[str, str] | None = None
        self.keeper = DaemonKeeper(
            workers,
            "share daemon",
            ShareTable,
            [python, "-m", DAEMON, str(directory)],
            environment,
            directory / SOCKET_NAME,
            workers.state_dir / "shares.log",
            on_up=on_up,
            on_gone=self._on_gone,
        )

    def ensure(self) -> None:
        self.keeper.ensure()

    def set_sharers(self, entries: Sequence[SharerEntry]) -> None:
        """Replace the sharers of CPU devices."""
        self._held = tuple(entries)
        if self.keeper.is_up:
            self.keeper.send(
                ShareTable(
                    sharers=self._held,
                    slots_path=str(self._slots_path),
                    device_cpus=self._device_cpus,
                    sent_at_s=time.monotonic(),
                )
            )
        elif self._held:
            self.keeper.ensure()

    def sharing(self, entries: Sequence[SharerEntry]) -> SharingStatus:
        """The status of these sharers; thread-safe."""
        found = read_whole(self._directory / STATUS_NAME, DaemonStatus)
        problem = self.keeper.problem(found)
        if problem or found is None:
            reason = f"shares are not enforced at this moment: {problem}"
            return SharingStatus(enforced=reason, device_cpus=self._device_cpus, tenants=all_starting(entries, reason))
        known = {(tenant.replica_id, tenant.device_id): tenant for tenant in found.sharing.tenants}
        tenants = [
            known.get((entry.replica_id, entry.device_id)) or starting(entry, "its share is about to be enforced")
            for entry in entries
        ]
        return replace(found.sharing, tenants=tuple(tenants))

    def idle_status(self) -> SharingStatus:
        """The status before the first sharer, with the mechanism found by one trial; thread-safe."""
        if self._mechanism is None:
            self._mechanism = describe_enforcer(self._environment.get(MECHANISM_VARIABLE, ""))
        mechanism, enforced = self._mechanism
        return SharingStatus(
            mechanism=mechanism,
            enforced=f"no device is shared yet; once one is, {enforced}",
            device_cpus=self._device_cpus,
        )

    def _on_gone(self) -> None:
        self._continue_all()
        if self._held:
            self.keeper.ensure()

    def _continue_all(self) -> None:
        """Continue every stopped sharer. The daemon's guard does that, unless it was killed as well."""
        for replica in self._workers.replicas.values():
            shares = replica.action is not None and replica.action.share is not None
            if replica.handle.identity is not None and replica.phase is not MemberPhase.GONE and shares:
                signal_group(replica.handle.identity, signal.SIGCONT)
