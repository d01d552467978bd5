"""The truth of the FaPES bench: a step is its timeline with the exchanges of the very placement laid into it."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from springtide.core.events import ProgressReported
from springtide.core.resources import DeviceId, Topology
from springtide.core.workload import AdaptiveBatch, TrainingJob, WorkloadId
from springtide.perf.communication.fabric import Fabric, Links, Subgraph
from springtide.perf.communication.query import Query
from springtide.perf.goodput import step_total_s
from springtide.perf.timeline import bucket_bytes, iteration_s
from springtide.simulator.fluid.rules import RunSpeed, exact_boundary_s, make_run
from springtide.simulator.fluid.runs import FluidRun
from springtide_studies.fapes.jobs import FAMILIES, NUM_PIECES, FapesRequest, gain, progress_ends
from springtide_studies.fapes.nccl import Nccl

# How often running jobs report progress: the noise scale changes over a tenth of a training.
_REPORT_EVERY_S = 150.0


def split_batch(
    global_batch_size: int, num_workers: int, bounds: AdaptiveBatch | None, initial_batch_size: int | None = None
) -> tuple[int, int]:
    """Return (local batch size, passes before the exchange) with which `num_workers` make up a global batch.

    As few passes as `max_local_size` allows, in equal shares, rounded up. A single worker makes at least two passes for
    a batch above the initial one (by default the smallest within the bounds), because the gradient noise cannot be
    estimated from one pass on one worker (as in the published adaptdl). Without bounds there is one pass.
    """
    share = -(-global_batch_size // num_workers)
    if bounds is None:
        return share, 1
    num_passes = 1 if bounds.max_local_size is None else max(1, -(-share // bounds.max_local_size))
    initial = bounds.min_size if initial_batch_size is None else initial_batch_size
    if num_workers == 1 and global_batch_size > initial:
        num_passes = max(num_passes, 2)
    return -(-global_batch_size // (num_workers * num_passes)), num_passes


@dataclass(slots=True)
class _TrueJob:
    """One job's truth: its ends in its own steps, and what such a step is worth in initial ones."""

    request: FapesRequest
    ends: tuple[float, ...]
    worths: tuple[float, ...]
    piece: int = 0
    split: tuple[int, int] = (1, 1)


class TopologySpeeds:
    """The speed of jobs by the devices that they are on (analytic NCCL over the cluster's graph), batch and noise."""

    report_every_s = _REPORT_EVERY_S
    rings_by_rank = False

    def __init__(self, topology: Topology, links: Links, requests: Sequence[FapesRequest]) -> None:
        self._devices_per_node = max(len(node.devices) for node in topology.nodes)
        self._topology = topology
        self._fabric = Fabric(topology, links)
        self._nccl = Nccl()
        self._requests = {request.job_id: request for request in requests}
        self._jobs: dict[WorkloadId, _TrueJob] = {}
        self._profiles = {name: family.profile() for name, family in FAMILIES.items()}
        self._exchanges: dict[tuple[str, int], tuple[Subgraph, NDArray[np.float64]]] = {}

    def add(self, request: FapesRequest) -> None:
        """Another request, whose job is yet to come."""
        self._requests[request.job_id] = request

    def open_run(self, job: TrainingJob, now_s: float, done_steps: float = 0.0) -> FluidRun:
        """The run of a job that arrives now; its length is that of its request."""
        request = self._requests[job.job_id]
        family = FAMILIES[request.family]
        ends, worths = progress_ends(family, request, job.global_batch_size)
        self._jobs[job.job_id] = _TrueJob(request, ends, worths)
        first = [self._topology.nodes[0].devices[0].device_id]
        alone_s = self.step_total_s(request.family, first, job.global_batch_size)[0]
        return make_run(job, now_s, length=ends[-1], single_steps_per_s=1.0 / alone_s, done_steps=done_steps)

    def step_total_s(
        self, family: str, device_ids: Sequence[DeviceId], batch_size: int
    ) -> tuple[float, float, float, tuple[int, int]]:
        """Seconds of a whole step, of a step of one pass, of its exchange; and (local batch, passes)."""
        local, passes = self._split(family, batch_size, len(device_ids))
        step_s, sync_s = iteration_s(self._profiles[family], local, 1, self._exchange_s(family, device_ids))
        return float(step_total_s(step_s, sync_s, passes)), float(step_s), float(sync_s), (local, passes)

    def compact_curve(self, family: str, batch_size: int, most: int) -> dict[int, float]:
        """Steps a second on 1, 2, 4, .. devices of whole nodes side by side: what profiling beforehand would tell."""
        devices = list(self._topology.device_ids())
        sizes = [n for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64) if n <= min(most, batch_size, len(devices))]
        return {n: 1.0 / self.step_total_s(family, devices[:n], batch_size)[0] for n in sizes}

    def _split(self, family: str, batch_size: int, num_workers: int) -> tuple[int, int]:
        bounds = AdaptiveBatch(min_size=1, max_size=batch_size, max_local_size=FAMILIES[family].max_local_size)
        return split_batch(max(batch_size, num_workers), num_workers, bounds, batch_size)

    def _exchange_s(self, family: str, device_ids: Sequence[DeviceId]) -> NDArray[np.float64]:
        subgraph = self._fabric.subgraph(device_ids)
        known = self._exchanges.get((family, id(subgraph)))
        if known is None:
            sizes = bucket_bytes(self._profiles[family]).tolist()
            times_s = np.array([self._nccl.time_s(Query(subgraph, size)) for size in sizes])
            # The subgraph is kept, so that its identity is not given to another one.
            known = self._exchanges[family, id(subgraph)] = (subgraph, times_s)
        return known[1]

    def pace(self, run: FluidRun) -> RunSpeed:
        """Steps of the job's own batch a second, in the present piece of its training."""
        known = self._jobs[run.job.job_id]
        family = FAMILIES[known.request.family]
        known.piece = bisect.bisect_right(known.ends, run.done_steps, hi=NUM_PIECES - 1)
        devices = [run.replicas[replica_id].device_id for replica_id in run.members]
        whole_s, _, _, known.split = self.step_total_s(family.name, devices, _within(run))
        local, passes = known.split
        worth = gain(family, known.piece, local * passes * len(devices)) / known.worths[known.piece]
        rate = worth / whole_s
        efficiency = rate / run.single_steps_per_s if run.single_steps_per_s else 0.0
        fewest = -(-len(devices) // self._devices_per_node)
        return RunSpeed(rate, efficiency, known.ends[known.piece], len(run.placement) > fewest)

    def boundary_s(self, run: FluidRun) -> float:
        """When the present piece of its training ends."""
        return exact_boundary_s(run)

    def observed_s(self, run: FluidRun) -> float:
        """At once."""
        return run.boundary_s

    def first_report_s(self, run: FluidRun) -> float:
        """After its first step."""
        return 1.0 / run.rate if run.rate else 1.0

    def report(self, run: FluidRun) -> ProgressReported:
        """A report of progress, step times and gradient noise."""
        known = self._jobs[run.job.job_id]
        family, job = FAMILIES[known.request.family], run.job
        devices = [run.replicas[replica_id].device_id for replica_id in run.members]
        whole_s, step_s, sync_s, (local, passes) = self.step_total_s(family.name, devices, _within(run))
        batch_size = local * passes * len(devices)
        return ProgressReported(
            job_id=job.job_id,
            generation=run.generation,
            step=run.step,
            total_steps=job.total_steps or 0,
            world_size=len(run.members),
            samples_per_s=batch_size / whole_s,
            progress=run.done_steps,
            total_progress=run.length,
            global_batch_size=_within(run),
            local_batch_size=local,
            step_s=step_s,
            sync_s=sync_s,
            grad_sqr=1.0,
            grad_var=family.noise_scale(known.piece) / job.global_batch_size,
        )


def _within(run: FluidRun) -> int:
    bounds = run.job.batch
    return run.batch_size if bounds is None else min(max(run.batch_size, bounds.min_size), bounds.max_size)


def curves_for(
    speeds: TopologySpeeds, requests: Sequence[FapesRequest], most: int
) -> Mapping[tuple[str, int], Mapping[int, float]]:
    """The compact speed curve of every (family, batch) that is requested."""
    pairs = sorted({(request.family, request.batch_size) for request in requests})
    return {(family, batch): speeds.compact_curve(family, batch, most) for family, batch in pairs}
