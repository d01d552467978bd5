"""The platform that faults are injected into: started for this run, every process of it a descendant of this one."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import threading
import time
from pathlib import Path

from springtide.cli.platform.platform_process import is_alive, read_platform, start_platform, supervisor_pid, wait_gone
from springtide.client.api import Client, connect
from springtide.core.errors import BackendError, SpringtideError
from springtide.service.crash_points import UPKEEP_PACE

NUM_SLOTS = 6
# Room for everything that a run of an hour writes, and soon filled.
STATE_BYTES = 512 << 20
CGROUPS = Path("/sys/fs/cgroup/memory")
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_CHILD_SUBREAPER = 36
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_STOP_TIMEOUT_S = 90.0
# A zygote whose control plane was killed before it was ready ends a minute after.
_WORKER_TIMEOUT_S = 90.0


def enter_namespaces() -> str:
    """Give this process mounts and a network of its own, which end with it. Returns why that cannot be, or ""."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET) or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None):
        return f"mounts and a network of its own need root: {os.strerror(ctypes.get_errno())}"
    set_loopback(is_up=True)
    return ""


def set_loopback(*, is_up: bool) -> None:
    """Switch on or off the only interface of this process's network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as interface:
        answer = fcntl.ioctl(interface, _SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
        (flags,) = struct.unpack("16xh14x", answer)
        flags = flags | _IFF_UP if is_up else flags & ~_IFF_UP
        fcntl.ioctl(interface, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))


def mount(source: str, place: Path, kind: str | None = None, *, flags: int = 0, options: str = "") -> None:
    """Call mount(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), os.fsencode(place), kind and kind.encode(), flags, options.encode() or None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(place))


def unmount(place: Path) -> None:
    """Take the newest mount at this place away."""
    ctypes.CDLL(None).umount2(os.fsencode(place), _MNT_DETACH)


class ReadOnlyMount:
    """While it is entered, no process can open a file of the folder for writing; files that are open stay so."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        """Mount the folder on itself, which is read-only at once for all that is opened from then on."""
        mount(str(self._folder), self._folder, flags=_MS_BIND)
        mount("none", self._folder, flags=_MS_BIND | _MS_REMOUNT | _MS_RDONLY)

    def __exit__(self, *ended: object) -> None:
        """Take the mount away."""
        unmount(self._folder)


def adopt_orphans() -> None:
    """Become the parent of every process whose parent dies, and let the dead ones go as init would."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def reap() -> None:
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                time.sleep(0.05)

    threading.Thread(target=reap, name="chaos-reaper", daemon=True).start()


def descendants(pid: int) -> dict[int, int]:
    """The parents of all living descendants of a process, by their process ids."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents[int(folder.name)] = int(parent)
    found: dict[int, int] = {}
    while fresh := {child: parent for child, parent in parents.items() if (parent == pid or parent in found)} | found:
        if len(fresh) == len(found):
            break
        found = fresh
    return found


def command_line(pid: int) -> str:
    """The arguments of a process; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


class ChaosPlatform:
    """A supervised platform on a state directory of its own, on a port that stays the same."""

    def __init__(self, state_dir: Path, policy: str) -> None:
        self.state_dir = state_dir
        self.policy = policy
        self.num_control_planes: set[int] = set()
        self._port = 0

    def up(self) -> None:
        """Start it as `springtide up` does, unless its control plane lives or its supervisor starts a new one."""
        if self.control_plane() is None and supervisor_pid(self.state_dir) is None:
            # So that faults meet what a platform does every ten minutes, and after an hour.
            os.environ[UPKEEP_PACE] = "60"
            try:
                started = start_platform(self.state_dir, NUM_SLOTS, self.policy, self._port)
            finally:
                del os.environ[UPKEEP_PACE]
            self._port = int(started.url.rstrip("/").rpartition(":")[2])

    def connect(self) -> Client:
        """A connection to it, which outlives its control planes."""
        return connect(state_dir=self.state_dir)

    def control_plane(self) -> int | None:
        """The process id of the living control plane."""
        written = read_platform(self.state_dir)
        pid = None if written is None or not is_alive(written.pid) else written.pid
        if pid is not None:
            self.num_control_planes.add(pid)
        return pid

    def parent(self) -> int | None:
        """The process id of the parent that keeps the control plane up."""
        return supervisor_pid(self.state_dir)

    def workers(self) -> dict[str, int]:
        """The living worker processes by replica, from their records."""
        found = {}
        for path in (self.state_dir / "workers").glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                pid = int(json.loads(path.read_text())["process"]["pid"])
                if is_alive(pid):
                    found[path.stem] = pid
        return found

    def helper(self, words: str, below: int | None = None) -> int | None:
        """The process with these words in its command line that no process like it has started, and is no worker.

        Among the descendants of `below`, by default of this process.
        """
        parents, workers = descendants(os.getpid() if below is None else below), self.workers().values()
        alike = [pid for pid in parents if words in command_line(pid) and pid not in workers]
        return next((pid for pid in alike if parents[pid] not in alike), None)

    def figures(self) -> dict[str, float]:
        """Descriptors, threads and resident MiB of the control plane; nothing if it has just died."""
        pid = self.control_plane()
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            resident = int(status.split("VmRSS:")[1].split()[0]) / 1024
            threads = int(status.split("Threads:")[1].split()[0])
            return {"descriptors": len(os.listdir(f"/proc/{pid}/fd")), "threads": threads, "resident_mib": resident}
        return {}

    def stop(self) -> list[str]:
        """End it in order. Returns what is wrong with that: an end that does not come, processes that outlive it."""
        wrong = []
        last = [pid for pid in (self.parent(), self.control_plane()) if pid is not None]
        try:
            with self.connect() as client:
                client.shutdown()
        except SpringtideError as error:
            wrong.append(f"it refused to shut down: {error}")
        if not all(wait_gone(pid, _STOP_TIMEOUT_S) for pid in last):
            wrong.append(f"it did not end within {_STOP_TIMEOUT_S:g} s")
        end_s = time.monotonic() + _WORKER_TIMEOUT_S
        while (left := descendants(os.getpid())) and time.monotonic() < end_s:
            time.sleep(0.1)
        return wrong + [f"process {pid} outlived it: {command_line(pid)[:100]}" for pid in left]

    def kill_all(self) -> None:
        """End whatever this run has started."""
        while left := descendants(os.getpid()):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def free_folder(folder: Path) -> None:
    """Make the folder for a platform of one's own. Raises BackendError if anything is in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BackendError(f"{folder} is not empty: faults are injected only into a platform that this command starts")
