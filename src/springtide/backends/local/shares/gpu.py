"""Sharers of GPUs: the library in their processes, the daemon that grants them tokens, and its status for users."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from springtide.backends.control_channel.replica_table import ReplicaTable
from springtide.backends.local.devices import Gpu
from springtide.backends.local.members import ProcessHandle
from springtide.backends.local.shares.daemon_keeper import DaemonKeeper, all_starting, starting
from springtide.backends.processes import ProcessIdentity
from springtide.backends.sharing.gpu.enforcement import Enforcement, choose_enforcement
from springtide.backends.sharing.gpu.library import is_loaded, preload
from springtide.backends.sharing.gpu.segments import SOCKET_VARIABLE
from springtide.backends.sharing.gpu.table import (
    SOCKET_NAME,
    STATUS_NAME,
    TENANT_SOCKET_NAME,
    GpuDaemonStatus,
    GpuTable,
    GpuTenantEntry,
)
from springtide.backends.sharing.table import MECHANISM_VARIABLE, SharerEntry, read_whole
from springtide.core.resources import DeviceId
from springtide.core.status.shares import SharingStatus, TenantStatus

DAEMON = "springtide.backends.sharing.gpu.daemon"
_WITHOUT_LIBRARY = "its process was started without the library that would hold it: it is held from its next start on"
_LOOK_S = 1.0
_log = logging.getLogger(__name__)


class GpuShares:
    """Has the shares of GPUs enforced. Runs on the I/O thread, except for `sharing` and `idle_status`.

    `gpus` are the GPUs of the `num_devices` devices that are GPUs.
    """

    def __init__(
        self,
        workers: ReplicaTable[ProcessHandle],
        directory: Path,
        slots_path: Path,
        environment: Mapping[str, str],
        gpus: Mapping[DeviceId, Gpu],
        *,
        num_devices: int,
        python: str = sys.executable,
        on_up: Callable[[], None],
    ) -> None:
        self.is_here = num_devices > 0
        self._are_known = len(gpus) == num_devices and all(gpu.uuid for gpu in gpus.values())
        self._directory = directory
        self._slots_path = slots_path
        self._gpus = gpus
        self._held: tuple[SharerEntry, ...] = ()
        self._loaded: dict[ProcessIdentity, tuple[bool, float]] = {}
        self._enforcement = self._choose(environment)
        self._additions = self._additions_to(environment)
        if self.is_here:
            _log.log(logging.INFO if self._enforcement.library else logging.WARNING, "%s", self._enforcement.enforced)
        self.keeper = DaemonKeeper(
            workers,
            "GPU share daemon",
            GpuTable,
            [python, "-m", DAEMON, str(directory)],
            environment,
            directory / SOCKET_NAME,
            workers.state_dir / "gpu-shares.log",
            on_up=on_up,
            on_gone=self._on_gone,
        )

    @property
    def additions(self) -> Mapping[str, str]:
        """Additions to the environment of each process that may use a GPU: the library, and its daemon's socket."""
        return self._additions

    def is_usable(self, pid: int) -> bool:
        """Whether shares of this process's children can be enforced: it has the library, or none is needed."""
        return self._enforcement.library is None or is_loaded(pid)

    def ensure(self) -> None:
        """Start the daemon, before the first sharer uses its device."""
        if self._enforcement.library is not None:
            self.keeper.ensure()

    def set_sharers(self, entries: Sequence[SharerEntry]) -> None:
        """Replace the sharers of GPUs."""
        self._held = tuple(entries)
        living = {entry.process for entry in self._held}
        self._loaded = {process: seen for process, seen in self._loaded.items() if process in living}
        if self._enforcement.library is None:
            return
        if self.keeper.is_up:
            tenants = tuple(self._entry(entry) for entry in entries)
            self.keeper.send(GpuTable(tenants=tenants, slots_path=str(self._slots_path), sent_at_s=time.monotonic()))
        elif self._held:
            self.keeper.ensure()

    def sharing(self, entries: Sequence[SharerEntry]) -> SharingStatus:
        """The status of these sharers; thread-safe."""
        chosen = self._enforcement
        if chosen.library is None:
            return SharingStatus(
                mechanism=chosen.mechanism, enforced=chosen.enforced, tenants=all_starting(entries, chosen.enforced)
            )
        found = read_whole(self._directory / STATUS_NAME, GpuDaemonStatus)
        problem = self.keeper.problem(found)
        if problem or found is None:
            reason = f"shares of GPUs are not enforced at this moment: {problem}"
            return SharingStatus(enforced=reason, tenants=all_starting(entries, reason))
        known = {(tenant.replica_id, tenant.device_id): tenant for tenant in found.sharing.tenants}
        tenants = tuple(self._tenant_status(entry, known.get((entry.replica_id, entry.device_id))) for entry in entries)
        enforced = chosen.enforced
        if found.num_unknown:
            number = "1 process" if found.num_unknown == 1 else f"{found.num_unknown} processes"
            enforced += f"; not held: {number} with a whole GPU or without any share"
        return replace(found.sharing, mechanism=chosen.mechanism, enforced=enforced, tenants=tenants)

    def idle_status(self) -> SharingStatus:
        """The status before the first sharer, with the mechanism that will be used; thread-safe."""
        chosen = self._enforcement
        return SharingStatus(
            mechanism=chosen.mechanism, enforced=f"no device is shared yet; once one is, {chosen.enforced}"
        )

    def _choose(self, environment: Mapping[str, str]) -> Enforcement:
        if not self.is_here:
            return Enforcement(mechanism="none", enforced="there is no GPU")
        only = environment.get(MECHANISM_VARIABLE, "")
        return choose_enforcement(environment, only, are_known=self._are_known)

    def _additions_to(self, environment: Mapping[str, str]) -> Mapping[str, str]:
        library = self._enforcement.library
        if library is None:
            return {}
        return {**preload(environment, library), SOCKET_VARIABLE: str(self._directory / TENANT_SOCKET_NAME)}

    def _entry(self, entry: SharerEntry) -> GpuTenantEntry:
        return GpuTenantEntry(
            workload_id=entry.workload_id,
            replica_id=entry.replica_id,
            device_id=entry.device_id,
            device_uuid=self._gpus[entry.device_id].uuid,
            share=entry.share,
            process=entry.process,
            is_slo=entry.is_slo,
            slot=entry.slot,
        )

    def _tenant_status(self, entry: SharerEntry, tenant: TenantStatus | None) -> TenantStatus:
        if not self._has_library(entry.process):
            return starting(entry, _WITHOUT_LIBRARY)
        return tenant or starting(entry, "its share is about to be enforced")

    def _has_library(self, process: ProcessIdentity) -> bool:
        """Whether the process has loaded the library. Checked again until it has: a new process may not have yet."""
        has_it, seen_at_s = self._loaded.get(process, (False, -_LOOK_S))
        now_s = time.monotonic()
        if not has_it and now_s - seen_at_s >= _LOOK_S:
            has_it = is_loaded(process.pid)
            self._loaded[process] = (has_it, now_s)
        return has_it

    def _on_gone(self) -> None:
        if self._held:
            self.ensure()
