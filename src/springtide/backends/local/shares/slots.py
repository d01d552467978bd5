"""The executor's side of shares: slots for sharers, the daemons that enforce shares, and their status."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from springtide.backends.control_channel.replica_table import ReplicaTable
from springtide.backends.local.devices import Gpu, gpus_of
from springtide.backends.local.members import ProcessHandle, Worker
from springtide.backends.local.shares.cpu import CpuShares
from springtide.backends.local.shares.gpu import GpuShares
from springtide.backends.sharing.table import SharerEntry, slots_path
from springtide.core.actions import SetShare
from springtide.core.errors import BackendError
from springtide.core.resources import DeviceId, DeviceKind, Node
from springtide.core.shares import Share
from springtide.core.status.shares import SharingStatus
from springtide.core.wire.shares import NUM_SLOTS, clear_slot, make_slots

_log = logging.getLogger(__name__)


class ShareSlots:
    """The shared devices of this machine and their sharers.

    Runs on the I/O thread, except for `sharing`, which is thread-safe. The daemons (`cpu`, `gpu`) are started at the
    first share and live on after this platform, as the sharers do. `gpus` are the machine's GPUs, in device order.
    """

    def __init__(
        self,
        workers: ReplicaTable[ProcessHandle],
        directory: Path,
        nodes: Sequence[Node],
        gpus: Sequence[Gpu],
        environment: Mapping[str, str],
        python: str = sys.executable,
    ) -> None:
        self._workers = workers
        devices = [device for node in nodes for device in node.devices]
        self._kinds: Mapping[str, DeviceKind] = {device.device_id: device.kind for device in devices}
        self._gpus = gpus_of(nodes, gpus)
        self._slots_path = slots_path(directory)
        self._next_slot = 0
        self._is_table_complete = False
        self._is_closed = False
        self._table: tuple[SharerEntry, ...] = ()
        self.cpu = CpuShares(
            workers,
            directory,
            self._slots_path,
            environment,
            min(1.0, (os.cpu_count() or 1) / max(1, len(devices))),
            is_here="cpu" in self._kinds.values(),
            python=python,
            on_up=self._changed,
        )
        self.gpu = GpuShares(
            workers,
            directory,
            self._slots_path,
            environment,
            self._gpus,
            num_devices=sum(kind == "gpu" for kind in self._kinds.values()),
            python=python,
            on_up=self._changed,
        )

    # --- sharers -----------------------------------------------------------------------------------------------------

    def slot_of(self, replica: Worker) -> tuple[str, int]:
        """Return (path, slot) for a replica that is about to be started; an empty path if it needs none."""
        share = self._share_of(replica)
        if share is None:
            return "", 0
        self._ensure_daemons()
        if replica.handle.share_slot is None:
            replica.handle.share_slot = self._free_slot()
            try:
                clear_slot(self._slots_path, replica.handle.share_slot)
            except BackendError:
                # It is the first sharer since boot, or the file is damaged. Either no living process has the file
                # mapped, or its reports are lost and the daemon relies on measured usage.
                try:
                    make_slots(self._slots_path)
                except BackendError as error:
                    _log.error("%s; sharers do not tell what they do", error)
                    return "", 0
        return str(self._slots_path), replica.handle.share_slot

    def gpu_of(self, device_id: DeviceId) -> Gpu | None:
        return self._gpus.get(device_id)

    def take(self, replica: Worker) -> None:
        """A replica has its process now: if it has a share, enforce it from now on."""
        if self._share_of(replica) is not None:
            if replica.handle.share_slot is None:
                replica.handle.share_slot = self._free_slot()
            self._changed()

    def set_share(self, action: SetShare) -> None:
        """Change the share of a replica; for one that is not started yet, it takes effect at its start."""
        replica = self._workers.replicas.get(action.replica_id)
        if replica is None or replica.action is None:
            self._workers.counts["stale_actions"] += 1
            return
        if replica.action.share == action.share:
            self._workers.counts["repeated_actions"] += 1
            return
        replica.action = replace(replica.action, share=action.share)
        if replica.handle.share_slot is None:
            replica.handle.share_slot = self._free_slot()
        self._changed()

    def release(self, replica: Worker) -> None:
        if any(entry.replica_id == replica.replica_id for entry in self._table):
            self._changed()

    def begin(self) -> None:
        """Recovery is over: the table of sharers is complete, so it may be sent to the daemons."""
        self._is_table_complete = True
        self._changed()

    def _share_of(self, replica: Worker) -> Share | None:
        return replica.action.share if replica.action is not None else None

    def _free_slot(self) -> int:
        """The next free slot. Slots are used in turn, so that a worker that lingers does not write into a new one's."""
        taken = {replica.handle.share_slot for replica in self._workers.replicas.values()}
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
            if share is None or action is None or replica.handle.identity is None or replica.has_exited:
                continue
            entries += [
                SharerEntry(
                    workload_id=replica.workload_id,
                    replica_id=replica.replica_id,
                    device_id=device_id,
                    share=share,
                    slot=replica.handle.share_slot or 0,
                    process=replica.handle.identity,
                    is_slo=not replica.is_job,
                )
                for device_id in action.device_ids
            ]
        return tuple(sorted(entries, key=lambda entry: entry.replica_id))

    # --- status ------------------------------------------------------------------------------------------------------

    def sharing(self) -> SharingStatus:
        """How this machine shares its devices now; thread-safe."""
        on_cpu, on_gpu = self._split(self._table)
        statuses = [side.sharing(entries) for side, entries in ((self.cpu, on_cpu), (self.gpu, on_gpu)) if entries]
        if not statuses:
            statuses = [side.idle_status() for side in (self.cpu, self.gpu) if side.is_here]
        if not statuses:
            return SharingStatus()
        return statuses[0] if len(statuses) == 1 else _both(statuses[0], statuses[1])

    # --- the share daemons -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Disconnect from the daemons, which continue to enforce shares."""
        self._is_closed = True
        self.cpu.keeper.close()
        self.gpu.keeper.close()

    def end_daemons(self) -> None:
        """End the daemons, which lifts every limit. Blocks shortly; used when the platform goes down."""
        self.cpu.keeper.end()
        self.gpu.keeper.end()
        self._slots_path.unlink(missing_ok=True)

    def _changed(self) -> None:
        if not self._is_table_complete or self._is_closed:
            return
        self._table = self._entries()
        on_cpu, on_gpu = self._split(self._table)
        self.cpu.set_sharers(on_cpu)
        self.gpu.set_sharers(on_gpu)

    def _ensure_daemons(self) -> None:
        """Start the daemons before the first sharer, so that its share is enforced from its start."""
        if self._is_table_complete and not self._is_closed:
            for side in (self.cpu, self.gpu):
                if side.is_here:
                    side.ensure()

    def _split(self, table: Sequence[SharerEntry]) -> tuple[list[SharerEntry], list[SharerEntry]]:
        on_gpu = [entry for entry in table if self._kinds.get(entry.device_id) == "gpu"]
        return [entry for entry in table if entry not in on_gpu], on_gpu


def _both(cpu: SharingStatus, gpu: SharingStatus) -> SharingStatus:
    """The status of a machine that shares devices of both kinds."""
    return replace(
        cpu,
        mechanism=f"{cpu.mechanism} and {gpu.mechanism}",
        enforced=f"of CPU devices: {cpu.enforced}; of GPUs: {gpu.enforced}",
        tick_s=max(cpu.tick_s, gpu.tick_s),
        late_p99_s=max(cpu.late_p99_s, gpu.late_p99_s),
        reaction_p99_s=max(cpu.reaction_p99_s, gpu.reaction_p99_s),
        tenants=(*cpu.tenants, *gpu.tenants),
    )
