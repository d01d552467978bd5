"""The ledger that policies fill: how many devices each workload is to hold, never more than there are."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cached_property

from springtide.core.decision import JobView, Plan, ServiceView, Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.placing import held_counts, place
from springtide.scheduling.replicas import next_idle_at_s, wanted_replicas

# A reason names at most so many other workloads: users read it, and a large platform has thousands.
NUM_NAMED = 4


class AllocationLedger:
    """Counts under construction. Every grant is bounded by what is left."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.left = len(snapshot.cluster.device_ids())
        self.counts: dict[WorkloadId, int] = {}
        self.notes: dict[WorkloadId, str] = {}

    def of(self, workload_id: WorkloadId) -> int:
        """How many devices the workload has been given so far."""
        return self.counts.get(workload_id, 0)

    def raise_to(self, workload_id: WorkloadId, count: int) -> bool:
        """Give devices up to `count` in all; all or nothing. Returns whether the workload now has as many."""
        missing = count - self.of(workload_id)
        if missing > self.left:
            return False
        if missing > 0:
            self.counts[workload_id] = count
            self.left -= missing
        return True

    def raise_towards(self, workload_id: WorkloadId, count: int) -> int:
        """Give devices up to `count`, as far as they go. Returns how many the workload now has."""
        self.raise_to(workload_id, min(count, self.of(workload_id) + self.left))
        return self.of(workload_id)

    def plan(self, revisit_at_s: float | None = None) -> Plan:
        """The plan with the counts placed, and a reason for each workload whose count changes or that has to wait."""
        snapshot = self.snapshot
        idle_at_s = next_idle_at_s(snapshot.services, snapshot.now_s)
        moments = [moment for moment in (revisit_at_s, idle_at_s) if moment is not None]
        return Plan(
            allocations=place(self.counts, snapshot),
            reasons=self._reasons(),
            revisit_at_s=min(moments, default=None),
        )

    def _reasons(self) -> dict[WorkloadId, str]:
        held = held_counts(self.snapshot)
        names = {view.job.job_id: view.job.name for view in self.snapshot.jobs}
        names |= {view.service.service_id: view.service.name for view in self.snapshot.services}
        winners = [name for workload_id, name in names.items() if self.of(workload_id) > held.get(workload_id, 0)]
        reasons: dict[WorkloadId, str] = {}
        changed: dict[WorkloadId, tuple[int, int]] = {}
        for workload_id in names:
            before, after = held.get(workload_id, 0), self.of(workload_id)
            if after == 0 and before == 0:
                reasons[workload_id] = self.notes.get(workload_id) or self._waiting(workload_id)
            elif after != before:
                # A placeholder that keeps the order of arrival; the text is set below.
                reasons[workload_id] = ""
                changed[workload_id] = (before, after)
        most = self._most(changed)
        for workload_id, (before, after) in changed.items():
            note = self.notes.get(workload_id, "")
            if after < before:
                others = _named_others(winners, names[workload_id])
                if most[workload_id] < before:
                    note = note or f"its owner allows {most[workload_id]}"
                reasons[workload_id] = note or (
                    f"{others} needs the devices" if others else self._too_few(workload_id, after)
                )
            else:
                reasons[workload_id] = note or (
                    "idle devices" if before else f"starting on {after} device{'s' if after > 1 else ''}"
                )
        return reasons

    def _too_few(self, workload_id: WorkloadId, count: int) -> str:
        least = self._least.get(workload_id, 1)
        if count or least <= self.left:
            return "fewer devices are left for it"
        return f"needs at least {least} devices, and {self.left} {'is' if self.left == 1 else 'are'} left for it"

    def _most(self, wanted: Container[WorkloadId]) -> dict[WorkloadId, int]:
        most = {v.job.job_id: most_workers(v) for v in self.snapshot.jobs if v.job.job_id in wanted}
        return most | {v.service.service_id: v.max_replicas for v in self.snapshot.services}

    def _waiting(self, workload_id: WorkloadId) -> str:
        total = len(self.snapshot.cluster.device_ids())
        needed = self._least.get(workload_id, 1)
        if needed > total:
            return f"needs at least {needed} devices, the platform has {total}: lower --workers or add devices"
        return f"waiting for {needed} of {total} devices" + (f": {self._holders}" if self._holders else "")

    @cached_property
    def _least(self) -> dict[WorkloadId, int]:
        return {view.job.job_id: view.bounds.min_workers for view in self.snapshot.jobs}

    @cached_property
    def _holders(self) -> str:
        """The first few workloads that get devices, as text; formatted once for all waiting jobs."""
        holders: dict[str, int] = {}
        for view in self.snapshot.jobs:
            if self.of(view.job.job_id):
                holders[view.job.name] = self.of(view.job.job_id)
        for service in self.snapshot.services:
            if self.of(service.service.service_id):
                holders[service.service.name] = self.of(service.service.service_id)
        return ", ".join(f"'{name}' has {count}" for name, count in list(holders.items())[:NUM_NAMED])


def _named_others(names: Sequence[str], name: str) -> str:
    """The first few names other than `name`, quoted, and how many more there are."""
    shown = [other for other in names[: NUM_NAMED + 1] if other != name][:NUM_NAMED]
    num_more = len(names) - len(shown) if len(names) > NUM_NAMED else 0
    return ", ".join(repr(other) for other in shown) + (f" and {num_more} more" if num_more else "")


def serve_minimum(shares: AllocationLedger) -> None:
    """Give every service its guaranteed minimum, and its first replica if there are requests."""
    for view in shares.snapshot.services:
        first = 1 if wanted_replicas(view) else 0
        shares.raise_towards(view.service.service_id, max(view.min_replicas, first))


def serve_demand(shares: AllocationLedger) -> None:
    """Give every service as many replicas as its load asks for."""
    for view in shares.snapshot.services:
        wanted = wanted_replicas(view)
        got = shares.raise_towards(view.service.service_id, wanted)
        shares.notes[view.service.service_id] = _load_note(view, wanted, got)


def _load_note(view: ServiceView, wanted: int, got: int) -> str:
    if view.in_flight + view.queued == 0:
        if view.num_ready + view.num_starting < got <= view.min_replicas:
            return f"its guaranteed minimum is {view.min_replicas}"
        return f"nobody has asked for {view.idle_s:.0f} s"
    load = f"{view.in_flight} in flight, {view.queued} queued"
    return f"its load asks for {wanted} ({load})" + (f", only {got} fits" if got < wanted else "")


def most_workers(view: JobView) -> int:
    """How many workers the job can use at all."""
    return min(view.bounds.max_workers, view.job.num_virtual_shards) if view.job.elastic else view.bounds.max_workers
