"""Keeps what a policy derived from earlier snapshots, outside of it, to save time: decisions are the same without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from springtide.core.decision import JobView, Plan, Policy, Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.fingerprint import RowChanges
from springtide.scheduling.placement.room import RoomFitter
from springtide.scheduling.placement.workers import whole_workers


@runtime_checkable
class CacheablePolicy(Protocol):
    """A policy that decides faster with derived values. It stays a value itself: `decide` writes only to `derived`."""

    def make_derived(self) -> Any:
        """An object to keep derived values in, still empty."""
        ...

    def decide(self, snapshot: Snapshot, derived: Any = None) -> Plan:
        """Return the plan for this snapshot; `derived` saves time and never changes the plan."""
        ...


class DecisionCache:
    """A policy with what it has derived so far.

    Each repeated caller of a policy has one of its own: the Controller, each forecast, each quote. They are not shared,
    so that a hypothetical decision never affects the real ones.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._cacheable = policy if isinstance(policy, CacheablePolicy) else None
        self._derived: Any = None
        self._room = RoomFitter()

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the policy's plan for this snapshot, of whole workers, within the room that nodes have."""
        if not snapshot.cluster.has_rooms:
            return self._ask_for_whole_workers(snapshot)
        return self._room.decide(self._ask_for_whole_workers, snapshot)

    def _ask_for_whole_workers(self, snapshot: Snapshot) -> Plan:
        if max([view.job.devices_each for view in snapshot.jobs], default=1) == 1:
            return self._ask(snapshot)
        return whole_workers(self._ask, snapshot)

    def _ask(self, snapshot: Snapshot) -> Plan:
        if self._cacheable is None:
            return self._policy.decide(snapshot)
        # A decision that fails may leave derived values half written, so they are taken out for the call.
        derived, self._derived = self._derived, None
        if derived is None:
            derived = self._cacheable.make_derived()
        plan = self._cacheable.decide(snapshot, derived)
        self._derived = derived
        return plan

    def forget(self) -> None:
        """Drop what was derived. The next plan is the same, and takes longer."""
        self._derived = None
        self._room = RoomFitter()


class JobRow(Protocol):
    """The values that a policy derived from the view of one job."""

    @property
    def job_id(self) -> WorkloadId:
        """The job."""
        ...

    @property
    def view(self) -> JobView:
        """The view that the row was made from."""
        ...


Row = TypeVar("Row", bound=JobRow)


class RowTable(Generic[Row]):
    """One row for each job of the last snapshot, made anew only for jobs whose view is another object.

    `rows` and `by_id` are in the snapshot's order, whatever was read before: a decision that is made anew by a fresh
    table has to come to the same. `fresh` are those made by the last `read`, `gone` those it dropped. `make` gets the
    view and the previous row of the job.
    """

    def __init__(self, make: Callable[[JobView, Row | None], Row]) -> None:
        self._make = make
        self._views: tuple[JobView, ...] = ()
        self.by_id: dict[WorkloadId, Row] = {}
        self.rows: list[Row] = []
        self.fresh: list[Row] = []
        self.gone: list[Row] = []

    def read(self, snapshot: Snapshot) -> list[Row]:
        """The rows of the snapshot. The list is not to be changed."""
        views, before = snapshot.jobs, self._views
        self._views, self.gone = views, []
        if views is before:
            self.fresh = []
            return self.rows
        if len(views) == len(before):
            indices = [index for index, (view, old) in enumerate(zip(views, before, strict=True)) if view is not old]
            if all(views[index].job.job_id == before[index].job.job_id for index in indices):
                self.fresh = self._replace(indices)
                return self.rows
        self._read_all()
        return self.rows

    @property
    def changes(self) -> RowChanges:
        """The rows that the last `read` made and dropped."""
        return RowChanges(self.fresh, self.gone)

    def _replace(self, indices: list[int]) -> list[Row]:
        """Make the rows at these indices anew; the jobs are the same."""
        fresh = [self._make(self._views[index], self.rows[index]) for index in indices]
        if fresh:
            self.rows = list(self.rows)
            for index, row in zip(indices, fresh, strict=True):
                self.rows[index] = self.by_id[row.job_id] = row
        return fresh

    def _read_all(self) -> None:
        before, self.by_id = self.by_id, {}
        self.rows, self.fresh = [], []
        for view in self._views:
            row = before.get(view.job.job_id)
            if row is None or row.view is not view:
                row = self._make(view, row)
                self.fresh.append(row)
            self.by_id[view.job.job_id] = row
            self.rows.append(row)
        self.gone = [row for job_id, row in before.items() if job_id not in self.by_id]
