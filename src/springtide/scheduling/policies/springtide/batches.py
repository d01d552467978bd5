"""Jobs that may change their batch: what is known of their families, the speeds promises rest on, and their batches."""

from __future__ import annotations

from collections.abc import Container

import msgspec

from springtide.core.decision import PoolAllocation, Snapshot
from springtide.core.workload import WorkloadId
from springtide.perf.curve import curve_of
from springtide.scheduling.families.candidates import JobCandidates, read_rows
from springtide.scheduling.families.learning import FamilyMemory
from springtide.scheduling.policies.springtide.memory import State
from springtide.scheduling.policies.springtide.moves import Placed
from springtide.scheduling.policies.springtide.rows import SURE_FRACTION, PromiseRow, kept_devices


class AdaptiveBatches:
    """What one decision knows of the jobs that may change their batch. It learns what they have measured.

    `candidates` are the sizes of each of them at the batch that is best for it now. A job that has a profile is
    believed by that, at its own batch, until its family is measured.
    """

    def __init__(self, memory: FamilyMemory, state: State, snapshot: Snapshot) -> None:
        self._memory, self._state, self._snapshot = memory, state, snapshot
        self.candidates: dict[WorkloadId, JobCandidates] = {}
        views = [view for view in snapshot.jobs if view.job.batch is not None]
        families = memory.learn(state.families, views, snapshot.now_s)
        state.families = memory.write(families, views) if families else None
        if state.families is not None:
            memory.keep(state.families, families)
        capacity = len(snapshot.cluster.device_ids())
        speeds = memory.speeds(views, snapshot, families, capacity)
        views = [view for view in views if memory.key_of(view.job) in speeds or curve_of(view).source != "profile"]
        held = {
            who: kept_devices(given.device_ids, state.devices.get(who)) for who, given in snapshot.allocations.items()
        }
        rows = read_rows(views, snapshot, held, memory.key_of, families, speeds, capacity)
        self.candidates = {row.job_id: row for row in rows}

    def plan_on_family(self, row: PromiseRow) -> None:
        """Plan a job with a hard deadline on the speeds of its family, if they are measured: those of the one batch
        that is best for all that is left, less a margin, and on no more devices than any job of it has run on."""
        known, total = self.candidates.get(row.job_id), row.total
        if known is None or known.pace is None or total is None or not row.view.job.goal.is_hard:
            return
        most = max(sum(step.placement) for step in known.pace.family.steps)
        rates = known.pace.rates_of_one_batch(row.done, total) * SURE_FRACTION
        sizes = {n for n in known.sizes.tolist() if row.view.bounds.min_workers <= n <= most}
        pairs = zip(known.pace.sizes.tolist(), rates.tolist(), strict=True)
        if not sizes and row.job_id in self._state.sure:
            # Its owner has changed its bounds since it was promised: it has to run somewhere within them.
            sizes = {int(known.sizes[0])}
        found = {n: rate for n, rate in pairs if n in sizes and rate > 0.0}
        if found:
            self._state.sure[row.job_id] = found
            row.plan_on(found)

    def set_batches(self, placed: Placed, reserved: Container[str]) -> dict[WorkloadId, int]:
        """Set the batch of each of these jobs in `placed`; returns them. One in the reservation table whose family is
        not measured keeps its own."""
        batches: dict[WorkloadId, int] = {}
        node_of = self._snapshot.cluster.node_of
        for job_id, row in self.candidates.items():
            given = placed.get(job_id)
            if given is None or (row.pace is None and job_id in reserved):
                continue
            size = row.batch_on(len({node_of[device] for device in given.device_ids}), given.num_devices)
            batches[job_id] = size
            placed[job_id] = _with_batch(given, size, self._snapshot.allocations.get(job_id))
        return batches


def _with_batch(given: PoolAllocation, size: int, held: PoolAllocation | None) -> PoolAllocation:
    """The allocation with this batch: what the job holds, if that is the same."""
    if held is not None and held.device_ids == given.device_ids and held.global_batch_size == size:
        return held
    return msgspec.structs.replace(given, global_batch_size=size)
