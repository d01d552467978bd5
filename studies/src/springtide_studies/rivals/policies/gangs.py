"""The fixed sizes of all jobs against one ledger, for rivals that give a job all the workers it asked for, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from springtide.core.decision import JobView
from springtide.core.workload import JobState
from springtide.scheduling.placement.allocation_ledger import AllocationLedger
from springtide.scheduling.placement.gangs import fixed_size, remaining_s
from springtide.scheduling.placement.placing import held_counts

Wanted = Callable[[JobView], int]


class Gangs:
    """The fixed sizes of all jobs against one ledger, and the two ways to give them devices.

    `wanted` says how many workers an elastic job is to have, within its bounds; by default what its owner asked for.
    """

    def __init__(self, shares: AllocationLedger, wanted: Wanted | None = None) -> None:
        self.shares = shares
        self._wanted = wanted
        self.views = shares.snapshot.jobs
        self.now_s = shares.snapshot.now_s
        self.total = len(shares.snapshot.cluster.device_ids())
        self.held = held_counts(shares.snapshot)

    def size(self, view: JobView) -> int:
        """How many devices the job gets: what is wanted for it, within its bounds and the cluster; 0 if never."""
        return fixed_size(view, self.total, None if self._wanted is None else self._wanted(view))

    def remaining_s(self, view: JobView) -> float:
        """Seconds of work left on its fixed size; infinite while its length or its speed is not known."""
        return remaining_s(view, max(1, self.size(view)), self.now_s, self.held.get(view.job.job_id, 0))

    def keep(self, views: Iterable[JobView]) -> None:
        """A running job goes on at its fixed size; where that has become too much, with what it has."""
        for view in views:
            if not self.give(view) and self.held.get(view.job.job_id):
                self.shares.raise_towards(view.job.job_id, self.held[view.job.job_id])

    def fill(self, views: Iterable[JobView], *, passes_over: bool = True) -> None:
        """Give devices in this order; a job that does not fit is passed over, or blocks those behind it."""
        for view in views:
            if not self.shares.left:
                return
            if not self.give(view) and not passes_over:
                return

    def give(self, view: JobView) -> bool:
        """Give the job its fixed size; after the loss of a device what it still has, if it can run on that."""
        job_id = view.job.job_id
        size = self.size(view)
        if size and self.shares.raise_to(job_id, size):
            return True
        left_over = self.held.get(job_id, 0)
        is_cut_down = view.state is JobState.RUNNING and view.bounds.min_workers <= left_over < size
        return is_cut_down and view.job.elastic and self.shares.raise_to(job_id, left_over)

    def waiting(self) -> list[JobView]:
        """The jobs that have been given nothing although they could run here."""
        return [view for view in self.views if not self.shares.of(view.job.job_id) and self.size(view)]

    def holds(self, view: JobView) -> bool:
        """Whether the job holds devices that it is not just giving back."""
        return bool(self.held.get(view.job.job_id)) and view.state is not JobState.PREEMPTING

    def note_waiting(self, text: Callable[[JobView], str]) -> None:
        """Give a reason to waiting jobs without devices; `text` should vary with the job's standing, not the clock."""
        for view in self.waiting():
            if not self.held.get(view.job.job_id):
                self.shares.notes[view.job.job_id] = text(view)

    def note_stopped(self, text: str) -> None:
        """Give a reason to jobs that lose all they hold; where a service takes it, the reason names the service."""
        services = (view.service.service_id for view in self.shares.snapshot.services)
        if any(self.shares.of(service_id) > self.held.get(service_id, 0) for service_id in services):
            return
        for view in self.views:
            if self.holds(view) and not self.shares.of(view.job.job_id):
                self.shares.notes[view.job.job_id] = text
