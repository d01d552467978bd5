"""A tick of the share daemon: measure what every sharer used, decide on new grants, and enforce them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from msgspec.structs import replace

from springtide.backends.processes import process_clock_s
from springtide.backends.sharing.cpu.enforcers import Enforcer
from springtide.backends.sharing.table import SharerEntry, status_of
from springtide.core.errors import BackendError
from springtide.core.resources import DeviceId
from springtide.core.status.shares import TenantStatus
from springtide.core.wire.shares import SlotReader, SlotReading
from springtide.core.workload import ReplicaId
from springtide.serving.share_control import (
    DeviceControl,
    Grant,
    Observation,
    ShareIteration,
    Tenant,
    control_tick,
    limits_of,
)

# How often to search for processes that a sharer has started since.
_SCAN_S = 0.5
_USED_WINDOW_S = 1.0
# Smaller changes of a grant are not enforced: each change makes the kernel begin a new period, with a whole quota
# in it.
_DEADBAND = 0.03
# Use beyond the grants (the kernel measures in ticks of its own, and is imprecise at each change) is subtracted
# from later grants over about this time, once it is more than a few milliseconds.
_SETTLE_S = 0.05
_MAX_OVERUSE_S = 0.02
_TOLERATED_S = 0.004
# A grant that has been the same for this long is likely to stay.
_CALM_AFTER_S = 0.06
# How often to measure a device without a working SLO sharer; every tick checks whether one has begun to work.
_QUIET_S = 0.015
_NEW_WORK_S = 0.0005
_NEW_WORK_FRACTION = 0.05
_SLO_FAVOUR = 10.0
_NUM_LATE = 2000
_MIN_TICK_S = 1e-4
_MAX_TICK_S = 0.1


@dataclass
class Sharer:
    """One sharer and its measurements. `clocks` are the CPU seconds of its processes when last measured.

    `used_s` is CPU seconds since it began to share, `overused_s` is its recent use beyond grants. It holds its share of
    each of `devices`; `entry` is that of the first. `grants` are those of each device, `grant` has their mean.
    """

    entry: SharerEntry
    devices: tuple[DeviceId, ...]
    tenant: Tenant
    name: str
    clocks: dict[int, float] = field(default_factory=dict)
    used_s: float = 0.0
    seen_used_s: float = 0.0
    scanned_at_s: float = -math.inf
    grant: Grant = field(default_factory=lambda: Grant(rate=1.0, state="NONE", reason=""))
    grants: dict[DeviceId, Grant] = field(default_factory=dict)
    held_rate: float | None = None
    held_since_s: float = 0.0
    is_calm: bool = False
    overused_s: float = 0.0
    reading: SlotReading = field(default_factory=SlotReading)
    window: deque[tuple[float, float]] = field(default_factory=deque)

    @property
    def place(self) -> str:
        """The devices that its processes may use the cores of, as one."""
        return "+".join(self.devices)

    def cpus(self, device_cpus: float) -> float:
        """The cores of its devices together."""
        return device_cpus * len(self.devices)

    def used_fraction(self, device_cpus: float) -> float:
        """The fraction of each of its devices that it used over about the last second."""
        if len(self.window) < 2:
            return 0.0
        (begin_s, begin_used_s), (end_s, end_used_s) = self.window[0], self.window[-1]
        return (end_used_s - begin_used_s) / max(_MIN_TICK_S, end_s - begin_s) / self.cpus(device_cpus)


@dataclass
class _Device:
    """A device and its sharers."""

    device_id: DeviceId
    sharers: list[Sharer]
    control: DeviceControl


@dataclass
class _Group:
    """Devices that are measured together: one, or several that a sharer has parts of, and others of theirs.

    `is_quiet`: no SLO sharer had work when they were last measured.
    """

    devices: list[_Device]
    sharers: list[Sharer]
    at_s: float
    is_quiet: bool = False

    @property
    def is_contended(self) -> bool:
        """Whether two sharers are on one of the devices."""
        return any(len(device.sharers) > 1 for device in self.devices)


class CpuTicks:
    """The sharers of a machine, device by device. `is_controlled` False grants every sharer its limit at all times."""

    def __init__(self, enforcer: Enforcer, clock: Callable[[], float], *, is_controlled: bool = True) -> None:
        self._enforcer = enforcer
        self._clock = clock
        self._is_controlled = is_controlled
        self._sharers: dict[ReplicaId, Sharer] = {}
        self._groups: list[_Group] = []
        self._device_cpus = 1.0
        self.reader: SlotReader | None = None
        self.reactions_s: deque[float] = deque(maxlen=_NUM_LATE)
        self.num_writes = 0
        self.errors: dict[ReplicaId, str] = {}

    @property
    def sharers(self) -> Mapping[ReplicaId, Sharer]:
        return self._sharers

    @property
    def is_contended(self) -> bool:
        """Whether two sharers are on one device; otherwise each has its limit, and ticks may be far apart."""
        return any(group.is_contended for group in self._groups)

    def take(self, entries: tuple[SharerEntry, ...], device_cpus: float, sent_at_s: float) -> None:
        """Replace the sharers; measurements of those that stay are kept. One on several devices has several entries."""
        if device_cpus != self._device_cpus:
            for sharer in self._sharers.values():
                sharer.held_rate = None
        self._device_cpus = device_cpus
        wanted: dict[ReplicaId, list[SharerEntry]] = {}
        for entry in entries:
            wanted.setdefault(entry.replica_id, []).append(entry)
        for replica_id, sharer in list(self._sharers.items()):
            mine = wanted.get(replica_id)
            if mine is None or mine[0].process != sharer.entry.process or _devices_of(mine) != sharer.devices:
                self._drop(sharer)
        for mine in wanted.values():
            self._enter(mine[0], _devices_of(mine))
        controls = {device.device_id: device.control for group in self._groups for device in group.devices}
        self._groups = _grouped(list(self._sharers.values()), controls, self._clock)
        for group in self._groups:
            self._decide(group, {}, _MIN_TICK_S, sent_at_s)

    def tick(self, due_s: float) -> None:
        """Measure every sharer, decide on grants, enforce them. `due_s` is when the tick was due."""
        now_s = self._clock()
        for group in self._groups:
            if group.is_quiet and now_s - group.at_s < _QUIET_S and not self._has_new_work(group):
                continue
            tick_s = min(_MAX_TICK_S, max(_MIN_TICK_S, now_s - group.at_s))
            group.at_s = now_s
            seen: dict[str, Observation] = {
                sharer.entry.replica_id: self._observe(sharer, now_s, tick_s) for sharer in group.sharers
            }
            group.is_quiet = not group.is_contended or not any(
                sharer.tenant.is_slo and _has_work(seen[sharer.entry.replica_id]) for sharer in group.sharers
            )
            self._decide(group, seen, tick_s, due_s)
        self._enforcer.tick(self._used_s, now_s)

    def statuses(self) -> tuple[TenantStatus, ...]:
        return tuple([self._status(sharer, at) for sharer in self._sharers.values() for at in sharer.devices])

    def _status(self, sharer: Sharer, device_id: DeviceId) -> TenantStatus:
        entry, grant = sharer.entry, sharer.grants.get(device_id, sharer.grant)
        return replace(
            status_of(entry),
            device_id=device_id,
            granted=grant.rate,
            used=sharer.used_fraction(self._device_cpus),
            state=grant.state,
            throttled_s=0.0 if entry.replica_id in self.errors else self._enforcer.throttled_s(sharer.name),
            reason=self.errors.get(entry.replica_id, grant.reason),
        )

    def close(self) -> None:
        """Lift every limit."""
        for sharer in list(self._sharers.values()):
            self._drop(sharer)
        self._enforcer.close()
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    # --- the table ---------------------------------------------------------------------------------------------------

    def _enter(self, entry: SharerEntry, devices: tuple[DeviceId, ...]) -> None:
        tenant = Tenant(tenant_id=entry.replica_id, share=entry.share, is_slo=entry.is_slo)
        sharer = self._sharers.get(entry.replica_id)
        if sharer is None:
            sharer = Sharer(entry, devices, tenant, f"slot-{entry.slot}")
            self._sharers[entry.replica_id] = sharer
        sharer.entry, sharer.tenant = entry, tenant
        cpus = sharer.cpus(self._device_cpus)
        try:
            self._enforcer.set_device(sharer.place, cpus)
            self._enforcer.admit(sharer.name, sharer.place, entry.process.pid)
            # Grants guarantee every request; weights decide which runs first within a tick, above all after waking.
            favour = _SLO_FAVOUR if entry.is_slo else 1.0
            self._enforcer.set_weight(sharer.name, max(0.01, favour * entry.share.request * cpus))
            self.errors.pop(entry.replica_id, None)
        except BackendError as error:
            self.errors[entry.replica_id] = f"its share is not enforced: {error}"

    def _drop(self, sharer: Sharer) -> None:
        self._sharers.pop(sharer.entry.replica_id, None)
        self.errors.pop(sharer.entry.replica_id, None)
        if self.reader is not None:
            self.reader.forget(sharer.entry.slot)
        self._enforcer.remove(sharer.name)

    # --- measuring ---------------------------------------------------------------------------------------------------

    def _has_new_work(self, group: _Group) -> bool:
        """Whether an SLO sharer may have begun to work since the last tick; the cheapest check."""
        if not group.is_contended:
            return False
        for sharer in group.sharers:
            if not sharer.tenant.is_slo:
                continue
            if self.reader is not None and self.reader.has_changed(sharer.entry.slot):
                return True
            pid = sharer.entry.process.pid
            if (process_clock_s(pid) or 0.0) - sharer.clocks.get(pid, math.inf) > _NEW_WORK_S:
                return True
        return False

    def _observe(self, sharer: Sharer, now_s: float, tick_s: float) -> Observation:
        self._meter(sharer, now_s)
        used_s = sharer.used_s - sharer.seen_used_s
        sharer.seen_used_s = sharer.used_s
        granted_s = sharer.grant.rate * tick_s * sharer.cpus(self._device_cpus)
        sharer.overused_s = max(-_TOLERATED_S, min(_MAX_OVERUSE_S, sharer.overused_s + used_s - granted_s))
        window = sharer.window
        if not window or now_s - window[-1][0] > _USED_WINDOW_S / 20:
            window.append((now_s, sharer.used_s))
            while now_s - window[0][0] > _USED_WINDOW_S * 1.1:
                window.popleft()
        reading = self.reader.read(sharer.entry.slot) if self.reader is not None else None
        finished: tuple[ShareIteration, ...] = ()
        if reading is not None:
            # While a slot is being written, the previous reading is used, without reporting its iterations twice.
            sharer.reading = reading
            finished = tuple(
                ShareIteration(batch_size=ended.batch_size, duration_s=ended.duration_s) for ended in reading.finished
            )
        current = sharer.reading
        # The worker writes the start time itself; one in the future is wrong and ignored.
        iteration_s = max(0.0, now_s - current.started_s) if current.started_s else 0.0
        return Observation(
            used_fraction=used_s / (tick_s * sharer.cpus(self._device_cpus)),
            iteration_s=iteration_s,
            batch_size=current.batch_size,
            finished=finished,
            num_queued=current.num_queued,
        )

    def _meter(self, sharer: Sharer, now_s: float) -> None:
        """Add what its processes have used since they were last measured."""
        clocks = sharer.clocks
        if now_s - sharer.scanned_at_s >= _SCAN_S:
            is_first = sharer.scanned_at_s == -math.inf
            sharer.scanned_at_s = now_s
            pids = [] if sharer.entry.replica_id in self.errors else self._enforcer.pids(sharer.name)
            for pid in pids or [sharer.entry.process.pid]:
                if pid not in clocks:
                    # CPU time before the first measurement was used before sharing began, and does not count.
                    clocks[pid] = (process_clock_s(pid) or 0.0) if is_first else 0.0
        for pid, before_s in list(clocks.items()):
            clock_s = process_clock_s(pid)
            if clock_s is None:
                del clocks[pid]
                continue
            sharer.used_s += max(0.0, clock_s - before_s)
            clocks[pid] = clock_s

    def _used_s(self, name: str) -> float:
        """CPU seconds of the tenant of this name until now."""
        for sharer in self._sharers.values():
            if sharer.name == name:
                self._meter(sharer, self._clock())
                return sharer.used_s
        return 0.0

    # --- granting ----------------------------------------------------------------------------------------------------

    def _decide(self, group: _Group, seen: Mapping[str, Observation], tick_s: float, decided_at_s: float) -> None:
        for device in group.devices:
            tenants = [sharer.tenant for sharer in device.sharers]
            if self._is_controlled:
                device.control, grants = control_tick(device.control, tenants, seen, tick_s)
            else:
                grants = limits_of(tenants)
            for sharer in device.sharers:
                sharer.grants[device.device_id] = grants[sharer.entry.replica_id]
        for sharer in group.sharers:
            mine = [sharer.grants[device_id] for device_id in sharer.devices]
            sharer.grant = mine[0] if len(mine) == 1 else replace(mine[0], rate=fmean(each.rate for each in mine))
            self._put_in_force(sharer, decided_at_s)

    def _put_in_force(self, sharer: Sharer, decided_at_s: float) -> None:
        rate, held = sharer.grant.rate, sharer.held_rate
        if sharer.entry.replica_id in self.errors:
            return
        if sharer.overused_s > _TOLERATED_S:
            rate = max(0.0, rate - sharer.overused_s / _SETTLE_S / sharer.cpus(self._device_cpus))
        is_end = rate in (0.0, sharer.tenant.share.limit)
        now_s = self._clock()
        if held is not None and (rate == held or (abs(rate - held) < _DEADBAND and not is_end)):
            if sharer.is_calm or now_s - sharer.held_since_s < _CALM_AFTER_S:
                return
            rate, is_calm = held, True
        else:
            is_calm = False
        try:
            self._enforcer.set_limit(sharer.name, rate * sharer.cpus(self._device_cpus), is_calm=is_calm)
        except BackendError as error:
            self.errors[sharer.entry.replica_id] = f"its share is not enforced: {error}"
            return
        sharer.is_calm = is_calm
        if not is_calm:
            sharer.held_rate, sharer.held_since_s = rate, now_s
            self.reactions_s.append(max(0.0, self._clock() - decided_at_s))
        self.num_writes += 1


def _devices_of(entries: Sequence[SharerEntry]) -> tuple[DeviceId, ...]:
    return tuple([entry.device_id for entry in entries])


def _grouped(
    sharers: Sequence[Sharer], controls: Mapping[DeviceId, DeviceControl], clock: Callable[[], float]
) -> list[_Group]:
    """The devices of the sharers, those of each sharer in one group."""
    group_of: dict[DeviceId, set[DeviceId]] = {}
    for sharer in sharers:
        merged = set[DeviceId]().union(*[group_of.get(device_id, {device_id}) for device_id in sharer.devices])
        group_of.update(dict.fromkeys(merged, merged))
    groups: list[_Group] = []
    for device_ids in {id(found): found for _, found in sorted(group_of.items())}.values():
        mine = [sharer for sharer in sharers if not device_ids.isdisjoint(sharer.devices)]
        devices = [
            _Device(at, [sharer for sharer in mine if at in sharer.devices], controls.get(at) or DeviceControl())
            for at in sorted(device_ids)
        ]
        groups.append(_Group(devices, mine, clock()))
    return groups


def _has_work(seen: Observation) -> bool:
    return (
        seen.iteration_s > 0.0 or bool(seen.finished) or seen.num_queued > 0 or seen.used_fraction > _NEW_WORK_FRACTION
    )
