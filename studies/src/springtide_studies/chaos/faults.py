"""The kinds of faults that can be injected into a running platform of this machine, as a table."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from springtide_studies.chaos.platform import CGROUPS, ChaosPlatform, ReadOnlyMount, set_loopback

SERVICE = "echo"
# What a fault is aimed at: process ids, each with what it is.
Target = Callable[[ChaosPlatform, random.Random], dict[int, str]]
# It injects the fault, lifts it again if it lasts, and returns what it hit; "" if there was nothing to hit.
Injection = Callable[[ChaosPlatform, random.Random], str]


@dataclass(frozen=True, kw_only=True)
class ChaosFault:
    """One kind of fault.

    `loses_requests`: those that are sent or under way until the platform has recovered may be lost. `needs` is what
    this process must have: namespaces of its own, or the right to make control groups.
    """

    inject: Injection
    loses_requests: bool = False
    needs: Literal["", "namespaces", "cgroups"] = ""


def _one(pid: int | None, what: str) -> dict[int, str]:
    return {} if pid is None else {pid: what}


def _control_plane(platform: ChaosPlatform, rng: random.Random) -> dict[int, str]:
    return _one(platform.control_plane(), "control plane")


def _parent(platform: ChaosPlatform, rng: random.Random) -> dict[int, str]:
    return _one(platform.parent(), "parent")


def _zygote(platform: ChaosPlatform, rng: random.Random) -> dict[int, str]:
    return _one(platform.helper("springtide.runtime zygote"), "zygote")


def _checker(platform: ChaosPlatform, rng: random.Random) -> dict[int, str]:
    control_plane = platform.control_plane()
    if control_plane is None:
        return {}
    return _one(platform.helper("compile_server.py", below=control_plane), "source checker")


def _replica(platform: ChaosPlatform, rng: random.Random) -> dict[int, str]:
    replicas = {name: pid for name, pid in platform.workers().items() if name.startswith(SERVICE)}
    return _one(replicas[rng.choice(sorted(replicas))], "replica") if replicas else {}


def _group(platform: ChaosPlatform, rng: random.Random) -> dict[int, str]:
    """The workers of one job in the order in which they were started."""
    jobs: dict[str, list[int]] = {}
    for replica, pid in sorted(platform.workers().items(), key=lambda each: int(each[0].rpartition(".")[2])):
        if not replica.startswith(SERVICE):
            jobs.setdefault(replica.rpartition(".")[0], []).append(pid)
    pids = jobs[rng.choice(sorted(jobs))] if jobs else []
    return {pid: f"worker {number} of {len(pids)}" for number, pid in enumerate(pids, 1)}


def _worker(platform: ChaosPlatform, rng: random.Random) -> dict[int, str]:
    group = _group(platform, rng)
    return dict([rng.choice(list(group.items()))]) if group else {}


def _kill(*targets: Target) -> Injection:
    """SIGKILL to all of them at once."""

    def inject(platform: ChaosPlatform, rng: random.Random) -> str:
        hit = {pid: what for target in targets for pid, what in target(platform, rng).items()}
        for pid in hit:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return ", ".join(hit.values())

    return inject


def _stop(target: Target, most_s: float) -> Injection:
    """SIGSTOP, and SIGCONT later; a process that is killed meanwhile stays dead."""

    def inject(platform: ChaosPlatform, rng: random.Random) -> str:
        duration_s = rng.uniform(0.2, most_s)
        for pid, what in target(platform, rng).items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(duration_s)
                os.kill(pid, signal.SIGCONT)
            return f"{what} for {duration_s:.1f} s"
        return ""

    return inject


def _limit(kind: int, amount: Callable[[int], int], unit: int, most_s: float) -> Injection:
    """Lower a soft limit of the control plane for a while, to what it has."""

    def inject(platform: ChaosPlatform, rng: random.Random) -> str:
        pid, duration_s = platform.control_plane(), rng.uniform(0.5, most_s)
        if pid is None:
            return ""
        soft, (before, hard) = amount(pid), resource.prlimit(pid, kind)
        try:
            resource.prlimit(pid, kind, (soft, hard))
            time.sleep(duration_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, kind, (before, hard))
        return f"limit {soft // unit} for {duration_s:.1f} s"

    return inject


def _free_descriptor(pid: int) -> int:
    """The lowest that is free: nothing can be opened before something is closed."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    return next(number for number in itertools.count() if number not in taken)


def _address_space(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmSize:")[1].split()[0]) * 1024


def _run_out_of_memory(platform: ChaosPlatform, rng: random.Random) -> str:
    """A control group with hardly any memory: the kernel ends the worker at its next allocations."""
    found = _worker(platform, rng)
    if not found:
        return ""
    ((pid, what),) = found.items()
    group = CGROUPS / f"springtide-chaos-{os.getpid()}-{pid}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("1M")
        (group / "cgroup.procs").write_text(str(pid))
        time.sleep(rng.uniform(1.0, 3.0))
        (CGROUPS / "cgroup.procs").write_text(str(pid))
    except OSError:
        # It has been ended, as it should be.
        pass
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)
    return f"{what} with 1 MiB"


def _fill_disk(platform: ChaosPlatform, rng: random.Random) -> str:
    ballast, duration_s = platform.state_dir / "ballast", rng.uniform(0.5, 4.0)
    free = os.statvfs(platform.state_dir)
    try:
        with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_bsize)
            while file.write(bytes(1024)):
                pass
        time.sleep(duration_s)
    finally:
        ballast.unlink()
    return f"full for {duration_s:.1f} s"


def _forbid_writes(platform: ChaosPlatform, rng: random.Random) -> str:
    duration_s = rng.uniform(0.5, 4.0)
    with ReadOnlyMount(platform.state_dir):
        time.sleep(duration_s)
    return f"read-only for {duration_s:.1f} s"


def _cut_network(platform: ChaosPlatform, rng: random.Random) -> str:
    duration_s = rng.uniform(0.5, 4.0)
    set_loopback(is_up=False)
    try:
        time.sleep(duration_s)
    finally:
        set_loopback(is_up=True)
    return f"loopback down for {duration_s:.1f} s"


FAULTS: Mapping[str, ChaosFault] = MappingProxyType(
    {
        "control plane killed": ChaosFault(inject=_kill(_control_plane), loses_requests=True),
        "parent killed": ChaosFault(inject=_kill(_parent)),
        "parent and control plane killed": ChaosFault(inject=_kill(_parent, _control_plane), loses_requests=True),
        "worker killed": ChaosFault(inject=_kill(_worker)),
        "all workers of a job killed": ChaosFault(inject=_kill(_group)),
        "worker and control plane killed": ChaosFault(inject=_kill(_worker, _control_plane), loses_requests=True),
        "replica killed": ChaosFault(inject=_kill(_replica)),
        "zygote killed": ChaosFault(inject=_kill(_zygote)),
        "source checker killed": ChaosFault(inject=_kill(_checker)),
        "worker stopped": ChaosFault(inject=_stop(_worker, 6.0)),
        "replica stopped": ChaosFault(inject=_stop(_replica, 4.0)),
        "zygote stopped": ChaosFault(inject=_stop(_zygote, 5.0)),
        "control plane stopped": ChaosFault(inject=_stop(_control_plane, 6.0)),
        "no descriptors": ChaosFault(
            inject=_limit(resource.RLIMIT_NOFILE, _free_descriptor, 1, 4.0), loses_requests=True
        ),
        "no memory for the control plane": ChaosFault(
            inject=_limit(resource.RLIMIT_AS, _address_space, 1 << 20, 3.0), loses_requests=True
        ),
        "no memory for a worker": ChaosFault(inject=_run_out_of_memory, needs="cgroups"),
        "full disk": ChaosFault(inject=_fill_disk, needs="namespaces"),
        "read-only disk": ChaosFault(inject=_forbid_writes, needs="namespaces"),
        "network down": ChaosFault(inject=_cut_network, loses_requests=True, needs="namespaces"),
    }
)
