"""The kinds of faults that can be injected into a running platform of this machine, as a table."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from springtide_studies.chaos.platform import CGROUPS, ChaosPlatform, ReadOnlyMount, set_loopback

ZYGOTE, CHECKER = "springtide.runtime zygote", "compile_server.py"
SERVICE = "echo"
_STATUS = "/proc/{}/status"


@dataclass(frozen=True, kw_only=True)
class ChaosFault:
    """One kind. `inject` does it, lifts it again if it lasts, and returns what it hit ("": there was nothing to hit).

    `loses_requests`: those that are sent or under way until the platform has recovered may be lost. `needs` is what
    this process must have: namespaces of its own, or the right to make control groups.
    """

    inject: Callable[[ChaosPlatform, random.Random], str]
    loses_requests: bool = False
    needs: Literal["", "namespaces", "cgroups"] = ""


def _kill(pid: int | None, what: str) -> str:
    if pid is None:
        return ""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return ""
    return what


def _kill_control_plane(platform: ChaosPlatform, rng: random.Random) -> str:
    return _kill(platform.control_plane(), "control plane")


def _kill_parent(platform: ChaosPlatform, rng: random.Random) -> str:
    return _kill(platform.parent(), "parent")


def _kill_both(platform: ChaosPlatform, rng: random.Random) -> str:
    _kill(platform.parent(), "")
    return _kill(platform.control_plane(), "parent and control plane")


def _workers_of_jobs(platform: ChaosPlatform) -> dict[str, list[int]]:
    """The workers of each job in the order in which they were started, which is that of their ranks after a start."""
    jobs: dict[str, list[int]] = {}
    for replica, pid in sorted(platform.workers().items(), key=lambda each: int(each[0].rpartition(".")[2])):
        job = replica.rpartition(".")[0]
        if not job.startswith(SERVICE):
            jobs.setdefault(job, []).append(pid)
    return jobs


def _pick_worker(platform: ChaosPlatform, rng: random.Random) -> tuple[int, str] | None:
    jobs = _workers_of_jobs(platform)
    if not jobs:
        return None
    job = rng.choice(sorted(jobs))
    index = rng.randrange(len(jobs[job]))
    return jobs[job][index], f"worker {index + 1} of {len(jobs[job])}"


def _kill_worker(platform: ChaosPlatform, rng: random.Random) -> str:
    found = _pick_worker(platform, rng)
    return _kill(*found) if found else ""


def _kill_group(platform: ChaosPlatform, rng: random.Random) -> str:
    jobs = _workers_of_jobs(platform)
    pids = jobs[rng.choice(sorted(jobs))] if jobs else []
    killed = [pid for pid in pids if _kill(pid, "worker")]
    return f"all {len(killed)} workers" if killed else ""


def _kill_worker_and_control_plane(platform: ChaosPlatform, rng: random.Random) -> str:
    worker = _kill_worker(platform, rng)
    return worker and _kill(platform.control_plane(), f"{worker} and control plane")


def _replica(platform: ChaosPlatform, rng: random.Random) -> int | None:
    replicas = {name: pid for name, pid in platform.workers().items() if name.startswith(SERVICE)}
    return replicas[rng.choice(sorted(replicas))] if replicas else None


def _kill_replica(platform: ChaosPlatform, rng: random.Random) -> str:
    return _kill(_replica(platform, rng), "replica")


def _kill_zygote(platform: ChaosPlatform, rng: random.Random) -> str:
    return _kill(platform.helper(ZYGOTE), "zygote")


def _kill_checker(platform: ChaosPlatform, rng: random.Random) -> str:
    return _kill(platform.helper(CHECKER), "source checker")


def _stop(pid: int | None, duration_s: float, what: str) -> str:
    """SIGSTOP, and SIGCONT later; a process that is killed meanwhile stays dead."""
    if pid is None:
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(duration_s)
        os.kill(pid, signal.SIGCONT)
    return f"{what} for {duration_s:.1f} s"


def _stop_worker(platform: ChaosPlatform, rng: random.Random) -> str:
    found = _pick_worker(platform, rng)
    return _stop(found[0], rng.uniform(0.2, 6.0), found[1]) if found else ""


def _stop_replica(platform: ChaosPlatform, rng: random.Random) -> str:
    return _stop(_replica(platform, rng), rng.uniform(0.2, 4.0), "replica")


def _stop_zygote(platform: ChaosPlatform, rng: random.Random) -> str:
    return _stop(platform.helper(ZYGOTE), rng.uniform(0.5, 5.0), "zygote")


def _stop_control_plane(platform: ChaosPlatform, rng: random.Random) -> str:
    return _stop(platform.control_plane(), rng.uniform(0.5, 6.0), "control plane")


@contextlib.contextmanager
def _limited(pid: int, kind: int, soft: int) -> Iterator[None]:
    """Lower a soft limit of a process for a while."""
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (soft, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, kind, before)


def _exhaust_descriptors(platform: ChaosPlatform, rng: random.Random) -> str:
    pid, duration_s = platform.control_plane(), rng.uniform(0.5, 4.0)
    if pid is None:
        return ""
    with contextlib.suppress(OSError):
        # The lowest that is free, so that nothing can be opened before something is closed.
        taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        most = next(number for number in itertools.count() if number not in taken)
        with _limited(pid, resource.RLIMIT_NOFILE, most):
            time.sleep(duration_s)
        return f"limit {most} for {duration_s:.1f} s"
    return ""


def _exhaust_memory(platform: ChaosPlatform, rng: random.Random) -> str:
    pid, duration_s = platform.control_plane(), rng.uniform(0.5, 3.0)
    if pid is None:
        return ""
    with contextlib.suppress(OSError):
        size = int(Path(_STATUS.format(pid)).read_text().split("VmSize:")[1].split()[0]) * 1024
        with _limited(pid, resource.RLIMIT_AS, size):
            time.sleep(duration_s)
        return f"no more than {size >> 20} MiB for {duration_s:.1f} s"
    return ""


def _run_out_of_memory(platform: ChaosPlatform, rng: random.Random) -> str:
    """A control group with hardly any memory: the kernel ends the worker at its next allocations."""
    found = _pick_worker(platform, rng)
    if found is None:
        return ""
    group = CGROUPS / f"springtide-chaos-{os.getpid()}-{found[0]}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("1M")
        (group / "cgroup.procs").write_text(str(found[0]))
        time.sleep(rng.uniform(1.0, 3.0))
        (CGROUPS / "cgroup.procs").write_text(str(found[0]))
    except OSError:
        # It has been ended, as it should be.
        pass
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)
    return f"{found[1]} with 1 MiB"


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
        "control plane killed": ChaosFault(inject=_kill_control_plane, loses_requests=True),
        "parent killed": ChaosFault(inject=_kill_parent),
        "parent and control plane killed": ChaosFault(inject=_kill_both, loses_requests=True),
        "worker killed": ChaosFault(inject=_kill_worker),
        "all workers of a job killed": ChaosFault(inject=_kill_group),
        "worker and control plane killed": ChaosFault(inject=_kill_worker_and_control_plane, loses_requests=True),
        "replica killed": ChaosFault(inject=_kill_replica),
        "zygote killed": ChaosFault(inject=_kill_zygote),
        "source checker killed": ChaosFault(inject=_kill_checker),
        "worker stopped": ChaosFault(inject=_stop_worker),
        "replica stopped": ChaosFault(inject=_stop_replica),
        "zygote stopped": ChaosFault(inject=_stop_zygote),
        "control plane stopped": ChaosFault(inject=_stop_control_plane),
        "no descriptors": ChaosFault(inject=_exhaust_descriptors, loses_requests=True),
        "no memory for the control plane": ChaosFault(inject=_exhaust_memory, loses_requests=True),
        "no memory for a worker": ChaosFault(inject=_run_out_of_memory, needs="cgroups"),
        "full disk": ChaosFault(inject=_fill_disk, needs="namespaces"),
        "read-only disk": ChaosFault(inject=_forbid_writes, needs="namespaces"),
        "network down": ChaosFault(inject=_cut_network, loses_requests=True, needs="namespaces"),
    }
)
