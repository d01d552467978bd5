"""What a lab leaves behind, and the process that takes it away when the test is gone, however it went.

A keeper is started before anything of a lab is: it holds the lab's lock and waits for the end of its standard input,
which comes when the test's process ends, by kill -9 too. Then it ends whatever belongs to the lab's folder. A keeper
that was killed itself leaves a record; whoever starts the next lab cleans up after it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# One place of the machine, whoever runs the tests and from which checkout.
REGISTRY = Path("/tmp/springtide-labs")
NODE_LOCK = REGISTRY / "nodes.lock"
CGROUPS = Path("/sys/fs/cgroup")


def cgroup_name(folder: Path, number: int) -> str:
    """The root of the control groups of one node's pods: nobody else's has this name."""
    return f"springtide-{folder.name}-{number}"


def bridge_name(number: int) -> str:
    return f"stlab{number}"


def processes_of(folder: Path) -> Iterator[tuple[int, str]]:
    """Every process whose command line names a file below the folder, which is a name that nobody else has."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if f"{folder}/" in command:
                yield int(entry.name), command


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() and not _is_zombie(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def _cgroups_of(folder: Path) -> list[Path]:
    return sorted(CGROUPS.glob(f"springtide-{folder.name}-*")) + sorted(CGROUPS.glob(f"*/springtide-{folder.name}-*"))


def mounts_below(folder: Path) -> list[str]:
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return sorted((point for point in points if point.startswith(f"{folder}/")), reverse=True)


def tear_down(folder: Path) -> None:
    """End what runs for this lab and take away what it left on the machine. May be repeated."""
    # The kubelets first: they would start again what is killed.
    _kill([pid for pid, command in processes_of(folder) if "/kubelet " in command])
    inside = [path for root in _cgroups_of(folder) for path in root.rglob("cgroup.procs")]
    _kill([int(pid) for path in inside for pid in path.read_text().split()])
    _kill([pid for pid, _command in processes_of(folder)])
    for point in mounts_below(folder):
        subprocess.run(["umount", "--lazy", point], capture_output=True, check=False)
    for root in _cgroups_of(folder):
        for path in sorted((entry for entry in root.rglob("*") if entry.is_dir()), reverse=True):
            with contextlib.suppress(OSError):
                path.rmdir()
        with contextlib.suppress(OSError):
            root.rmdir()
    remembered = folder / "machine.json"
    if remembered.exists():
        before = json.loads(remembered.read_text())
        for bridge in before["bridges"]:
            subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)
        for name, value in before["sysctls"].items():
            with contextlib.suppress(OSError):
                Path("/proc/sys", *name.split(".")).write_text(value)
    # Nothing is deleted through a mount that would not go away.
    if folder.exists() and not mounts_below(folder):
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def sweep() -> None:
    """Clean up after labs whose keeper did not live to do it."""
    for record in REGISTRY.glob("lab-*"):
        with _locked(record, wait=False) as is_orphan:
            folder = record.read_text().strip() if is_orphan and record.exists() else ""
            if folder:
                tear_down(Path(folder))
                record.unlink(missing_ok=True)


def keep(folder: Path, *, has_nodes: bool) -> None:
    """Hold the lab's locks until the standard input ends, then tear it down."""
    REGISTRY.mkdir(exist_ok=True)
    sweep()
    with contextlib.ExitStack() as stack:
        if has_nodes:
            stack.enter_context(_locked(NODE_LOCK, wait=True))
        record = REGISTRY / f"lab-{folder.name}"
        stack.enter_context(_locked(record, wait=True))
        record.write_text(str(folder))
        print("kept", flush=True)
        sys.stdin.read()
        tear_down(folder)
        record.unlink(missing_ok=True)


if __name__ == "__main__":
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    keep(Path(sys.argv[1]), has_nodes="--nodes" in sys.argv[2:])
