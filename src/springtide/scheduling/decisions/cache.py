"""What one policy derived from the snapshots that it was shown, kept outside of it: decisions are the same without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from springtide.core.decision import JobView, Plan, Policy, Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.fingerprint import RowChanges


@runtime_checkable
class CacheablePolicy(Protocol):
    """A policy that decides faster with what it derived before. It stays a value: `decide` writes only to `derived`."""

    def make_derived(self) -> Any:
        """An object to keep derived values in, still empty."""
        ...

    def decide(self, snapshot: Snapshot, derived: Any = None) -> Plan:
        """Return the plan for this snapshot; `derived` saves time and never changes the plan."""
        ...


class DecisionCache:
    """A policy with what it has derived so far.

    Each repeated caller of a policy holds one: the Controller, each forecast, each quote. They are not shared, so
    that a hypothetical question never touches the real decisions.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._cacheable = policy if isinstance(policy, CacheablePolicy) else None
        self._derived: Any = None

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the policy's plan for this snapshot."""
        if self._cacheable is None:
            return self._policy.decide(snapshot)
        # A decision that fails may leave derived values half written: they are dropped then.
        derived, self._derived = self._derived, None
        if derived is None:
            derived = self._cacheable.make_derived()
        plan = self._cacheable.decide(snapshot, derived)
        self._derived = derived
        return plan


class JobRow(Protocol):
    """What a policy derived from the view of one job."""

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

    `rows` are in the snapshot's order, `fresh` those that the last reading made, `gone` those it dropped. `make` gets
    the view and the row that the job had.
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
            places = [at for at, (view, old) in enumerate(zip(views, before, strict=True)) if view is not old]
            if all(views[at].job.job_id == before[at].job.job_id for at in places):
                self.fresh = self._replace(places)
                return self.rows
        self._read_all()
        return self.rows

    @property
    def changes(self) -> RowChanges:
        """What the last reading changed."""
        return RowChanges(self.fresh, self.gone)

    def _replace(self, places: list[int]) -> list[Row]:
        """Make the rows at these places anew; the jobs are the same."""
        fresh = [self._make(self._views[at], self.rows[at]) for at in places]
        if fresh:
            self.rows = list(self.rows)
            for at, row in zip(places, fresh, strict=True):
                self.rows[at] = self.by_id[row.job_id] = row
        return fresh

    def _read_all(self) -> None:
        by_id = self.by_id
        self.rows, self.fresh = [], []
        for view in self._views:
            row = by_id.get(view.job.job_id)
            if row is None or row.view is not view:
                row = by_id[view.job.job_id] = self._make(view, row)
                self.fresh.append(row)
            self.rows.append(row)
        if len(by_id) > len(self.rows):
            self.by_id = {row.job_id: row for row in self.rows}
            self.gone = [row for job_id, row in by_id.items() if job_id not in self.by_id]
