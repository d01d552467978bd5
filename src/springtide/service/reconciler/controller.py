"""The controller of TrainingFunctions and InferenceFunctions: brings the platform to what the objects specify.

It also writes their status. `kubectl apply`, `springtide run --on k8s` and the REST API use the same submissions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from springtide.backends.kubernetes.client.kinds import (
    INFERENCE_FUNCTION,
    TRAINING_FUNCTION,
    Key,
    Object,
    key_of,
    uid_of,
)
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.resources.client import Objects
from springtide.backends.kubernetes.resources.from_object import workload_name
from springtide.backends.kubernetes.resources.status import Condition
from springtide.backends.kubernetes.resources.status_schema import Reason
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.control.records import JobRecord, ServiceRecord
from springtide.core.containers import ContainerSettings
from springtide.core.errors import SpringtideError
from springtide.core.ports import Step
from springtide.core.status.pods import ClusterStatus
from springtide.core.workload import WorkloadId
from springtide.service.logs.upload import LogUploader
from springtide.service.lookup import job_of_id
from springtide.service.ports import PlatformLike
from springtide.service.reconciler.admission import ResourceAdmission
from springtide.service.reconciler.events import EventPublisher, changed_workloads, owner_of, progressed_workloads
from springtide.service.reconciler.expiry import Expiry
from springtide.service.reconciler.jobs import JobReconciler, refusal_of
from springtide.service.reconciler.orphans import OrphanCollector
from springtide.service.reconciler.services import ServiceObjects
from springtide.service.reconciler.status import StatusWriter
from springtide.service.reconciler.submission import ResourceSubmission
from springtide.service.submission.submission import SubmissionService

LOG = logging.getLogger("springtide.objects")
# All objects are compared this often, even without events.
RESYNC_S = 30.0
# Events within GATHER_S are handled in one round; without events there is a round every LOOK_S.
GATHER_S = 0.1
LOOK_S = 1.0
# How many jobs are submitted in parallel: each submission waits for the API server and for the journal.
MAX_PARALLEL_SUBMISSIONS = 16
# How many jobs are submitted in one round.
MAX_SUBMITTED_PER_ROUND = 128
# These refusals can end without an event of the object, so the object is tried again in every round.
_RETRIED = frozenset({Reason.NAME_TAKEN, Reason.PLATFORM_UNAVAILABLE})

ObjectRef = tuple[str, Key]


class ResourceReconciler:
    """One thread that compares objects with workloads; `submissions` are the ones that the REST API uses.

    Create it before the platform starts, because it subscribes to the platform's steps, call `start` afterwards and
    `stop` before the API thread closes. It runs only in the leading control plane.
    """

    def __init__(
        self,
        platform: PlatformLike,
        api_thread: ApiThread,
        settings: KubernetesSettings,
        *,
        cluster_status: Callable[[], ClusterStatus] = ClusterStatus,
        quota_caps: Callable[[], Mapping[WorkloadId, int]] = dict,
        base_url: str = "",
    ) -> None:
        self._platform = platform
        self.objects = objects = Objects(api_thread, settings.namespaces, settings.name)
        submissions = SubmissionService(platform)
        admission = ResourceAdmission(submissions, platform, objects, settings)
        self.submissions = ResourceSubmission(platform, submissions, admission, objects, settings)
        self._admission = admission
        self._jobs = JobReconciler(platform, objects, admission, submissions, quota_caps)
        self._services = ServiceObjects(platform, objects, admission, submissions)
        url = base_url or f"http://{settings.advertise}:{settings.port}"
        self._statuses = StatusWriter(
            platform, objects, settings.name, url, cluster_status, usual_ttl_s=settings.finished_ttl_s
        )
        self._expiry = Expiry(platform, objects, settings.name, settings.finished_ttl_s)
        self._orphans = OrphanCollector(platform, objects, settings.finished_ttl_s)
        self._uploader = LogUploader(platform)
        self._events = EventPublisher(settings.name, platform.wall_clock_offset_s, objects.tell_event)
        self._changed = threading.Condition()
        self._changed_objects: dict[ObjectRef, None] = {}
        self._updated: set[WorkloadId] = set()
        self._progressed: set[WorkloadId] = set()
        self._is_over = False
        self._conditions: dict[str, list[Condition]] = {}
        # By uid: the generation of the object of which the conditions tell.
        self._compared: dict[str, int] = {}
        # The job of each object, by the object's uid, as of the view with this number.
        self._ids: dict[str, WorkloadId] = {}
        self._seq = -1
        # For each object without a job in the view, the job that has left the platform's state, if there is one.
        self._ended: dict[str, JobRecord | None] = {}
        self._unfinished: dict[ObjectRef, None] = {}
        self._pool = ThreadPoolExecutor(MAX_PARALLEL_SUBMISSIONS, thread_name_prefix="springtide-admission")
        self._thread = threading.Thread(target=self._main, name="springtide-objects", daemon=True)
        platform.subscribe(self._on_step)
        platform.follow("history", self._events.take)

    def start(self) -> None:
        """Watch the objects and start the thread."""
        self._events.begin(self._platform.now_s())
        self.objects.open(self._on_object)
        self._thread.start()
        self._uploader.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread and submit nothing more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._expiry.close()
        self._orphans.close()
        self._uploader.stop(timeout_s)

    # --- called on other threads -----------------------------------------------------------------------------------

    def _on_object(self, kind: str, key: Key) -> None:
        with self._changed:
            self._changed_objects[kind, key] = None
            self._changed.notify_all()

    def _on_step(self, seq: int, step: Step, view: Any) -> None:
        self._events.add(seq, step)
        with self._changed:
            self._updated |= changed_workloads(step)
            self._progressed |= progressed_workloads(step)
            if self._updated:
                self._changed.notify_all()

    # --- its own thread ---------------------------------------------------------------------------------------------

    def _main(self) -> None:
        resynced_s = float("-inf")
        while True:
            with self._changed:
                if not (self._changed_objects or self._updated or self._is_over):
                    self._changed.wait(LOOK_S)
                if self._is_over:
                    return
            time.sleep(GATHER_S)
            if not self.objects.is_synced:
                # The list is incomplete: an object that is missing from it may still exist.
                continue
            is_due = time.monotonic() - resynced_s >= RESYNC_S
            if is_due:
                resynced_s = time.monotonic()
            try:
                self.round(is_due=is_due)
            except SpringtideError as error:
                LOG.warning("objects wait: %s", error)
            except Exception:
                LOG.exception("a round over the objects failed")

    def round(self, *, is_due: bool) -> None:
        """Compare the objects that changed or whose workloads did; with `is_due` compare all objects."""
        with self._changed:
            changed_objects, self._changed_objects = self._changed_objects, {}
            updated, self._updated = self._updated, set()
            progressed, self._progressed = self._progressed, set()
        # A deleted or recreated object leaves the workload of the old one behind; a changed object does not.
        has_other_objects = any(
            (obj := self.objects.get(*ref)) is None or uid_of(obj) not in self._ids for ref in changed_objects
        )
        updated |= self._statuses.update_pods()
        refs = self._unfinished | changed_objects | {ref: None for name in updated if (ref := self._ref_of(name))}
        self._unfinished = {}
        refs |= {(TRAINING_FUNCTION.name, key): None for key in self._expiry.due()}
        if is_due:
            everything = [*self.objects.all(TRAINING_FUNCTION.name), *self.objects.all(INFERENCE_FUNCTION.name)]
            self._forget_all_but({uid_of(obj) for obj in everything})
            refs |= {(obj["kind"], key_of(obj)): None for obj in everything}
        self._submit_new(list(refs), is_due=is_due)
        for ref in refs:
            if self._is_over:
                return
            self._guarded(self._compare, ref, is_due)
        for name in progressed - updated:
            own_ref = self._ref_of(name)
            if own_ref is not None and own_ref not in refs:
                self._guarded(self._write_progress, own_ref, name)
        if is_due or has_other_objects:
            self._end_orphans()
        self._events.publish(self._platform.view())

    def _guarded(self, handle: Callable[..., None], ref: ObjectRef, *more: Any) -> None:
        """Handle one object; an error is logged, so that the others are still handled."""
        try:
            handle(ref, *more)
        except SpringtideError as error:
            self._unfinished[ref] = None
            LOG.warning("%s %s/%s waits: %s", ref[0], *ref[1], error)
        except Exception:
            LOG.exception("%s %s/%s could not be compared", ref[0], *ref[1])

    def _submit_new(self, refs: list[ObjectRef], *, is_due: bool) -> None:
        """Submit the new jobs in parallel, so that one turn of the loop handles many of them."""
        waiting: list[Object] = []

        def gather(ref: ObjectRef) -> None:
            if (obj := self._unsubmitted(ref, is_due)) is not None:
                waiting.append(obj)

        for ref in refs:
            self._guarded(gather, ref)
        # The rest waits for the next rounds, so that the status of the submitted ones is written in between.
        self._unfinished |= {(obj["kind"], key_of(obj)): None for obj in waiting[MAX_SUBMITTED_PER_ROUND:]}
        if waiting and not self._is_over:
            list(self._pool.map(self._submit_one, waiting[:MAX_SUBMITTED_PER_ROUND]))

    def _unsubmitted(self, ref: ObjectRef, is_due: bool) -> Object | None:
        """The TrainingFunction of that name, if it has no job and its submission should be tried."""
        kind, key = ref
        obj = self.objects.get(kind, key) if kind == TRAINING_FUNCTION.name else None
        if obj is None or self._job_of(obj) is not None:
            return None
        generation = obj["metadata"].get("generation", 1)
        known = self._conditions.get(uid_of(obj), [])
        is_answered = bool(known) and obj.get("status", {}).get("observedGeneration") == generation
        # An object that was refused is tried again when it changes, and in rounds with `is_due`.
        return None if is_answered and known[0].reason not in _RETRIED and not is_due else obj

    def _submit_one(self, obj: Object) -> None:
        try:
            _, refused = self._jobs.submit(obj)
        except SpringtideError as error:
            refused = refusal_of(error)
        if refused is not None:
            self._conditions[uid_of(obj)] = [refused]

    def _compare(self, ref: ObjectRef, is_due: bool) -> None:
        kind, key = ref
        obj = self.objects.get(kind, key)
        if obj is None:
            return
        uid = uid_of(obj)
        if kind == INFERENCE_FUNCTION.name:
            _, self._conditions[uid] = self._services.compare(obj, is_due=is_due)
        else:
            job = self._job_of(obj)
            if job is not None:
                self._orphans.remember_ttl(obj)
                expired = self._expiry.check(obj, job)
                self._conditions[uid] = [self._jobs.compare(obj, job), *((expired,) if expired else ())]
        if any(each.reason in _RETRIED for each in self._conditions.get(uid, ())):
            self._unfinished[ref] = None
        self._compared[uid] = obj["metadata"].get("generation", 1)
        self._write_status(kind, obj)

    def _write_progress(self, ref: ObjectRef, name: WorkloadId) -> None:
        """Write the status for progress alone, or postpone that if it was written recently."""
        obj = self.objects.get(*ref)
        if obj is None or self._compared.get(uid_of(obj)) != obj["metadata"].get("generation", 1):
            # It has changed, and is compared in the next round: what is known is about what it said before.
            return
        if self._statuses.is_due(uid_of(obj)):
            self._write_status(ref[0], obj)
        else:
            with self._changed:
                self._progressed.add(name)

    def _write_status(self, kind: str, obj: Object) -> None:
        conditions = self._conditions.get(uid_of(obj), [])
        if kind == TRAINING_FUNCTION.name:
            job = self._job_of(obj)
            if job is not None:
                if not self._statuses.write_job(obj, job, conditions):
                    self._write_later(job.workload_id)
                return
        else:
            service = self._platform.view().services.get(WorkloadId(workload_name(obj)))
            if service is not None and not service.is_removed and _is_of(service.service.container, obj):
                if not self._statuses.write_service(obj, service, conditions):
                    self._write_later(service.workload_id)
                return
        if conditions:
            self._statuses.write_refused(obj, conditions)

    def _write_later(self, name: WorkloadId) -> None:
        with self._changed:
            self._progressed.add(name)

    def _end_orphans(self) -> None:
        """End the workloads whose objects are gone. The cache gives the candidates; the API server confirms each."""
        view = self._platform.view()
        uids = {uid_of(obj) for kind in (TRAINING_FUNCTION, INFERENCE_FUNCTION) for obj in self.objects.all(kind.name)}
        left = [job_id for job_id, uid in view.ended.owned() if uid not in uids and self._orphans.is_due(job_id)]
        ended = [job for job_id in left if job_id not in view.jobs and (job := job_of_id(view, job_id)) is not None]
        for job in [*view.jobs.values(), *ended]:
            container = job.job.container
            if container is None or not self._is_orphan(container, uids):
                continue
            if job.lifecycle.state.is_terminal:
                self._orphans.check(job)
            else:
                self._end(self._jobs.end_orphan, job)
        for service in list(view.services.values()):
            container = service.service.container
            if container is not None and not service.is_removed and self._is_orphan(container, uids):
                self._end(self._services.end_orphan, service)

    def _is_orphan(self, container: ContainerSettings, uids: set[str]) -> bool:
        is_owned = bool(container.owner_uid) and self.objects.watches(container.namespace)
        return is_owned and container.owner_uid not in uids

    def _end(self, end: Callable[[Any], None], record: JobRecord | ServiceRecord) -> None:
        try:
            end(record)
        except SpringtideError as error:
            LOG.warning("%s, whose object is gone, goes on for now: %s", record.workload_id, error)

    def _job_of(self, obj: Object) -> JobRecord | None:
        """The job of an object, also one that has left the platform's state; None if it has none.

        Raises JournalError.
        """
        uid, view = uid_of(obj), self._platform.view()
        if view.seq != self._seq:
            self._seq = view.seq
            owned = ((job.job.container, job.workload_id) for job in view.jobs.values())
            self._ids |= {container.owner_uid: job_id for container, job_id in owned if container is not None}
        workload_id = self._ids.get(uid)
        if workload_id is not None and (record := view.jobs.get(workload_id)) is not None:
            return record
        # Asked once for an object that is new.
        if self._ended.get(uid) is None and (workload_id is not None or uid not in self._ended):
            ended = self._ended[uid] = view.ended.of_owner(uid)
            if ended is not None:
                self._ids[uid] = ended.workload_id
        return self._ended[uid]

    def _ref_of(self, workload_id: WorkloadId) -> ObjectRef | None:
        """Kind and key of a workload's object; None if it has none."""
        owner = owner_of(self._platform.view(), workload_id)
        return None if owner is None else (owner.owner_kind, Key(owner.namespace, owner.owner_name))

    def _forget_all_but(self, uids: set[str]) -> None:
        self._statuses.forget(uids)
        self._services.forget(uids)
        self._expiry.forget(uids)
        self._conditions = {uid: known for uid, known in self._conditions.items() if uid in uids}
        self._ended = {uid: job for uid, job in self._ended.items() if uid in uids}
        self._ids, self._seq = {uid: job_id for uid, job_id in self._ids.items() if uid in uids}, -1
        self._compared = {uid: known for uid, known in self._compared.items() if uid in uids}


def _is_of(container: ContainerSettings | None, obj: Object) -> bool:
    return container is not None and container.owner_uid == uid_of(obj)
