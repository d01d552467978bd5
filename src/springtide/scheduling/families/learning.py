"""What a policy learns of families of jobs, in plain values for its memory, and the speeds that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from springtide.core.decision import JobView, Snapshot
from springtide.core.workload import TrainingJob, WorkloadId
from springtide.scheduling.families.candidates import size_grid
from springtide.scheduling.families.family import FamilySpeed, JobFamily, family_key, read_family, write_family
from springtide.scheduling.placement.allocation_ledger import most_workers

# How many families are remembered after all of their jobs have ended.
NUM_FAMILIES = 32


class FamilyMemory:
    """The families in a policy's memory and their speeds, derived once and kept for the next decision.

    The plain values are `{"families": {key: ..}, "jobs": {job id: [key, progress]}}`. With `learns` False each job is a
    family of its own; with `adapts` False its batch does not change.
    """

    def __init__(self, *, learns: bool = True, adapts: bool = True) -> None:
        self._learns, self._adapts = learns, adapts
        self._kept: Mapping[str, Any] | None = None
        self._families: dict[str, JobFamily] = {}
        self._speeds: dict[str, FamilySpeed] = {}
        self._keys: dict[WorkloadId, tuple[TrainingJob, str]] = {}

    def key_of(self, job: TrainingJob) -> str:
        """The key of a job's family."""
        known = self._keys.get(job.job_id)
        if known is None or known[0] is not job:
            known = self._keys[job.job_id] = (job, family_key(job, alone=not self._learns))
        return known[1]

    def read(self, kept: Mapping[str, Any] | None) -> dict[str, JobFamily]:
        """The families in these plain values."""
        if kept is None:
            return {}
        if self._kept is not kept:
            self._families = {key: read_family(values) for key, values in kept["families"].items()}
            self._kept = kept
        return dict(self._families)

    def write(self, families: dict[str, JobFamily], views: Sequence[JobView]) -> dict[str, Any]:
        """The plain values of these families, and of which one each job is."""
        return {
            "families": {key: write_family(family) for key, family in families.items()},
            "jobs": {view.job.job_id: [self.key_of(view.job), view.equivalent_steps] for view in views},
        }

    def keep(self, kept: Mapping[str, Any], families: dict[str, JobFamily]) -> None:
        """Keep the families that these plain values were written from."""
        self._kept, self._families = kept, families

    def learn(self, kept: Mapping[str, Any] | None, views: Sequence[JobView], now_s: float) -> dict[str, JobFamily]:
        """The families with the new measurements of these jobs, and the lengths of those that have left."""
        families = self.read(kept)
        live = {view.job.job_id for view in views}
        self._keys = {job_id: known for job_id, known in self._keys.items() if job_id in live}
        for job_id, (key, progress) in (kept["jobs"] if kept is not None else {}).items():
            if job_id not in live and key in families and progress > 0.0:
                families[key] = families[key].with_length(progress)
        used: dict[str, None] = {}
        for view in views:
            key = self.key_of(view.job)
            used[key] = None
            if view.learnt.step_times:
                families[key] = families.get(key, JobFamily()).with_view(view, now_s)
        named = [key for key in families if key not in used and not key.startswith("#")]
        named.sort(key=lambda key: (-families[key].used_s, key))
        remembered = {*used, *named[:NUM_FAMILIES]}
        return {key: family for key, family in families.items() if key in remembered}

    def speeds(
        self, views: Sequence[JobView], snapshot: Snapshot, families: Mapping[str, JobFamily], capacity: int
    ) -> dict[str, FamilySpeed]:
        """The speeds of the measured families of these jobs, computed anew only after new measurements."""
        wanted: dict[str, set[int]] = {}
        job_of: dict[str, TrainingJob] = {}
        for view in views:
            key = self.key_of(view.job)
            if key not in families or not families[key].steps:
                continue
            most = min(most_workers(view), capacity)
            wanted.setdefault(key, set()).update(
                (*size_grid(most), view.bounds.min_workers, max(most, 1), view.num_replicas)
            )
            job_of[key] = view.job
        per_node = max((len(node.devices) for node in snapshot.cluster.nodes), default=1)
        return {
            key: self._speed(key, families[key], sorted(sizes - {0}), per_node, job_of[key])
            for key, sizes in wanted.items()
        }

    def _speed(self, key: str, family: JobFamily, sizes: Sequence[int], per_node: int, job: TrainingJob) -> FamilySpeed:
        known = self._speeds.get(key)
        if (
            known is None
            or known.family.steps != family.steps
            or known.sizes.tolist() != list(sizes)
            or known.devices_per_node != per_node
        ):
            known = FamilySpeed(family, sizes, per_node, job, adapts=self._adapts)
        elif known.family != family:
            known = known.with_family(family)
        self._speeds[key] = known
        return known
