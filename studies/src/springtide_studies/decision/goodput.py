"""A crowd of jobs whose batch size policies choose, for the time of decisions: profiled, noisy, below a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from springtide.core.events import Event
from springtide.core.resources import Node, Topology
from springtide.core.workload import TrainingJob, WorkloadId
from springtide.perf.communication.fabric import V100_SERVER
from springtide.simulator.fluid.rules import Speeds
from springtide.workloads.cluster import cluster_nodes
from springtide_studies.decision.platform import DEVICES_PER_NODE
from springtide_studies.fapes.jobs import FapesRequest, arrivals_of, draw_requests
from springtide_studies.fapes.truth import TopologySpeeds

# The policies that are measured with such jobs.
GOODPUT_POLICIES: tuple[str, ...] = ("fapes", "goodput", "pollux", "sia")
# 1,000 jobs on 8,000 devices; 16 on 128.
DEVICES_PER_JOB = 8.0
SIZES: tuple[int, ...] = (64, 128, 512, 1024, 2048, 4096, 8192)
# (devices, percentile, bound in ms): the aims; FaPES's own decisions on 128 devices take 580 ms (p90, section 7.4).
AIMS: tuple[tuple[int, str, float], ...] = ((128, "p90", 50.0), (8192, "p99", 1000.0))
PUBLISHED_P90_MS = 580.0
# The crowd comes over two minutes, so that it is there before the second round.
_WARM_UP_S = 40.0
LABELS: Mapping[str, str] = MappingProxyType({"p90": "p90_ms", "p99": "p99_ms"})


def is_goodput_policy(policy: str) -> bool:
    """Whether a policy is measured with jobs whose batch size it chooses."""
    return policy.partition(":")[0] in GOODPUT_POLICIES


class GoodputCrowd:
    """Jobs whose batch size policies choose."""

    timed_events: Sequence[tuple[float, Event]] = ()

    def __init__(self, num_devices: int, seed: int) -> None:
        self._rng = np.random.default_rng(np.random.SeedSequence([seed, num_devices, 23]))
        self._seed, self._drawn = seed, 0
        self.num_jobs = max(1, round(num_devices / DEVICES_PER_JOB))
        self.due_s: float | None = None
        self.nodes: Sequence[Node] = cluster_nodes(f"{num_devices // DEVICES_PER_NODE}x{DEVICES_PER_NODE}@10x10x11")
        self._speeds = TopologySpeeds(Topology(nodes=tuple(self.nodes)), V100_SERVER, ())

        self.speeds: Speeds | None = self._speeds

    def warm(self) -> list[tuple[float, TrainingJob]]:
        return [
            (float(int(index * _WARM_UP_S / self.num_jobs)), self._job(float(self._rng.uniform(0.05, 1.0))))
            for index in range(self.num_jobs)
        ]

    def next(self, now_s: float) -> TrainingJob:
        return self._job(1.0)

    def ended(self, job_id: WorkloadId) -> None:
        """All jobs are drawn alike, whichever has ended."""

    def _job(self, left: float) -> TrainingJob:
        (drawn,) = draw_requests([0.0], self._seed * 1_000_003 + self._drawn)
        request = FapesRequest(
            job_id=f"job-{self._drawn:06d}",
            at_s=0.0,
            family=drawn.family,
            num_samples=drawn.num_samples * left,
            num_workers=drawn.num_workers,
            local_batch_size=drawn.local_batch_size,
        )
        self._drawn += 1
        self._speeds.add(request)
        ((_, job),) = arrivals_of([request], "adaptive", {})
        return job


def rows_of(policy: str, found: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each size; those of the aims have their bound."""
    rows = []
    for num_devices, figures in found.items():
        aims: list[tuple[str, float | None]] = [(label, bound) for size, label, bound in AIMS if size == num_devices]
        aims = aims or [("p99", None)]
        for label, bound in aims:
            ours = figures[LABELS[label]]
            rows.append(
                {
                    "case": f"{num_devices} devices, {figures['num_jobs_mean']:.0f} goodput jobs: {policy} {label}",
                    "ours": ours,
                    "baseline": PUBLISHED_P90_MS,
                    "baseline_name": "FaPES as published, p90 on 128 devices",
                    "ratio": ours / PUBLISHED_P90_MS,
                    "bound": bound,
                    "unit": "ms CPU",
                }
            )
    return rows
