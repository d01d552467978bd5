"""One member of a measurement of collectives: it times the all-reduces of the groups that it belongs to."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import NoReturn

import torch
from torch._C import _distributed_c10d as c10d

from springtide.runtime.process.child_member import run_member
from springtide.runtime.process.child_processes import MemberFiles
from springtide.runtime.profiling.collective_sampler import CollectiveTimes, SampleSpec
from springtide.runtime.profiling.exchange import DeviceTimer, MeasuredExchange

_MAX_REPEATS = 15
_MIN_REPEATS = 3
# The time for repeating an exchange, within the two bounds above.
_BUDGET_S = 1.0


def run_sample_worker(spec: SampleSpec) -> NoReturn:
    """Measure, write the result and end the process."""
    files = MemberFiles(Path(spec.directory), spec.name)
    run_member(files, lambda: files.finish(_measure(spec, files)))


def num_repeats(first_s: float) -> int:
    """How often to repeat an exchange whose first run took `first_s`."""
    return max(_MIN_REPEATS, min(_MAX_REPEATS, int(_BUDGET_S / max(first_s, 1e-9))))


def _measure(spec: SampleSpec, files: MemberFiles) -> list[CollectiveTimes]:
    torch.set_num_threads(1)
    device = torch.device("cuda", spec.rank) if spec.is_gpu else torch.device("cpu")
    if spec.is_gpu:
        torch.cuda.set_device(device)
    store = c10d.FileStore(f"{spec.directory}/store", spec.num_workers)
    all_members = MeasuredExchange(
        c10d.PrefixStore("all_members", store), spec.rank, spec.num_workers, device, spec.address, timeout_s=1800.0
    )
    measured: list[CollectiveTimes] = []
    for number, group in enumerate(spec.groups):
        if spec.rank == 0:
            files.report_progress(f"group {number + 1} of {len(spec.groups)}: {len(group)} workers")
        if spec.rank in group:
            member = group.index(spec.rank)
            own_store = c10d.PrefixStore(f"group-{number}", store)
            exchange = MeasuredExchange(own_store, member, len(group), device, spec.address)
            for num_bytes in spec.sizes_bytes:
                entry = _time(exchange, group, num_bytes, device)
                if member == 0:
                    measured.append(entry)
        # A barrier, because the next group's measurement must not share links with this one.
        all_members.barrier()
    return measured


def _time(exchange: MeasuredExchange, group: list[int], num_bytes: int, device: torch.device) -> CollectiveTimes:
    watch = DeviceTimer(device)
    tensor = torch.zeros(num_bytes // 4, device=device)

    def once() -> float:
        exchange.barrier()
        began = watch.now()
        exchange.all_reduce(tensor)
        return watch.seconds(began, watch.now())

    # The time of the slowest member, on all members.
    (first_s,) = exchange.maximum([once()])
    repeats_s = exchange.maximum([once() for _ in range(num_repeats(first_s))])
    return CollectiveTimes(
        group=group, num_bytes=num_bytes, repeats_s=repeats_s, duration_s=statistics.median(repeats_s)
    )
