"""What holds a function to its size: its share of the CPUs (a control group, or stop and go) and its memory.

Memory is measured, not reserved: a limit on addresses would end torch, which maps far more than it touches.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

_PERIOD_US = 20_000
_MIN_QUOTA_US = 1_000
_CGROUP_ROOT = Path("/sys/fs/cgroup")


class CpuShare(Protocol):
    """Limits one function to its vCPUs. `tick` is called every few hundredths of a second, with the elapsed time."""

    procs_path: str
    group_dir: str

    def set_vcpus(self, vcpus: float | None) -> None:
        """From now on so many (None: as many as there are)."""
        ...

    def tick(self, elapsed_s: float) -> None:
        """Stop processes that used more than their share, continue those that used less."""
        ...

    def pids(self, leader: int) -> list[int]:
        """The processes of the function that `leader` leads."""
        ...

    def remove(self) -> bool:
        """Take it away; the function has ended. False: a process in it is still dying, ask again."""
        ...


class NoShare:
    """No limit: the kernel alone divides the CPU."""

    procs_path = ""
    group_dir = ""

    def set_vcpus(self, vcpus: float | None) -> None:
        """Enforce no limit."""

    def tick(self, elapsed_s: float) -> None:
        """Do nothing."""

    def pids(self, leader: int) -> list[int]:
        """The leader and its descendants."""
        return descendants(leader)

    def remove(self) -> bool:
        return True


class GroupShare:
    """A control group of the kernel's with a quota: exact within a period of 20 ms, for any number of threads."""

    def __init__(self, group: Path, *, is_unified: bool) -> None:
        self._group = group
        self._is_unified = is_unified
        group.mkdir()
        self.group_dir = str(group)
        self.procs_path = str(group / "cgroup.procs")

    def set_vcpus(self, vcpus: float | None) -> None:
        quota_us = None if vcpus is None else max(_MIN_QUOTA_US, round(vcpus * _PERIOD_US))
        if self._is_unified:
            (self._group / "cpu.max").write_text(f"{quota_us or 'max'} {_PERIOD_US}")
        else:
            (self._group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self._group / "cpu.cfs_quota_us").write_text(str(quota_us or -1))

    def tick(self, elapsed_s: float) -> None:
        """Nothing to do: the kernel enforces the limit."""

    def pids(self, leader: int) -> list[int]:
        """The processes in the group; a process cannot leave it by becoming a daemon."""
        try:
            return [int(line) for line in Path(self.procs_path).read_text().split()]
        except OSError:
            return []

    def remove(self) -> bool:
        """Kill remaining processes of the group (such as the function's daemons), and remove it once it is empty."""
        kill_all(self.pids(0))
        try:
            self._group.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


class StopAndGo:
    """SIGSTOP and SIGCONT by account: a function earns its vCPUs as time passes, and stops while it is in debt.

    Without control groups. CPU time is read from /proc/PID/task/*/schedstat, in nanoseconds, at each tick.
    """

    procs_path = ""
    group_dir = ""

    def __init__(self) -> None:
        self._vcpus: float | None = None
        self._balance_s = 0.0
        self._used_s: dict[int, float] = {}
        self._is_stopped = False
        self._leader = 0

    def set_vcpus(self, vcpus: float | None) -> None:
        """Change the vCPUs, and reset the balance."""
        self._vcpus = vcpus
        self._balance_s = 0.0
        if vcpus is None:
            self._signal(signal.SIGCONT)

    def tick(self, elapsed_s: float) -> None:
        """Update the balance of CPU time, and stop or continue the processes by it."""
        if not self._leader:
            return
        used_s = {pid: cpu_seconds(pid) for pid in descendants(self._leader)}
        spent_s = sum(max(0.0, now_s - self._used_s.get(pid, 0.0)) for pid, now_s in used_s.items())
        self._used_s = used_s
        if self._vcpus is None:
            return
        # Unused CPU time is not saved up: the balance is at most one tick's worth.
        self._balance_s = min(self._balance_s + self._vcpus * elapsed_s - spent_s, self._vcpus * elapsed_s)
        if self._balance_s < 0 and not self._is_stopped:
            self._signal(signal.SIGSTOP)
        elif self._balance_s >= 0 and self._is_stopped:
            self._signal(signal.SIGCONT)

    def pids(self, leader: int) -> list[int]:
        self._leader = leader
        return descendants(leader)

    def remove(self) -> bool:
        self._leader = 0
        return True

    def _signal(self, number: signal.Signals) -> None:
        self._is_stopped = number == signal.SIGSTOP
        if self._leader:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._leader, number)


class CpuGroups:
    """A directory of control groups of the emulator's own, one group a function in it.

    It is locked for as long as its owner lives: a clean-up of groups left behind by other emulators takes only groups
    that are not locked, and between two functions this one is as empty as one left behind. Raises OSError.
    """

    def __init__(self, parent: Path, *, is_unified: bool) -> None:
        self.parent = parent
        self._is_unified = is_unified
        self._lock: int | None = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._unlock()
            raise

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def share(self, name: str) -> GroupShare:
        """A new group. Raises OSError."""
        return GroupShare(self.parent / name, is_unified=self._is_unified)

    def remove(self) -> None:
        """Remove the directory, if all processes in it have ended."""
        self._unlock()
        with contextlib.suppress(OSError):
            self.parent.rmdir()


def make_cpu_groups(name: str) -> CpuGroups | None:
    """Make a directory for control groups below this process's own group, or None where that is not allowed."""
    for directory, is_unified in _own_groups():
        parent = directory / name
        file_name = "cpu.max" if is_unified else "cpu.cfs_quota_us"
        groups: CpuGroups | None = None
        try:
            parent.mkdir()
            groups = CpuGroups(parent, is_unified=is_unified)
            if is_unified:
                (parent / "cgroup.subtree_control").write_text("+cpu")
            probe = parent / "probe"
            probe.mkdir()
            is_usable = os.access(probe / file_name, os.W_OK)
            probe.rmdir()
            if is_usable:
                return groups
        except OSError:
            pass
        if groups is not None:
            groups.remove()
        with contextlib.suppress(OSError):
            parent.rmdir()
    return None


def _own_groups() -> Iterator[tuple[Path, bool]]:
    """Where this process stands in the CPU controller's tree: version 2 first, then version 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in sorted(lines):
        _, controllers, path = line.split(":", 2)
        if not controllers and (_CGROUP_ROOT / "cgroup.controllers").exists():
            yield _CGROUP_ROOT / path.lstrip("/"), True
        elif "cpu" in controllers.split(","):
            for mount in (controllers, "cpu"):
                if (_CGROUP_ROOT / mount).is_dir():
                    yield _CGROUP_ROOT / mount / path.lstrip("/"), False
                    break


def kill_all(pids: list[int]) -> None:
    """SIGKILL the processes that still exist. Numbers below 2, which mean groups or all, are skipped."""
    for pid in pids:
        if pid < 2:
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(leader: int) -> list[int]:
    """The process and its descendants, as the kernel lists them, without those that are gone."""
    found: list[int] = []
    waiting = [leader]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    waiting += [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found


def cpu_seconds(pid: int) -> float:
    """The CPU time that the process's living threads have used, in seconds (0.0 if it is gone)."""
    total_ns = 0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                total_ns += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return total_ns / 1e9


def memory_bytes(pids: list[int]) -> int:
    """What these processes hold in memory, in bytes: pages of their own and of files.

    Pages shared on purpose (/dev/shm) are left out: they are the parameter store's, which stands elsewhere on a real
    service. Pages that a fork shares are counted for each process, as the kernel lists them.
    """
    total_kib = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
                if line.startswith(("RssAnon:", "RssFile:")):
                    total_kib += int(line.split()[1])
    return total_kib * 1024
