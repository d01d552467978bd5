"""The tenants of this machine's GPUs: their shared memory, their processes, and which tenant a process belongs to."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from springtide.backends.processes import ProcessIdentity, boot_id, live_stat, read_stat
from springtide.backends.sharing.gpu.meter import Meter
from springtide.backends.sharing.gpu.pods import pod_of
from springtide.backends.sharing.gpu.segments import (
    FULL,
    NUM_PROCESSES,
    OK,
    UNKNOWN,
    Segments,
    UsageSegment,
    adopt_segments,
    make_segments,
    may_keep,
)
from springtide.backends.sharing.gpu.table import GpuTenantEntry, uuid_bytes
from springtide.core.errors import BackendError
from springtide.core.workload import ReplicaId
from springtide.serving.share_control import Grant
from springtide.serving.share_control import Tenant as ControlTenant

# Processes ignore the grant if the heartbeat is older than the first (the daemon is gone), and no launch waits
# longer than the second.
STALE_AFTER_NS = 100_000_000
MAX_WAIT_NS = 2_000_000_000
RETRY_MS = 1000
_MB = 1_000_000
# How many ancestors of a process are searched for the leader of a replica.
_MAX_ANCESTORS = 32
_DEAD_STATES = "ZX"
TenantKey = tuple[ReplicaId, bytes]


@dataclass
class Member:
    """A process with a slot; `pidfd` turns readable when it dies (None: `check` has to poll)."""

    pid: int
    start_ticks: int
    pidfd: int | None


@dataclass
class GpuTenant:
    """One replica on one device.

    `gone_launches` are the launches of its dead processes; `num_full` counts the processes that got no slot since one
    was last free.
    """

    entry: GpuTenantEntry
    uuid: bytes
    name: str
    control: ControlTenant
    segments: Segments | None = None
    usage: UsageSegment = field(default_factory=UsageSegment)
    meter: Meter = field(default_factory=lambda: Meter(UsageSegment()))
    members: dict[int, Member] = field(default_factory=dict)
    grant: Grant = field(default_factory=lambda: Grant(rate=1.0, state="NONE", reason=""))
    num_full: int = 0
    gone_launches: int = 0
    error: str = ""

    @property
    def num_launches(self) -> int:
        """Launches since the tenant began."""
        return self.gone_launches + sum(
            self.usage.process(slot).num_launches for slot in self.members if self.usage.data
        )

    @property
    def memory_used_mb(self) -> int:
        """The memory that its living processes have allocated."""
        if not self.usage.data:
            return 0
        return -(-sum(self.usage.process(slot).memory_bytes for slot in self.members) // _MB)

    @property
    def is_waiting(self) -> bool:
        """Whether one of its threads waits for tokens."""
        usage = self.usage
        return bool(usage.data) and any(usage.process(slot).num_waiting for slot in self.members)


@dataclass(frozen=True)
class TenantReply:
    """The answer to a process that asked for its share; the descriptors remain the daemon's."""

    status: int
    slot: int = 0
    segment_id: int = 0
    descriptors: tuple[int, ...] = ()
    member: Member | None = None


class GpuTenants:
    """The tenants of all devices. The loop watches the pidfds in `new_pidfds` and calls `died`.

    `place` is the directory of their shared memory.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self.by_key: dict[TenantKey, GpuTenant] = {}
        self._leaders: dict[int, ReplicaId] = {}
        self._pods: dict[str, ReplicaId] = {}
        self._pidfds: dict[int, tuple[GpuTenant, int]] = {}
        self.new_pidfds: list[int] = []
        self.num_made = 0
        self.num_adopted = 0
        self.num_deaths = 0

    @property
    def num_processes(self) -> int:
        """How many processes have a slot."""
        return sum(len(tenant.members) for tenant in self.by_key.values())

    # --- the table ---------------------------------------------------------------------------------------------------

    def take(self, entries: Iterable[GpuTenantEntry]) -> None:
        """Replace the tenants; the state of those that stay is kept."""
        wanted: dict[TenantKey, GpuTenantEntry] = {}
        for entry in entries:
            try:
                wanted[entry.replica_id, uuid_bytes(entry.device_uuid)] = entry
            except BackendError:
                wanted[entry.replica_id, b""] = entry
        for key, tenant in list(self.by_key.items()):
            entry_now = wanted.get(key)
            if entry_now is None or _holder(entry_now) != _holder(tenant.entry):
                self.drop(tenant)
        for key, entry in wanted.items():
            self._enter(key, entry)
        self._note_holders()

    def _note_holders(self) -> None:
        entries = [tenant.entry for tenant in self.by_key.values()]
        self._leaders = {entry.process.pid: entry.replica_id for entry in entries if entry.process is not None}
        self._pods = {entry.pod_uid.lower(): entry.replica_id for entry in entries if entry.process is None}

    def _enter(self, key: TenantKey, entry: GpuTenantEntry) -> None:
        control = ControlTenant(tenant_id=entry.replica_id, share=entry.share, is_slo=entry.is_slo)
        tenant = self.by_key.get(key)
        if tenant is None:
            tenant = GpuTenant(entry, key[1], _name_of(entry), control)
            self.by_key[key] = tenant
        is_changed = tenant.entry.share.memory_mb != entry.share.memory_mb
        tenant.entry, tenant.control = entry, control
        if tenant.segments is None:
            self._open(tenant)
        elif is_changed:
            tenant.segments.set_memory_limit(entry.share.memory_mb * _MB)

    def _open(self, tenant: GpuTenant) -> None:
        """Adopt the files of an earlier daemon, or create new ones."""
        entry = tenant.entry
        if not tenant.uuid:
            tenant.error = f"its share is not enforced: {entry.device_uuid!r} is no UUID of a GPU"
            return
        limit_bytes = entry.share.memory_mb * _MB
        now_ns = time.monotonic_ns()
        segments = adopt_segments(self._place, tenant.name)
        if segments is not None:
            self.num_adopted += 1
            segments.set_memory_limit(limit_bytes)
        else:
            try:
                segments = make_segments(
                    self._place,
                    tenant.name,
                    device_uuid=tenant.uuid,
                    tenant=f"{entry.workload_id}/{entry.replica_id}",
                    memory_limit_bytes=limit_bytes,
                    stale_after_ns=STALE_AFTER_NS,
                    max_wait_ns=MAX_WAIT_NS,
                    now_ns=now_ns,
                )
            except BackendError as error:
                tenant.error = f"its share is not enforced: {error}"
                return
            self.num_made += 1
        tenant.segments, tenant.error = segments, ""
        tenant.usage = segments.read() or UsageSegment()
        tenant.meter = Meter(tenant.usage)
        # Grant what was used while no daemon ran: else every launch would now wait for it.
        segments.write_tick(now_ns, tenant.usage.used_ns, segments.flags, segments.rate_ppm)
        for slot, (pid, start_ticks) in segments.occupants().items():
            self._watch(tenant, slot, pid, start_ticks)

    def drop(self, tenant: GpuTenant) -> None:
        """Remove a tenant: its files are given up, and its processes are no longer limited."""
        self.by_key = {key: other for key, other in self.by_key.items() if other is not tenant}
        self._drop_members(tenant)
        if tenant.segments is not None:
            tenant.segments.give_up(time.monotonic_ns())
            tenant.segments = None

    def _drop_members(self, tenant: GpuTenant) -> None:
        for member in tenant.members.values():
            self._unwatch(member)
        tenant.members.clear()

    def sweep(self) -> None:
        """Remove the files of tenants that are no longer in the table."""
        known = {tenant.name for tenant in self.by_key.values()}
        for path in list(self._place.glob("*.*")):
            if path.name.partition(".")[0] in known:
                continue
            segments = adopt_segments(self._place, path.stem) if path.suffix == ".grant" else None
            if segments is not None:
                segments.give_up(time.monotonic_ns())
            path.unlink(missing_ok=True)

    def check(self) -> bool:
        """Find dead processes and tenants, and replace damaged files. Returns whether a tenant is gone."""
        is_gone = False
        for tenant in list(self.by_key.values()):
            if not is_held(tenant.entry):
                self.drop(tenant)
                is_gone = True
                continue
            for slot, member in list(tenant.members.items()):
                if member.pidfd is None and not _is_alive(member.pid, member.start_ticks):
                    self._remove_member(tenant, slot)
            if tenant.segments is not None and not tenant.segments.is_whole():
                self._drop_members(tenant)
                tenant.segments.give_up(time.monotonic_ns())
                tenant.segments = None
            if tenant.segments is None and tenant.uuid:
                self._open(tenant)
        if is_gone:
            self._note_holders()
        return is_gone

    def close(self, *, is_giving_up: bool) -> None:
        """Release everything; the files are removed if `is_giving_up`, else kept for the next daemon."""
        for tenant in list(self.by_key.values()):
            if is_giving_up:
                self.drop(tenant)
            else:
                self._drop_members(tenant)
                if tenant.segments is not None:
                    tenant.segments.close()
        self.by_key.clear()
        if is_giving_up:
            self.sweep()
            if not any(self._place.iterdir()):
                self._place.rmdir()

    # --- their processes ---------------------------------------------------------------------------------------------

    def answer(self, pid: int, user_id: int, uuid: bytes, is_there: Callable[[], bool] = lambda: True) -> TenantReply:
        """Find the tenant of a process, from the kernel's data alone, and give the process a slot on the device.

        `is_there` says whether the process that asked still has that number, which may have been reused.
        """
        own_id = os.getuid()
        if own_id not in (0, user_id) or pid <= 0:
            return TenantReply(UNKNOWN)
        stat = read_stat(pid)
        tenant = self._find(pid, uuid)
        if stat is None or stat.state in _DEAD_STATES or tenant is None or tenant.segments is None or not is_there():
            return TenantReply(UNKNOWN)
        segments = tenant.segments
        slot = next((s for s, m in tenant.members.items() if (m.pid, m.start_ticks) == (pid, stat.start_ticks)), None)
        if slot is None:
            slot = next((number for number in range(NUM_PROCESSES) if number not in tenant.members), None)
            if slot is None:
                tenant.num_full += 1
                return TenantReply(FULL)
            segments.clear(slot)
            segments.occupy(slot, pid, stat.start_ticks)
            self._watch(tenant, slot, pid, stat.start_ticks)
            if slot not in tenant.members:
                return TenantReply(UNKNOWN)
        descriptors = (segments.grant_descriptor, segments.usage_descriptor)
        return TenantReply(OK, slot, segments.segment_id, descriptors, tenant.members[slot])

    def _find(self, pid: int, uuid: bytes) -> GpuTenant | None:
        """The tenant whose leader is the process, its nearest ancestor, or the leader of its group or session.

        Else the one whose pod it runs in.
        """
        if self._leaders:
            for candidate in _relatives(pid):
                replica_id = self._leaders.get(candidate)
                tenant = self.by_key.get((replica_id, uuid)) if replica_id is not None else None
                if tenant is not None and is_held(tenant.entry):
                    return tenant
        pod = pod_of(pid, self._pods) if self._pods else None
        return self.by_key.get((self._pods[pod], uuid)) if pod is not None else None

    def _watch(self, tenant: GpuTenant, slot: int, pid: int, start_ticks: int) -> None:
        """Watch a process for its death, which may have happened already."""
        member = Member(pid, start_ticks, None)
        tenant.members[slot] = member
        # Without a pidfd (the process is gone, or descriptors are exhausted) `check` finds its death.
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            if may_keep(pidfd):
                member.pidfd = pidfd
            else:
                os.close(pidfd)
        if not _is_alive(pid, start_ticks):
            self._remove_member(tenant, slot)
        elif member.pidfd is not None:
            self._pidfds[member.pidfd] = (tenant, slot)
            self.new_pidfds.append(member.pidfd)

    def _unwatch(self, member: Member) -> None:
        if member.pidfd is not None:
            self._pidfds.pop(member.pidfd, None)
            if member.pidfd in self.new_pidfds:
                self.new_pidfds.remove(member.pidfd)
            # Closing removes it from the epoll.
            os.close(member.pidfd)
            member.pidfd = None

    def died(self, pidfd: int) -> None:
        """The process of this pidfd is dead: free its slot."""
        held = self._pidfds.get(pidfd)
        if held is None:
            return
        tenant, slot = held
        member = tenant.members[slot]
        # The process number may have belonged to another process when it was registered.
        if not _is_alive(member.pid, member.start_ticks):
            self._remove_member(tenant, slot)

    def _remove_member(self, tenant: GpuTenant, slot: int) -> None:
        member = tenant.members.pop(slot)
        tenant.num_full = 0
        self._unwatch(member)
        self.num_deaths += 1
        if tenant.segments is not None:
            usage = tenant.segments.read()
            if usage is not None:
                tenant.gone_launches += usage.process(slot).num_launches
            tenant.segments.clear(slot)

    def keep_counts(self, launches: Mapping[tuple[str, str], int]) -> None:
        """Restore an earlier daemon's counts by (replica, device): living processes lack the launches of dead ones."""
        for tenant in self.by_key.values():
            counted = launches.get((tenant.entry.replica_id, tenant.entry.device_id), 0)
            tenant.gone_launches += max(0, counted - tenant.num_launches)


def is_held(entry: GpuTenantEntry) -> bool:
    """Whether the entry's tenant exists: its leader lives, or it is a pod's, which others watch."""
    return bool(entry.pod_uid) if entry.process is None else live_stat(entry.process) is not None


def _holder(entry: GpuTenantEntry) -> tuple[ProcessIdentity | None, str]:
    return entry.process, entry.pod_uid


def _name_of(entry: GpuTenantEntry) -> str:
    """The name of the files, unique to one process (or pod) of one replica on one device."""
    process = entry.process
    whose = f"pod\0{entry.pod_uid}\0{boot_id()}"
    if process is not None:
        whose = f"{process.pid}\0{process.start_ticks}\0{process.boot_id}"
    text = f"{entry.replica_id}\0{entry.device_uuid.lower()}\0{whose}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _is_alive(pid: int, start_ticks: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state not in _DEAD_STATES and stat.start_ticks == start_ticks


def _relatives(pid: int) -> Iterable[int]:
    """The process, its ancestors from the nearest on, and the leaders of its group and session."""
    group = session = 0
    current = pid
    for _ in range(_MAX_ANCESTORS):
        if current <= 1:
            break
        yield current
        try:
            text = Path(f"/proc/{current}/stat").read_text(errors="replace")
        except OSError:
            break
        parent, its_group, its_session = (int(word) for word in text[text.rfind(")") + 2 :].split()[1:4])
        if current == pid:
            group, session = its_group, its_session
        current = parent
    yield group
    yield session
