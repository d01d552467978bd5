"""Values of secrets stay on disk for as long as a worker may still be started with them, and no longer."""

from __future__ import annotations

import logging
import math
from typing import Any

from springtide.control.records import ServiceRecord
from springtide.control.releases.steps import newest_of
from springtide.core.actions import EndJob
from springtide.core.events import CancelRequested, ReplicaReady, RevisionJudged, ServiceDeployed
from springtide.core.ports import Step
from springtide.core.workload import WorkloadId
from springtide.service.lookup import job_of_id, service_of_id
from springtide.service.ports import PlatformLike, ViewLike
from springtide.storage.secrets import folders_with_secrets, remove_secrets

LOG = logging.getLogger("springtide.secrets")
# Those of a deployment are on disk before it is in the journal.
_COMING_S = 60.0


class SecretsKeeper:
    """Removes the values of jobs that have ended, of services that were removed, and of revisions that are replaced.

    Create it before the platform starts, because it subscribes to the platform's steps.
    """

    def __init__(self, platform: PlatformLike) -> None:
        self._platform = platform
        platform.subscribe(self._on_step)

    def sweep(self) -> None:
        """Remove what an earlier control plane has left. Call it before requests are taken in."""
        view = self._platform.view()
        for work_dir in folders_with_secrets(self._platform.workload_dir(WorkloadId("x")).parent):
            workload_id = WorkloadId(work_dir.name)
            job, service = job_of_id(view, workload_id), service_of_id(view, workload_id)
            if service is not None:
                self._review(service)
            elif job is None or job.lifecycle.state.is_terminal:
                self._remove(workload_id)

    def _on_step(self, seq: int, step: Step, view: Any) -> None:
        for action in step.actions:
            if isinstance(action, EndJob):
                self._remove(action.job_id)
        if view.seq < seq:
            # A step that is replayed at the start: the view says nothing of that time, and `sweep` comes.
            return
        for event in step.events:
            if isinstance(event, ServiceDeployed):
                self._review_by_id(event.service.service_id, view)
            elif isinstance(event, RevisionJudged):
                self._review_by_id(event.service_id, view)
            elif isinstance(event, CancelRequested | ReplicaReady):
                self._review_by_id(event.workload_id, view)

    def _review_by_id(self, workload_id: WorkloadId, view: ViewLike) -> None:
        record = view.services.get(workload_id)
        if record is not None and (record.service.secrets is not None or record.proven is not None):
            self._review(record)

    def _review(self, record: ServiceRecord) -> None:
        """Keep what the newest revision needs, and the one that stands in for it if that one does not get ready."""
        versions = (newest_of(record), record.service, record.proven)
        kept = [each.secrets.reference for each in versions if each and each.secrets]
        self._remove(record.workload_id, [] if record.is_removed else kept, 0.0 if record.is_removed else _COMING_S)

    def _remove(self, workload_id: WorkloadId, keep: list[str] | None = None, older_than_s: float = 0.0) -> None:
        try:
            now_unix_s = self._platform.now_s() + self._platform.wall_clock_offset_s
            before_unix_s = now_unix_s - older_than_s if older_than_s else math.inf
            remove_secrets(self._platform.workload_dir(workload_id), keep or (), before_unix_s)
        except OSError as error:
            LOG.warning("the secrets of %s cannot be removed: %s", workload_id, error)
