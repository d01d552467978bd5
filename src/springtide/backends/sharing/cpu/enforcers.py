"""Enforcers, which limit processes to a share of the CPU: control groups of either version, signals, or none.

Which of them a machine allows is found by a trial in a directory of its own (`choose_enforcer`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from springtide.backends.sharing.cpu.control_groups import (
    GroupEnforcer,
    GroupV1Enforcer,
    GroupV2Enforcer,
    claim,
    read,
    read_pids,
)
from springtide.backends.sharing.cpu.signals import SignalEnforcer
from springtide.core.errors import BackendError

_PREFIX = "springtide-"
_MOUNTS = Path("/proc/self/mountinfo")
_OWN_GROUPS = Path("/proc/self/cgroup")


class Enforcer(Protocol):
    """Limits tenants of devices to rates, in CPU cores. Not thread-safe; a tenant is known by a short name.

    `mechanism` and `enforced` are shown to users (core/status/shares.py). `undo_files` is for the guard, which lifts
    every limit when the owner of this enforcer dies.
    """

    mechanism: str
    enforced: str

    def admit(self, tenant: str, device: str, pid: int) -> None:
        """Put a process, and those that it starts from now on, into the tenant; may be repeated."""
        ...

    def set_device(self, device: str, cpus: float) -> None:
        """Limit the tenants of the device together to this many cores, if the mechanism can."""
        ...

    def set_weight(self, tenant: str, weight: float) -> None:
        """Set the tenant's weight, by which processors are divided if they are short (1: an ordinary program)."""
        ...

    def set_limit(self, tenant: str, cpus: float, *, is_calm: bool = False) -> None:
        """Limit the tenant to this many cores; `is_calm`: the limit is likely to stay."""
        ...

    def lift(self, tenant: str) -> None:
        """Lift the tenant's limit."""
        ...

    def remove(self, tenant: str) -> None:
        """Remove the tenant; its remaining processes run on without a limit."""
        ...

    def tick(self, used_s: Callable[[str], float], now_s: float) -> None:
        """Called at every tick; `used_s` gives the CPU seconds that a tenant has used so far."""
        ...

    def pids(self, tenant: str) -> list[int]:
        """The processes of a tenant."""
        ...

    def throttled_s(self, tenant: str) -> float:
        """How long the tenant was throttled in total."""
        ...

    def undo_files(self) -> list[tuple[str, str]]:
        """The (path, value) pairs to write so that no limit is left."""
        ...

    def close(self) -> None:
        """Lift every limit and remove all files."""
        ...


class NoEnforcer:
    """Enforces nothing, for machines where neither control groups nor signals may be used."""

    mechanism = "none"
    enforced = "shares are planned but not enforced: this machine has no way to hold processes back"

    def admit(self, tenant: str, device: str, pid: int) -> None:
        """Nothing to do."""

    def set_device(self, device: str, cpus: float) -> None:
        """Nothing to do."""

    def set_weight(self, tenant: str, weight: float) -> None:
        """Nothing to do."""

    def set_limit(self, tenant: str, cpus: float, *, is_calm: bool = False) -> None:
        """Nothing to do."""

    def lift(self, tenant: str) -> None:
        """Nothing to do."""

    def remove(self, tenant: str) -> None:
        """Nothing to do."""

    def tick(self, used_s: Callable[[str], float], now_s: float) -> None:
        """Nothing to do."""

    def pids(self, tenant: str) -> list[int]:
        return []

    def throttled_s(self, tenant: str) -> float:
        return 0.0

    def undo_files(self) -> list[tuple[str, str]]:
        return []

    def close(self) -> None:
        """Nothing to do."""


def choose_enforcer(name: str, only: str = "") -> Enforcer:
    """Return the best enforcer that this machine allows, for a platform of this name; `only` restricts the mechanism.

    Each is tried on a child process in a directory of its own, which is removed afterwards.
    """
    for mechanism, kind, bases in (
        ("cgroup-v2", GroupV2Enforcer, _v2_bases),
        ("cgroup-v1", GroupV1Enforcer, _v1_bases),
    ):
        if only not in ("", mechanism):
            continue
        for base, home in bases():
            if _works(kind, base, home):
                _sweep(base)
                return kind(base, name, home)
    if only in ("", "signals") and SignalEnforcer.works():
        return SignalEnforcer()
    return NoEnforcer()


def describe_enforcer(only: str = "") -> tuple[str, str]:
    """Return `mechanism` and `enforced` of the best enforcer here, and remove all traces of the trial."""
    enforcer = choose_enforcer(f"{_PREFIX}probe-{os.getpid()}-{secrets.token_hex(4)}", only)
    enforcer.close()
    return enforcer.mechanism, enforcer.enforced


def _works(kind: type[GroupEnforcer], base: Path, home: Path) -> bool:
    name = f"{_PREFIX}probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        enforcer = kind(base, name, home)
    except BackendError:
        with contextlib.suppress(OSError):
            (base / name).rmdir()
        return False
    program = shutil.which("sleep")
    if program is None:
        enforcer.close()
        return False
    child = subprocess.Popen([program, "60"], stdin=subprocess.DEVNULL)
    try:
        enforcer.set_device("probe", 1.0)
        enforcer.admit("probe", "probe", child.pid)
        enforcer.set_weight("probe", 0.5)
        enforcer.set_limit("probe", 0.5)
        return enforcer.pids("probe") == [child.pid]
    except BackendError:
        return False
    finally:
        child.kill()
        child.wait()
        enforcer.close()


def _sweep(base: Path) -> None:
    """Remove groups of platforms that are gone: they have no owner and no process is in them."""
    for path in sorted(base.glob(f"{_PREFIX}*")):
        lock = claim(path)
        if lock is None:
            continue
        groups = sorted(path.glob("**/"), key=lambda group: len(group.parts), reverse=True)
        if not any(read_pids(group) for group in groups):
            for group in groups:
                with contextlib.suppress(OSError):
                    group.rmdir()
        os.close(lock)


def _v1_bases() -> Iterator[tuple[Path, Path]]:
    """(base for new groups, home of this process): both its own group of the cpu controller, if that is visible."""
    for mount, root, options in _mounts("cgroup"):
        if "cpu" not in options.split(","):
            continue
        for line in read(_OWN_GROUPS).splitlines():
            _, controllers, path = line.split(":", 2)
            if "cpu" in controllers.split(","):
                own = _below(mount, root, path)
                yield own, own


def _v2_bases() -> Iterator[tuple[Path, Path]]:
    """Pairs as for version 1, with bases from the own group upwards whose children may have the cpu controller."""
    for mount, root, _ in _mounts("cgroup2"):
        for line in read(_OWN_GROUPS).splitlines():
            if not line.startswith("0::"):
                continue
            own = _below(mount, root, line[3:])
            for base in (own, *own.parents):
                if not base.is_relative_to(mount):
                    break
                if "cpu" in read(base / "cgroup.controllers").split() and _delegates_cpu(base):
                    yield base, own


def _delegates_cpu(base: Path) -> bool:
    """Whether child groups may have quotas: only the root may have processes and pass the controller on."""
    control = base / "cgroup.subtree_control"
    if "cpu" in read(control).split():
        return True
    try:
        control.write_text("+cpu")
    except OSError:
        return False
    return True


def _mounts(kind: str) -> Iterator[tuple[Path, str, str]]:
    """(mount point, its root in the hierarchy, options) of the mounted hierarchies of this kind."""
    for line in read(_MOUNTS).splitlines():
        before, _, after = line.partition(" - ")
        fields, about = before.split(), after.split()
        if len(fields) > 4 and len(about) > 2 and about[0] == kind:
            yield Path(fields[4]), fields[3], about[2]


def _below(mount: Path, root: str, path: str) -> Path:
    """The path of a group under the mount; the mount itself if the group lies outside."""
    if root != "/" and path.startswith(root):
        path = path[len(root) :]
    place = mount / path.lstrip("/")
    return place if ".." not in place.parts and place.is_dir() else mount
