"""The controller of TrainingFunctions and InferenceFunctions: carries out what the cluster's objects say.

It writes their status, too. `kubectl apply`, `springtide run --on k8s` and the REST API lead to the same submissions.
"""

from __future__ import annotations

import itertools
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
from springtide.service.ports import PlatformLike
from springtide.service.reconciler.admission import ResourceAdmission
from springtide.service.reconciler.events import EventTeller, loud_news, owner_of, quiet_news
from springtide.service.reconciler.expiry import Expiry
from springtide.service.reconciler.jobs import JobReconciler, refusal_of
from springtide.service.reconciler.orphans import OrphanCollector
from springtide.service.reconciler.services import ServiceObjects
from springtide.service.reconciler.status import StatusTeller
from springtide.service.reconciler.submission import ResourceSubmission
from springtide.service.submission.submission import SubmissionService

LOG = logging.getLogger("springtide.objects")
# Every object is compared this often, with or without events of it.
RESYNC_S = 30.0
# News of a moment are taken together; without any it looks around this often.
GATHER_S = 0.1
LOOK_S = 1.0
# How many objects are taken in at once: each waits for the server, and for the journal.
MAX_ADMISSIONS = 16
# And how many in one round.
MOST_AT_ONCE = 128
# No event of its own object tells when a wanted address becomes free, or when the platform works again.
_ASKED_AGAIN = frozenset({Reason.NAME_TAKEN, Reason.PLATFORM_UNAVAILABLE})

Place = tuple[str, Key]


class ResourceReconciler:
    """One thread that compares objects with workloads, and the submissions of the REST API.

    `submissions` goes to the API. Make it before the platform starts (it subscribes to its steps), `start` it after,
    `stop` it before the API thread closes. Only the leader's runs.
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
        self._statuses = StatusTeller(
            platform, objects, settings.name, url, cluster_status, usual_ttl_s=settings.finished_ttl_s
        )
        self._expiry = Expiry(platform, objects, settings.name, settings.finished_ttl_s)
        self._orphans = OrphanCollector(platform, objects, settings.finished_ttl_s)
        self._uploader = LogUploader(platform)
        self._events = EventTeller(settings.name, platform.wall_clock_offset_s, objects.tell_event)
        self._changed = threading.Condition()
        self._dirty: dict[Place, None] = {}
        self._loud: set[WorkloadId] = set()
        self._quiet: set[WorkloadId] = set()
        self._is_over = False
        self._conditions: dict[str, list[Condition]] = {}
        # Which job is whose: by the uid of its object, for as many jobs as were looked at.
        self._ids: dict[str, WorkloadId] = {}
        self._num_indexed = 0
        self._unfinished: dict[Place, None] = {}
        self._pool = ThreadPoolExecutor(MAX_ADMISSIONS, thread_name_prefix="springtide-admission")
        self._thread = threading.Thread(target=self._main, name="springtide-objects", daemon=True)
        platform.subscribe(self._on_step)

    def start(self) -> None:
        """Follow the objects, and bring the platform to what they say."""
        self._events.begin(self._platform.now_s())
        self.objects.open(self._on_object)
        self._thread.start()
        self._uploader.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; nothing is taken in any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._expiry.close()
        self._orphans.close()
        self._uploader.stop(timeout_s)

    # --- events, on other threads -----------------------------------------------------------------------------------

    def _on_object(self, kind: str, key: Key) -> None:
        with self._changed:
            self._dirty[kind, key] = None
            self._changed.notify_all()

    def _on_step(self, seq: int, step: Step, view: Any) -> None:
        self._events.take(seq, step)
        with self._changed:
            self._loud |= loud_news(step)
            self._quiet |= quiet_news(step)
            if self._loud:
                self._changed.notify_all()

    # --- its own thread ---------------------------------------------------------------------------------------------

    def _main(self) -> None:
        resynced_s = float("-inf")
        while True:
            with self._changed:
                if not (self._dirty or self._loud or self._is_over):
                    self._changed.wait(LOOK_S)
                if self._is_over:
                    return
            time.sleep(GATHER_S)
            if not self.objects.is_synced:
                # An object missing from an incomplete list may still exist.
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
        """Compare the objects with new events, and with `is_due` all of them."""
        with self._changed:
            dirty, self._dirty = self._dirty, {}
            loud, self._loud = self._loud, set()
            quiet, self._quiet = self._quiet, set()
        # One that is gone, or that took another's name, leaves a workload behind; one that merely changed does not.
        has_other_objects = any(
            (obj := self.objects.get(*place)) is None or uid_of(obj) not in self._ids for place in dirty
        )
        loud |= self._statuses.look_at_pods()
        places = self._unfinished | dirty | {place: None for name in loud if (place := self._place_of(name))}
        self._unfinished = {}
        places |= {(TRAINING_FUNCTION.name, key): None for key in self._expiry.due()}
        if is_due:
            everything = [*self.objects.all(TRAINING_FUNCTION.name), *self.objects.all(INFERENCE_FUNCTION.name)]
            self._forget_all_but({uid_of(obj) for obj in everything})
            places |= {(obj["kind"], key_of(obj)): None for obj in everything}
        self._take_in(list(places), is_due=is_due)
        for place in places:
            if self._is_over:
                return
            self._guarded(self._compare, place, is_due)
        for name in quiet - loud:
            place_of_quiet = self._place_of(name)
            if place_of_quiet is not None and place_of_quiet not in places:
                self._guarded(self._tell_progress, place_of_quiet, name)
        if is_due or has_other_objects:
            self._end_orphans()
        self._events.tell(self._platform.view())

    def _guarded(self, look: Callable[..., None], place: Place, *more: Any) -> None:
        """Compare one object; an error is logged, so that it does not stop the others."""
        try:
            look(place, *more)
        except SpringtideError as error:
            self._unfinished[place] = None
            LOG.warning("%s %s/%s waits: %s", place[0], *place[1], error)
        except Exception:
            LOG.exception("%s %s/%s could not be compared", place[0], *place[1])

    def _take_in(self, places: list[Place], *, is_due: bool) -> None:
        """Submit the jobs that are new, many at once: one turn of the loop takes them in together."""
        waiting = [obj for place in places if (obj := self._untaken(place, is_due)) is not None]
        # The others come in the next rounds, so that the status of the submitted ones is written in between.
        self._unfinished |= {(obj["kind"], key_of(obj)): None for obj in waiting[MOST_AT_ONCE:]}
        if waiting and not self._is_over:
            list(self._pool.map(self._take_in_one, waiting[:MOST_AT_ONCE]))

    def _untaken(self, place: Place, is_due: bool) -> Object | None:
        """The TrainingFunction at that place, if it has no job and is worth asking for one."""
        kind, key = place
        obj = self.objects.get(kind, key) if kind == TRAINING_FUNCTION.name else None
        if obj is None or self._job_of(obj) is not None:
            return None
        generation = obj["metadata"].get("generation", 1)
        known = self._conditions.get(uid_of(obj), [])
        is_answered = bool(known) and obj.get("status", {}).get("observedGeneration") == generation
        # Refused as it is; it is asked once more when it changes, and now and then.
        return None if is_answered and known[0].reason not in _ASKED_AGAIN and not is_due else obj

    def _take_in_one(self, obj: Object) -> None:
        try:
            _, refused = self._jobs.take_in(obj)
        except SpringtideError as error:
            refused = refusal_of(error)
        if refused is not None:
            self._conditions[uid_of(obj)] = [refused]

    def _compare(self, place: Place, is_due: bool) -> None:
        kind, key = place
        obj = self.objects.get(kind, key)
        if obj is None:
            return
        uid = uid_of(obj)
        if kind == INFERENCE_FUNCTION.name:
            _, self._conditions[uid] = self._services.compare(obj, is_due=is_due)
        else:
            job = self._job_of(obj)
            if job is not None:
                self._orphans.heed(obj)
                expired = self._expiry.look(obj, job)
                self._conditions[uid] = [self._jobs.compare(obj, job), *((expired,) if expired else ())]
        if any(each.reason in _ASKED_AGAIN for each in self._conditions.get(uid, ())):
            self._unfinished[place] = None
        self._tell(place)

    def _tell_progress(self, place: Place, name: WorkloadId) -> None:
        """Tell how far something has come, unless that was done just now: then it waits its turn."""
        obj = self.objects.get(*place)
        if obj is not None and self._statuses.is_due(uid_of(obj)):
            self._tell(place)
        elif obj is not None:
            with self._changed:
                self._quiet.add(name)

    def _tell(self, place: Place) -> None:
        kind, key = place
        obj = self.objects.get(kind, key)
        if obj is None:
            return
        conditions = self._conditions.get(uid_of(obj), [])
        if kind == TRAINING_FUNCTION.name:
            job = self._job_of(obj)
            if job is not None:
                if not self._statuses.tell_job(obj, job, conditions):
                    self._look_again(job.workload_id)
                return
        else:
            service = self._platform.view().services.get(WorkloadId(workload_name(obj)))
            if service is not None and not service.is_removed and _is_of(service.service.container, obj):
                if not self._statuses.tell_service(obj, service, conditions):
                    self._look_again(service.workload_id)
                return
        if conditions:
            self._statuses.tell_refused(obj, conditions)

    def _look_again(self, name: WorkloadId) -> None:
        with self._changed:
            self._quiet.add(name)

    def _end_orphans(self) -> None:
        """End the workloads whose objects are gone. The local copy names the candidates, the API server decides."""
        view = self._platform.view()
        there = {uid_of(obj) for kind in (TRAINING_FUNCTION, INFERENCE_FUNCTION) for obj in self.objects.all(kind.name)}
        for job in list(view.jobs.values()):
            container = job.job.container
            if container is None or not self._is_orphan(container, there):
                continue
            if job.lifecycle.state.is_terminal:
                self._orphans.look(job)
            else:
                self._ended(self._jobs.end_orphan, job)
        for service in list(view.services.values()):
            container = service.service.container
            if container is not None and not service.is_removed and self._is_orphan(container, there):
                self._ended(self._services.end_orphan, service)

    def _is_orphan(self, container: ContainerSettings, there: set[str]) -> bool:
        is_owned = bool(container.owner_uid) and self.objects.watches(container.namespace)
        return is_owned and container.owner_uid not in there

    def _ended(self, end: Callable[[Any], None], record: JobRecord | ServiceRecord) -> None:
        try:
            end(record)
        except SpringtideError as error:
            LOG.warning("%s, whose object is gone, goes on for now: %s", record.workload_id, error)

    def _job_of(self, obj: Object) -> JobRecord | None:
        """The job of an object, in the platform's newest view."""
        jobs = self._platform.view().jobs
        for job in itertools.islice(jobs.values(), self._num_indexed, None):
            if job.job.container is not None:
                self._ids[job.job.container.owner_uid] = job.workload_id
        self._num_indexed = len(jobs)
        workload_id = self._ids.get(uid_of(obj))
        return None if workload_id is None else jobs.get(workload_id)

    def _place_of(self, workload_id: WorkloadId) -> Place | None:
        """Where the object of a workload is; None where it has none."""
        owner = owner_of(self._platform.view(), workload_id)
        return None if owner is None else (owner.owner_kind, Key(owner.namespace, owner.owner_name))

    def _forget_all_but(self, uids: set[str]) -> None:
        self._statuses.forget(uids)
        self._services.forget(uids)
        self._expiry.forget(uids)
        self._conditions = {uid: known for uid, known in self._conditions.items() if uid in uids}


def _is_of(container: ContainerSettings | None, obj: Object) -> bool:
    return container is not None and container.owner_uid == uid_of(obj)
