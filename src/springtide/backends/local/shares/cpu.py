"""Sharers of CPU devices: their daemon, and what people are told of what it holds them to."""

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
from springtide.backends.local.shares.daemon_keeper import Keeper, all_starting, starting
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
    """Has sharers of CPU devices held. Runs on the I/O thread, but for `sharing` and `unshared`.

    `device_cpus` cores are a device; `is_here` says whether this machine has any such device.
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
        self._untried: tuple[str, str] | None = None
        self.keeper = Keeper(
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

    def hold(self, entries: Sequence[SharerEntry]) -> None:
        """From now on exactly these share CPU devices."""
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
        """How they are held now; any thread may ask."""
        found = read_whole(self._directory / STATUS_NAME, DaemonStatus)
        doubt = self.keeper.doubt(found)
        if doubt or found is None:
            told = f"shares are not enforced at this moment: {doubt}"
            return SharingStatus(enforced=told, device_cpus=self._device_cpus, tenants=all_starting(entries, told))
        known = {tenant.replica_id: tenant for tenant in found.sharing.tenants}
        tenants = [
            known.get(entry.replica_id) or starting(entry, "its share is about to be enforced") for entry in entries
        ]
        return replace(found.sharing, tenants=tuple(tenants))

    def unshared(self) -> SharingStatus:
        """The status before the first sharer: what will hold it. Found out once, by trying; any thread may ask."""
        if self._untried is None:
            self._untried = describe_enforcer(self._environment.get(MECHANISM_VARIABLE, ""))
        mechanism, enforced = self._untried
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
        """The daemon's guard continues every sharer that was stopped; this does where the guard was ended as well."""
        for replica in self._workers.replicas.values():
            shares = replica.action is not None and replica.action.share is not None
            if replica.handle.identity is not None and replica.phase is not MemberPhase.GONE and shares:
                signal_group(replica.handle.identity, signal.SIGCONT)
