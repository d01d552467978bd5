"""Control groups of the kernel, of either version, as enforcers of shares of the CPU: quotas and weights."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from springtide.core.errors import BackendError

PERIOD_S = 0.010
# Part of each slice is spent on refilling caches: a tenant whose grant stays the same gets longer slices.
CALM_PERIOD_S = 0.020
# The kernel accepts no quota below a millisecond a period; smaller rates get a longer period.
_MIN_QUOTA_S = 0.001
_MAX_PERIOD_S = 0.1
MIN_CPUS = _MIN_QUOTA_S / _MAX_PERIOD_S
_US = 1_000_000
_ROUNDING_CPUS = 1.0 / (CALM_PERIOD_S * _US)


class GroupEnforcer:
    """Control groups: one for the platform, in it one for each device, in that one for each tenant."""

    mechanism = ""
    enforced = ""

    def __init__(self, base: Path, name: str, home: Path) -> None:
        self._base = base
        # The group that processes return to if they outlive their tenant: this process's own group.
        self._home = home
        self._root = base / name
        self._devices: dict[str, Path] = {}
        self._tenants: dict[str, Path] = {}
        self._device_of: dict[str, str] = {}
        self._quotas: dict[Path, tuple[int, int]] = {}
        # Limits change many times a second, and opening a file costs more than writing it.
        self._open: dict[Path, int] = {}
        self._make(self._root)
        self._claim = claim(self._root)
        # Factor on the weight of all tenants against other programs of the machine.
        self.favour = 1.0

    def set_device(self, device: str, cpus: float) -> None:
        """Limit the device's tenants together to this many cores, by a quota of the device's group."""
        path = self._device_path(device)
        # A microsecond more than exact, so that no tenant's rounded quota can exceed the device's.
        if self._write_quota(path, cpus + _ROUNDING_CPUS, CALM_PERIOD_S):
            with contextlib.suppress(BackendError):
                # Allow a burst (kernels since 5.14): the device may use what it left unused in the previous period, so
                # that a sharer need not wait after one that used its part early. The average stays the same.
                self._allow_burst(path, self._quotas[path][1])
        self._weigh(self._root, self.favour * max(1.0, float(len(self._devices)) * cpus))
        self._weigh(self._device_path(device), cpus)

    def admit(self, tenant: str, device: str, pid: int) -> None:
        """Move a process, with all its threads, into the tenant's group. Raises BackendError; not if it is gone."""
        path = self._tenants.get(tenant)
        if path is None or self._device_of[tenant] != device:
            path = self._device_path(device) / tenant
            self._make(path)
            self._tenants[tenant], self._device_of[tenant] = path, device
        self._move(path, pid)

    def set_weight(self, tenant: str, weight: float) -> None:
        self._weigh(self._tenants[tenant], weight)

    def set_limit(self, tenant: str, cpus: float, *, is_calm: bool = False) -> None:
        """Write the quota, unless it is in force already: a write refills it."""
        self._write_quota(self._tenants[tenant], cpus, CALM_PERIOD_S if is_calm else PERIOD_S)

    def lift(self, tenant: str) -> None:
        self._write(*self._no_quota(self._tenants[tenant]))
        self._quotas.pop(self._tenants[tenant], None)

    def remove(self, tenant: str) -> None:
        """Move remaining processes to the home group, and remove the tenant's."""
        path = self._tenants.pop(tenant, None)
        if path is None:
            return
        device = self._device_of.pop(tenant)
        self._quotas.pop(path, None)
        self._dissolve(path)
        if device not in self._device_of.values():
            device_path = self._devices.pop(device)
            self._quotas.pop(device_path, None)
            self._dissolve(device_path)

    def tick(self, used_s: Callable[[str], float], now_s: float) -> None:
        """Nothing to do: the kernel enforces quotas by itself."""

    def pids(self, tenant: str) -> list[int]:
        return read_pids(self._tenants[tenant])

    def throttled_s(self, tenant: str) -> float:
        for line in read(self._tenants[tenant] / "cpu.stat").splitlines():
            name, _, value = line.partition(" ")
            if name == "throttled_usec":
                return int(value) / 1e6
            if name == "throttled_time":
                return int(value) / 1e9
        return 0.0

    def undo_files(self) -> list[tuple[str, str]]:
        """The files and values that lift the quotas, of tenants first, then of devices."""
        paths = [*self._tenants.values(), *self._devices.values()]
        return [(str(file), value) for file, value in (self._no_quota(path) for path in paths)]

    def close(self) -> None:
        """Remove every group, including those of an earlier daemon."""
        self._tenants.clear()
        self._device_of.clear()
        self._devices.clear()
        self._quotas.clear()
        for path in sorted(self._root.glob("**/"), key=lambda path: len(path.parts), reverse=True):
            self._dissolve(path)
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    # --- what differs between the versions --------------------------------------------------------------------------

    def _no_quota(self, path: Path) -> tuple[Path, str]:
        raise NotImplementedError

    def _write_period_and_quota(
        self, path: Path, period_us: int, quota_us: int, before: tuple[int, int] | None
    ) -> None:
        raise NotImplementedError

    def _weigh(self, path: Path, weight: float) -> None:
        raise NotImplementedError

    def _allow_burst(self, path: Path, burst_us: int) -> None:
        raise NotImplementedError

    def _prepare(self, path: Path) -> None:
        """Prepare a group to contain other groups."""

    # --- common to both versions ------------------------------------------------------------------------------------

    def _device_path(self, device: str) -> Path:
        path = self._devices.get(device)
        if path is None:
            path = self._root / f"device-{quote(device, safe='')}"
            self._make(path)
            self._devices[device] = path
        return path

    def _make(self, path: Path) -> None:
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise BackendError(f"cannot make the control group {path}: {error.strerror}") from error
        if path.parent != self._base or path == self._root:
            self._prepare(path)

    def _write_quota(self, path: Path, cpus: float, at_least_s: float) -> bool:
        """Set a quota; returns whether that needed a write."""
        cpus = max(MIN_CPUS, cpus)
        period_s = min(_MAX_PERIOD_S, max(at_least_s, _MIN_QUOTA_S / cpus))
        period_us = round(period_s * _US)
        # Rounded down: a child's part may not exceed its parent's.
        quota_us = max(round(_MIN_QUOTA_S * _US), int(cpus * period_us + 1e-6))
        before = self._quotas.get(path)
        if before == (period_us, quota_us):
            return False
        self._write_period_and_quota(path, period_us, quota_us, before)
        self._quotas[path] = (period_us, quota_us)
        return True

    def _write(self, path: Path, value: str) -> None:
        try:
            descriptor = self._open.get(path)
            if descriptor is None:
                descriptor = self._open[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            os.pwrite(descriptor, value.encode(), 0)
        except OSError as error:
            raise BackendError(f"cannot write {value} to {path}: {error.strerror}") from error

    def _move(self, path: Path, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            try:
                self._write(path / "cgroup.procs", str(pid))
            except BackendError as error:
                if isinstance(error.__cause__, ProcessLookupError):
                    raise error.__cause__ from None
                raise

    def _dissolve(self, path: Path) -> None:
        for _ in range(3):
            with contextlib.suppress(BackendError):
                self._write(*self._no_quota(path))
            for pid in read_pids(path):
                with contextlib.suppress(BackendError):
                    self._move(self._home, pid)
            for file in [file for file in self._open if file.parent == path]:
                os.close(self._open.pop(file))
            with contextlib.suppress(OSError):
                path.rmdir()
            if not path.exists():
                return


class GroupV1Enforcer(GroupEnforcer):
    """cpu.cfs_quota_us, cpu.cfs_period_us and cpu.shares."""

    mechanism = "cgroup-v1"
    enforced = (
        "the kernel holds every share to its grant by quotas over 10 to 20 ms (cgroup v1) and a device's sharers "
        "together to the device; requests are weights against other programs of the machine; memory and caches are not "
        "divided"
    )

    def _no_quota(self, path: Path) -> tuple[Path, str]:
        return path / "cpu.cfs_quota_us", "-1"

    def _write_period_and_quota(
        self, path: Path, period_us: int, quota_us: int, before: tuple[int, int] | None
    ) -> None:
        quota, period = path / "cpu.cfs_quota_us", path / "cpu.cfs_period_us"
        if before is None:
            # The previous values are unknown: lift the quota first, so that no pair in between exceeds the parent's.
            self._write(quota, "-1")
            self._write(period, str(period_us))
            self._write(quota, str(quota_us))
        elif period_us > before[0]:
            # In this order the rate in between is lower than before, hence below the parent's.
            self._write(period, str(period_us))
            self._write(quota, str(quota_us))
        else:
            self._write(quota, str(quota_us))
            if period_us < before[0]:
                self._write(period, str(period_us))

    def _weigh(self, path: Path, weight: float) -> None:
        self._write(path / "cpu.shares", str(max(2, min(262_144, round(1024 * weight)))))

    def _allow_burst(self, path: Path, burst_us: int) -> None:
        self._write(path / "cpu.cfs_burst_us", str(burst_us))


class GroupV2Enforcer(GroupEnforcer):
    """cpu.max and cpu.weight."""

    mechanism = "cgroup-v2"
    enforced = (
        "the kernel holds every share to its grant by quotas over 10 to 20 ms (cgroup v2) and a device's sharers "
        "together to the device; requests are weights against other programs of the machine; memory and caches are not "
        "divided"
    )

    def _prepare(self, path: Path) -> None:
        if path == self._root or path.parent == self._root:
            self._write(path / "cgroup.subtree_control", "+cpu")

    def _no_quota(self, path: Path) -> tuple[Path, str]:
        return path / "cpu.max", "max"

    def _write_period_and_quota(
        self, path: Path, period_us: int, quota_us: int, before: tuple[int, int] | None
    ) -> None:
        self._write(path / "cpu.max", f"{quota_us} {period_us}")

    def _weigh(self, path: Path, weight: float) -> None:
        self._write(path / "cpu.weight", str(max(1, min(10_000, round(100 * weight)))))

    def _allow_burst(self, path: Path, burst_us: int) -> None:
        self._write(path / "cpu.max.burst", str(burst_us))


def claim(path: Path) -> int | None:
    """Lock a group's directory for as long as its owner lives; None if another process has it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def read_pids(path: Path) -> list[int]:
    """Return the processes of a group; none if there is no such group."""
    return [int(line) for line in read(path / "cgroup.procs").split()]


def read(path: Path) -> str:
    """Return the contents of a kernel file, empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
