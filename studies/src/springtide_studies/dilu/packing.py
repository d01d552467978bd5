"""The study of packing: devices in use under each way to choose them, beside the least that any packing needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from springtide_studies.bounds.packing_bound import PackingBound, bound_packing
from springtide_studies.dilu.packing_play import (
    CONTENDERS,
    DEVICES_PER_NODE,
    NUM_NODES,
    Contender,
    PackingRun,
    capacity,
    paper_cluster,
    play_packing,
    sizes_after,
)
from springtide_studies.workloads.dilu import (
    SharingWorkload,
    draw_sharing_workload,
    find_workloads,
    read_sharing_workload,
)

SIZES = (100, 200, 400, 800, 1600, 3200)
_SMALL_SIZE = 400
# So many moments are looked at for the highest bound; the bound holds whichever they are.
MAX_MOMENTS = 40
# Devices at the peak as the paper's section 5.5 tells them at 3,200 instances: Dilu's, over each rival's.
PAPER_RATIOS: tuple[tuple[str, float], ...] = (("exclusive", 0.70), ("infless-l", 0.77))
_SHOWN: tuple[tuple[str, str, str], ...] = (
    ("peak_devices", "PEAK", "d"),
    ("device_hours", "GPU HOURS", ".1f"),
    ("sm_fragmentation", "SM UNUSED", ".1%"),
    ("memory_fragmentation", "MEMORY UNUSED", ".1%"),
    ("peak_splits", "SPLIT AT PEAK", "d"),
    ("extra_stages", "MORE STAGES", "d"),
    ("extra_device_hours", "REPEATED GPU H", ".1f"),
    ("num_violations", "OUT OF BOUNDS", "d"),
)

Progress = Callable[[str, int, int], None]


def run_study(*, data: Path | None, seed: int, is_small: bool, on_progress: Progress | None = None) -> dict[str, Any]:
    """Play each workload of a folder, or without one drawn ones of the same distribution, under every contender.

    `is_small`: only those of at most 400 instances. Raises InvalidRequest.
    """
    answer: dict[str, Any] = {
        "study": "dilu-packing",
        "seed": seed,
        "cluster": f"{NUM_NODES}x{DEVICES_PER_NODE}",
        "paper_ratios": dict(PAPER_RATIOS),
        "workloads": [],
    }
    for workload in _workloads(data, seed, is_small):
        answer["workloads"].append(study_workload(workload, CONTENDERS, on_progress))
    return answer


def _workloads(data: Path | None, seed: int, is_small: bool) -> list[SharingWorkload]:
    if data is None:
        return [draw_sharing_workload(size, seed) for size in SIZES if size <= _SMALL_SIZE or not is_small]
    read = [read_sharing_workload(path) for path in find_workloads(data)]
    return [workload for workload in read if workload.num_instances <= _SMALL_SIZE or not is_small]


def study_workload(
    workload: SharingWorkload, contenders: Sequence[Contender], on_progress: Progress | None = None
) -> dict[str, Any]:
    """One workload under each contender on the paper's cluster, with its bounds."""
    cluster = paper_cluster()
    runs: dict[str, PackingRun] = {}
    for contender in contenders:
        name = f"{workload.name} {contender.name}"
        runs[contender.name] = play_packing(
            workload,
            contender,
            cluster,
            on_progress=None if on_progress is None else _named(on_progress, name),
        )
    bound = highest_bound(workload, runs["dilu"])
    return {
        "name": workload.name,
        "instances": workload.num_instances,
        "bound": {
            "relaxed": bound.relaxed,
            "least": bound.least,
            "found": bound.found,
            "least_with_splits": volume_bound(workload, runs["dilu"]),
        },
        "policies": {name: run.figures() for name, run in runs.items()},
    }


def _named(on_progress: Progress, name: str) -> Callable[[int, int], None]:
    return lambda num_done, num_all: on_progress(name, num_done, num_all)


def highest_bound(workload: SharingWorkload, run: PackingRun) -> PackingBound:
    """The highest of the packing program's bounds over the moments of a run that does not split.

    What the run has in use is a packing of that moment, so no moment with fewer devices than the best bound so far can
    have a higher one; the others are looked at, the fullest first, `MAX_MOMENTS` of them at most.
    """
    best = PackingBound(relaxed=0.0, least=0, found=0)
    order = sorted(range(len(run.open_after)), key=lambda number: (-run.open_after[number], number))
    patterns: tuple[Any, ...] = ()
    for number in order[:MAX_MOMENTS]:
        if run.open_after[number] <= best.least:
            break
        bound = bound_packing(sizes_after(workload, number), capacity(), patterns)
        patterns = bound.patterns
        if bound.relaxed > best.relaxed:
            best = bound
    return best


def volume_bound(workload: SharingWorkload, run: PackingRun) -> int:
    """No packing has fewer devices at its peak, however it splits: what is asked for in all, of what is short most."""
    number = max(range(len(run.open_after)), key=run.open_after.__getitem__)
    sizes = sizes_after(workload, number)
    return max(math.ceil(sum(size[axis] for size in sizes) / most) for axis, most in enumerate(capacity()))


def study_text(answer: Mapping[str, Any]) -> str:
    """A table for each workload, the least that any packing needs above it."""
    parts = []
    for workload in answer["workloads"]:
        bound = workload["bound"]
        head = (
            f"{workload['name']}: {workload['instances']} instances; unsplit no packing needs fewer than "
            f"{bound['least']} GPUs at the peak (program {bound['relaxed']:.1f}; one with {bound['found']} is known), "
            f"split none fewer than {bound['least_with_splits']}"
        )
        header = ("POLICY", *[title for _, title, _ in _SHOWN])
        rows = [
            (name, *[format(figures[key], form) for key, _, form in _SHOWN])
            for name, figures in workload["policies"].items()
        ]
        parts.append(head + "\n" + _aligned([header, *rows]))
    return "\n\n".join(parts)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) if not at else cell.rjust(width) for at, (cell, width) in enumerate(pairs))
        for pairs in (zip(row, widths, strict=True) for row in rows)
    ]
    return "\n".join(line.rstrip() for line in lines)
