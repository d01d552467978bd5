"""A tick of the GPU share daemon: measure what every tenant did, and grant its tokens for the next tick.

A token is a nanosecond of the whole device. A tenant's tokens grow by its grant times the elapsed time, but never
beyond a small stock, so that no tenant saves tokens for a burst that others would have to wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from springtide.backends.sharing.gpu.segments import NUM_PROCESSES, UNLIMITED, Segments
from springtide.backends.sharing.gpu.tenants import MAX_WAIT_NS, STALE_AFTER_NS, GpuTenant, GpuTenants
from springtide.backends.sharing.table import status_of
from springtide.core.errors import BackendError
from springtide.core.status.shares import TenantStatus
from springtide.core.wire.shares import SlotReader
from springtide.serving.share_control import DeviceControl, Grant, Observation, control_tick, limits_of

# The stock of a tenant: its grant for two ticks, and at least for this time.
_STOCK_NS = 10_000_000
_STOCK_TICKS = 2
# Granted in advance to a tenant that is alone on its device, so that its launches never wait for a tick.
_AHEAD_NS = 60_000_000
# Larger debts are reduced to this, so that launches do not reach the bound on waits.
_MAX_DEBT_S = 0.9 * MAX_WAIT_NS / 1e9
_MIN_TICK_S = 1e-4
_MAX_TICK_S = 0.1
# How often to measure a device without recent launches (every tick checks for new ones), and a device whose one
# tenant may use it whole.
_QUIET_S = 0.04
_FREE_S = 0.015
_NUM_LATE = 2000
_MAX_COUNT = 1 << 53
_NOT_SEEN = "no process of it has asked for its share of the GPU yet"
_FULL = f"it has more than {NUM_PROCESSES} processes on the GPU: those beyond are not held"


@dataclass
class _Device:
    """A device and its tenants. `is_quiet`: no tenant had work when it was last measured.

    `was_away`: before that, no tenant was limited for some time, because this daemon was suspended or not running.
    """

    tenants: list[GpuTenant]
    at_s: float
    control: DeviceControl = field(default_factory=DeviceControl)
    is_quiet: bool = False
    was_away: bool = False

    @property
    def is_free(self) -> bool:
        """Whether no tenant has to be limited: there is one, and it may use the whole device."""
        return len(self.tenants) == 1 and self.tenants[0].control.share.limit >= 1.0


class GpuTicks:
    """The GPUs of a machine, by UUID. `is_controlled` False grants every tenant its limit at all times."""

    def __init__(self, tenants: GpuTenants, clock_ns: Callable[[], int], *, is_controlled: bool = True) -> None:
        self._tenants = tenants
        self._clock_ns = clock_ns
        self._is_controlled = is_controlled
        self._devices: dict[bytes, _Device] = {}
        self.reader: SlotReader | None = None
        self.reactions_s: deque[float] = deque(maxlen=_NUM_LATE)

    @property
    def is_free(self) -> bool:
        """Whether no tenant has to be limited on any device."""
        return all(device.is_free for device in self._devices.values())

    def arrange(self, sent_at_s: float) -> None:
        """Tenants have changed: decide on their grants and enforce them at once."""
        before, self._devices = self._devices, {}
        by_uuid: dict[bytes, list[GpuTenant]] = {}
        for tenant in self._tenants.by_key.values():
            if tenant.segments is not None:
                by_uuid.setdefault(tenant.uuid, []).append(tenant)
        now_s = self._clock_ns() / 1e9
        for uuid, tenants in by_uuid.items():
            known = before.get(uuid)
            device = _Device(tenants, now_s, was_away=True)
            if known is not None:
                device.at_s, device.control, device.was_away = known.at_s, known.control, known.was_away
            self._devices[uuid] = device
            self._update(device, sent_at_s)

    def tick(self, due_s: float) -> None:
        """Measure every device, decide on grants, enforce them. `due_s` is when the tick was due."""
        for device in self._devices.values():
            now_s = self._clock_ns() / 1e9
            if device.is_free and now_s - device.at_s < _FREE_S:
                continue
            if device.is_quiet and not device.is_free and now_s - device.at_s < _QUIET_S:
                if not self._has_new_work(device):
                    continue
                # New work is not measured against the quiet time before it.
                device.at_s = max(device.at_s, now_s - _STOCK_NS / 2e9)
            self._update(device, due_s)

    def statuses(self) -> tuple[TenantStatus, ...]:
        return tuple(_status(tenant) for tenant in self._tenants.by_key.values())

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    # --- one device --------------------------------------------------------------------------------------------------

    def _update(self, device: _Device, due_s: float) -> None:
        now_ns = self._clock_ns()
        now_s = now_ns / 1e9
        missed_s = now_s - device.at_s
        elapsed_s = min(_MAX_TICK_S, max(_MIN_TICK_S, missed_s))
        device.at_s = now_s
        was_away = missed_s > STALE_AFTER_NS / 1e9
        seen: dict[str, Observation] = {}
        is_quiet = True
        for tenant in device.tenants:
            seen[tenant.entry.replica_id] = found = self._observe(tenant, now_s, max(_MIN_TICK_S, missed_s))
            is_quiet &= not (_has_work(found) or tenant.meter.is_active(now_s))
        # Stocks do not grow with time in which no tenant had work.
        stock_s = _STOCK_NS / 1e9 if is_quiet else max(_STOCK_NS / 1e9, _STOCK_TICKS * elapsed_s)
        device.is_quiet = is_quiet
        grants = self._decide(device, seen, elapsed_s)
        for tenant in device.tenants:
            tenant.grant = grants[tenant.entry.replica_id]
            if was_away or device.was_away:
                # No tenant was limited until this tick: grant what was launched meanwhile, so that none waits for it.
                _open_segments(tenant).grant_used(tenant.usage.used_ns)
            self._put_in_force(tenant, elapsed_s, stock_s, is_free=device.is_free)
        device.was_away = was_away
        self.reactions_s.append(max(0.0, self._clock_ns() / 1e9 - due_s))

    def _has_new_work(self, device: _Device) -> bool:
        """Whether a tenant may have begun to work since the last tick; the cheapest check."""
        for tenant in device.tenants:
            if _open_segments(tenant).has_used(tenant.usage.used_ns):
                return True
            slot = tenant.entry.slot
            if (
                tenant.control.is_slo
                and slot >= 0
                and self.reader is not None
                and self.reader.has_changed(slot, tenant.entry.device_id)
            ):
                return True
        return False

    def _observe(self, tenant: GpuTenant, now_s: float, elapsed_s: float) -> Observation:
        segments = _open_segments(tenant)
        # A truncated file cannot be read: the last reading counts until the file is replaced.
        tenant.usage = segments.read() or tenant.usage
        slot = tenant.entry.slot
        on = tenant.entry.device_id
        reading = self.reader.read(slot, on) if self.reader is not None and slot >= 0 else None
        return tenant.meter.observe(
            tenant.usage,
            reading,
            granted_ns=segments.granted_ns,
            rate=tenant.grant.rate,
            is_waiting=tenant.is_waiting,
            now_s=now_s,
            tick_s=elapsed_s,
        )

    def _decide(self, device: _Device, seen: Mapping[str, Observation], elapsed_s: float) -> dict[str, Grant]:
        controls = [tenant.control for tenant in device.tenants]
        if not self._is_controlled:
            return limits_of(controls)
        device.control, grants = control_tick(device.control, controls, seen, elapsed_s)
        return grants

    def _put_in_force(self, tenant: GpuTenant, elapsed_s: float, stock_s: float, *, is_free: bool) -> None:
        """Grant tokens for the time since the last tick, and wake the processes that wait for them."""
        segments, rate = _open_segments(tenant), tenant.grant.rate
        used_ns, before_ns = tenant.usage.used_ns, segments.granted_ns
        if is_free:
            granted_ns, flags = used_ns + _AHEAD_NS, UNLIMITED
        else:
            flags = 0
            granted_ns = tokens(before_ns, used_ns, rate, tenant.control.share.request, elapsed_s, stock_s)
        try:
            segments.write_tick(self._clock_ns(), granted_ns, flags, round(rate * 1e6))
        except OSError as error:
            tenant.error = f"its share is not enforced: {error.strerror}"
            return
        if used_ns >= before_ns or tenant.is_waiting:
            segments.wake()


def tokens(granted_ns: int, used_ns: int, rate: float, request: float, elapsed_s: float, stock_s: float) -> int:
    """Return the new total grant of a tenant that was granted `granted_ns` so far and has used `used_ns`."""
    stock_ns = int(rate * stock_s * 1e9)
    least_ns = used_ns - int(max(rate, request) * _MAX_DEBT_S * 1e9)
    return max(granted_ns, least_ns, min(granted_ns + int(rate * elapsed_s * 1e9), used_ns + stock_ns))


def _open_segments(tenant: GpuTenant) -> Segments:
    if tenant.segments is None:
        raise BackendError(f"{tenant.entry.replica_id} has no shared memory")
    return tenant.segments


def _has_work(seen: Observation) -> bool:
    return seen.iteration_s > 0.0 or bool(seen.finished) or seen.num_queued > 0 or seen.used_fraction > 0.0


def _status(tenant: GpuTenant) -> TenantStatus:
    entry, usage = tenant.entry, tenant.usage
    reason = tenant.error or (_NOT_SEEN if not tenant.members and not usage.used_ns else tenant.grant.reason)
    if tenant.num_full and not tenant.error:
        reason = f"{_FULL}; {reason}"
    return replace(
        status_of(entry),
        granted=tenant.grant.rate,
        used=tenant.meter.used_fraction(),
        state=tenant.grant.state,
        throttled_s=min(usage.throttled_ns, _MAX_COUNT) / 1e9,
        reason=reason,
        num_launches=min(tenant.num_launches, _MAX_COUNT),
        num_open=min(usage.num_open, _MAX_COUNT),
        num_denied=min(usage.num_denied, _MAX_COUNT),
        memory_used_mb=min(tenant.memory_used_mb, _MAX_COUNT),
    )
