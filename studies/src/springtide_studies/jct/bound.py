"""The bound of a workload: the best completion times with full knowledge, on packed devices."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from springtide.simulator.fluid.rules import overhead_rule
from springtide.workloads.formats.pollux import read
from springtide_studies.adaptive.jobs import goodput_arrivals
from springtide_studies.adaptive.truth import DEVICES_PER_NODE, MAX_NODES, AppTruth, compact_placement, make_truths
from springtide_studies.bounds.jct_bound import BoundJob, jct_bound
from springtide_studies.workloads.pollux_tables import read_applications

# Raised when the bound changes: results kept under another version are computed anew.
_VERSION = 2


class BoundOptions(Protocol):
    """The options of the bench on which a bound depends."""

    @property
    def data(self) -> Path:
        """The folder that has profiles/."""
        ...

    @property
    def overhead(self) -> str:
        """The rule of what a start costs."""
        ...

    @property
    def cache(self) -> Path | None:
        """Where bounds are kept."""
        ...


def find_bound(workload: Path, options: BoundOptions, tell: Callable[[str], None]) -> dict[str, Any]:
    """Mean completion time in seconds, over all and by application; the one start that no schedule avoids is in it.

    `jct_mean_tight_s` is the higher of the two bounds of `jct_bound`; the lower one is what others compare with.
    """
    profiles = options.data / "profiles"
    truths = make_truths(read_applications(profiles))
    start_s = overhead_rule(options.overhead, MAX_NODES * DEVICES_PER_NODE).announced.change_s
    families, jobs = [], []
    alone: dict[str, dict[int, float]] = {}
    for submit_s, job in goodput_arrivals(read(workload), truths):
        if job.family not in alone:
            alone[job.family] = times_alone_s(truths[job.family], job.max_workers)
        families.append(job.family)
        jobs.append(BoundJob(release_s=submit_s, time_s=alone[job.family]))
    said = msgspec.json.encode((_VERSION, start_s, [(job.release_s, sorted(job.time_s.items())) for job in jobs]))
    place = None if options.cache is None else options.cache / f"bound-{hashlib.sha256(said).hexdigest()[:24]}.json"
    if place is not None and place.is_file():
        kept: dict[str, Any] = msgspec.json.decode(place.read_bytes(), type=dict[str, Any])
        return kept
    tell(f"{workload.stem}: finding the bound, which takes a minute ...")
    num_devices = MAX_NODES * DEVICES_PER_NODE
    ends_s = np.array(jct_bound(jobs, num_devices)) + start_s
    bound = {
        "jct_mean_tight_s": float(np.mean(jct_bound(jobs, num_devices, is_tight=True))) + start_s,
        "jct_mean_s": float(ends_s.mean()),
        "jct_mean_s_by_application": {
            name: float(ends_s[[family == name for family in families]].mean()) for name in sorted(set(families))
        },
    }
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(msgspec.json.encode(bound))
    return bound


def times_alone_s(truth: AppTruth, max_workers: int) -> dict[int, float]:
    """Workers, packed, to seconds of a whole job at the best batch of every epoch."""
    grid = truth.batch_grid()
    return {count: truth.time_alone_s(compact_placement(count), grid) for count in range(1, max_workers + 1)}
