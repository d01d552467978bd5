"""When the journal gets a snapshot of the state, and which ended workloads leave the state then."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from springtide.control.controller import Controller
from springtide.control.journal.ended import EndedJob, EndedService
from springtide.control.journal.retention import Retention
from springtide.control.records import JobRecord, PlatformState, Record, RecordTable, ServiceRecord
from springtide.control.state_data import PlatformSnapshot, data_of, encode_snapshot
from springtide.core.errors import JournalError, Superseded
from springtide.core.events import Event, JobsArchived, ServicesArchived
from springtide.core.workload import WorkloadId

LOG = logging.getLogger("springtide.journal")
SNAPSHOT_STEPS = 10_000
SNAPSHOT_S = 600.0
# So long a job that has ended and a service that was removed stay in the state.
STAYS_S = 3600.0
_MOST_AT_ONCE = 5_000


class EndedJobsTable(Protocol):
    """Where workloads go that leave the state."""

    def put(self, workloads: Sequence[EndedJob | EndedService]) -> None:
        """Keep these workloads. Raises JournalError, Superseded."""
        ...


class CuttableJournal(Protocol):
    """What a snapshot needs of a journal."""

    @property
    def newest(self) -> tuple[int, bytes]:
        """The place of the newest step."""
        ...

    @property
    def ended(self) -> EndedJobsTable:
        """The workloads that have left the state."""
        ...

    def cut(self, blob: bytes, now_s: float, keep: Retention, at: Callable[[str], None]) -> None:
        """Keep the state after the newest step. Raises JournalError, Superseded."""
        ...


class JournalUpkeep:
    """Adds a snapshot to the journal after so many steps, or after so long if there was one."""

    def __init__(
        self,
        controller: Controller,
        journal: CuttableJournal,
        keep: Retention,
        *,
        kept: Callable[[], Mapping[str, bytes]] = dict,
        kept_of_job: Callable[[WorkloadId], dict[str, bytes]] = lambda job_id: {},
        crash_point: Callable[[str], None] = lambda name: None,
        pace: float = 1.0,
    ) -> None:
        """`kept` returns what readers of the journal keep of its steps, by name, `kept_of_job` that of one workload.

        Tests of faults have all of it happen `pace` times as often.
        """
        self._controller = controller
        self._journal = journal
        self._keep = keep
        self._kept, self._kept_of_job = kept, kept_of_job
        self._crash_point = crash_point
        self._snapshot_s, self._stays_s = SNAPSHOT_S / pace, STAYS_S / pace
        self._seq, self._at_s = 0, 0.0

    def begin(self, seq: int, now_s: float) -> None:
        """The state was recovered from the snapshot of step `seq`; 0: from the first step on."""
        self._seq, self._at_s = seq, now_s

    def due_events(self, now_s: float) -> Sequence[Event]:
        """The workloads that leave the state, if the journal will be cut after this turn. Raises Superseded."""
        if not self._is_due(now_s, num_steps=1):
            return ()
        jobs, services = _leaving(self._controller.state, now_s - self._stays_s)
        if not jobs and not services:
            return ()
        try:
            # Before the step that lets them go: a crash between the two keeps them in both places.
            self._crash_point("archive.put.before")
            ended: list[EndedJob | EndedService] = []
            ended += [EndedJob(record=job, kept=self._kept_of_job(job.workload_id)) for job in jobs]
            ended += [EndedService(record=one, kept=self._kept_of_job(one.workload_id)) for one in services]
            self._journal.ended.put(ended)
            self._crash_point("archive.put.after")
        except Superseded:
            raise
        except JournalError as error:
            LOG.warning("workloads that have ended stay in the state for now: %s", error)
            return ()
        events: list[Event] = []
        if jobs:
            events.append(JobsArchived(job_ids=tuple([job.workload_id for job in jobs])))
        if services:
            events.append(ServicesArchived(service_ids=tuple([service.workload_id for service in services])))
        return events

    def after_turn(self, now_s: float) -> None:
        """Cut the journal if it is time. Raises Superseded."""
        if self._is_due(now_s):
            self.cut(now_s)

    def cut(self, now_s: float) -> None:
        """Cut the journal now, if there was a step since the last time. Raises Superseded."""
        seq = self._journal.newest[0]
        if seq == self._seq:
            return
        # Also after a failure, so that a full disk is not asked at every turn.
        self._seq, self._at_s = seq, now_s
        try:
            snapshot = PlatformSnapshot(state=data_of(self._controller.state), kept=dict(self._kept()))
            self._journal.cut(encode_snapshot(snapshot), now_s, self._keep, self._crash_point)
        except Superseded:
            raise
        except JournalError as error:
            LOG.warning("no snapshot of the state was kept; the next one is due in %.0f s: %s", self._snapshot_s, error)

    def _is_due(self, now_s: float, *, num_steps: int = 0) -> bool:
        """Whether it is time after `num_steps` more steps."""
        new = self._journal.newest[0] + num_steps - self._seq
        return new >= SNAPSHOT_STEPS or (new > 0 and now_s - self._at_s >= self._snapshot_s)


def _leaving(state: PlatformState, until_s: float) -> tuple[list[JobRecord], list[ServiceRecord]]:
    """The jobs that ended and the services that were removed until then, the oldest first."""
    jobs = [job for job in _over(state.jobs) if (job.lifecycle.ended_at_s or 0.0) <= until_s]
    services = [service for service in _over(state.services) if (service.removed_at_s or 0.0) <= until_s]
    return jobs[:_MOST_AT_ONCE], services[:_MOST_AT_ONCE]


def _over(table: RecordTable[Record]) -> list[Record]:
    return [record for workload_id, record in table.items() if workload_id not in table.live]
