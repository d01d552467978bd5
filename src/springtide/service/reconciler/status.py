"""The status of every object, from the platform's view: at once where something happened, now and then where not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from springtide.backends.kubernetes.client.kinds import Object, uid_of
from springtide.backends.kubernetes.resources.client import Objects
from springtide.backends.kubernetes.resources.status import (
    Condition,
    job_conditions,
    job_told,
    merged_conditions,
    service_conditions,
    service_told,
    stamp,
    without_nothing,
)
from springtide.backends.kubernetes.resources.status_schema import ConditionType, Reason
from springtide.control.records import JobRecord, ServiceRecord
from springtide.core.status.pods import ClusterStatus, PodStatus
from springtide.core.workload import WorkloadId
from springtide.service.ports import PlatformLike
from springtide.service.reconciler.expiry import expires_s
from springtide.service.status.status import job_status, service_status

# Seconds between status updates for progress alone; longer where there are many objects.
PROGRESS_EVERY_S = 5.0
MOST_PROGRESS_PER_S = 20.0
# So long after it was written a status is seen as it was written, or it is not there.
BELIEVED_S = 20.0
# No more than this part of the time goes into looking at every pod.
_LOOK_PART = 0.05
# The fields of a status that are written at once when they change.
_AT_ONCE = ("state", "workers", "replicas", "readyReplicas", "deadline", "artifact", "revision", "observedGeneration")


class StatusTeller:
    """Writes the status of objects. What is written is never read back to decide anything.

    `platform_name` and `base_url` are what users call the platform and where it is; `cluster_status` says which pods
    wait for what. `usual_ttl_s` is how many seconds jobs stay after their end whose objects do not say.
    """

    def __init__(
        self,
        platform: PlatformLike,
        objects: Objects,
        platform_name: str,
        base_url: str,
        cluster_status: Callable[[], ClusterStatus],
        monotonic: Callable[[], float] = time.monotonic,
        *,
        usual_ttl_s: float | None = None,
    ) -> None:
        self._platform = platform
        self._objects = objects
        self._name = platform_name
        self._base_url = base_url
        self._cluster_status = cluster_status
        self._monotonic = monotonic
        self._usual_ttl_s = usual_ttl_s
        self._told: dict[str, tuple[float, Object]] = {}
        self._pods: Mapping[str, list[PodStatus]] = {}
        # Which pods of a workload wait, and for what.
        self._waits: Mapping[str, list[tuple[str, str]]] = {}
        self._next_look_s = float("-inf")

    def look_at_pods(self) -> set[WorkloadId]:
        """See which pods wait for what; returns whose have changed.

        Where that takes long, for there are many, it is done more rarely and seen a little later.
        """
        began_s = self._monotonic()
        if began_s < self._next_look_s:
            return set()
        pods: dict[str, list[PodStatus]] = {}
        for pod in self._cluster_status().pods:
            pods.setdefault(pod.workload_id, []).append(pod)
        self._pods = pods
        before, self._waits = self._waits, {workload_id: _waits(them) for workload_id, them in pods.items()}
        changed = {
            workload_id
            for workload_id in self._waits.keys() | before.keys()
            if self._waits.get(workload_id) != before.get(workload_id)
        }
        ended_s = self._monotonic()
        self._next_look_s = ended_s + (ended_s - began_s) / _LOOK_PART
        return {WorkloadId(workload_id) for workload_id in changed}

    def tell_job(self, obj: Object, record: JobRecord, more: Iterable[Condition]) -> bool:
        """Tell how a job stands; False where that is to be looked at once more, because it was not written yet."""
        platform = self._platform
        view, now_s, offset_s = platform.view(), platform.now_s(), platform.wall_clock_offset_s
        planned = view.future.get(record.workload_id, ())
        job = job_status(
            record,
            now_s,
            planned=planned,
            usd_per_device_hour=platform.usd_per_device_hour,
            live=platform.function_status(record.workload_id),
        )
        pods = self._pods.get(record.workload_id, [])
        told = job_told(job, offset_s=offset_s, planned=planned, pods=pods)
        end_s = expires_s(obj, record, self._usual_ttl_s)
        told |= {} if end_s is None else {"expiresAt": stamp(end_s + offset_s)}
        return self._tell(obj, told, [*job_conditions(job, pods), *more])

    def tell_service(self, obj: Object, record: ServiceRecord, more: Iterable[Condition]) -> bool:
        """Tell how a service stands; False as with jobs."""
        platform = self._platform
        now_s = platform.now_s()
        service = service_status(record, now_s, self._base_url)
        pods = self._pods.get(record.workload_id, [])
        cost_usd = record.attained_service_s(now_s) / 3600.0 * platform.usd_per_device_hour
        told = service_told(service, cost_usd=cost_usd, pods=pods)
        return self._tell(obj, told, [*service_conditions(service, pods), *more])

    def tell_refused(self, obj: Object, conditions: list[Condition]) -> bool:
        """Tell why an object was not taken in."""
        first = conditions[0]
        waits = first.reason is Reason.SUSPENDED
        state = "SUSPENDED" if waits else "REFUSED" if first.reason is not Reason.PLATFORM_UNAVAILABLE else "ACCEPTING"
        is_job = obj["kind"] == "TrainingFunction"
        applied = Condition(ConditionType.APPLIED, waits, Reason.IN_FORCE if waits else Reason.CHANGE_REFUSED)
        goal = ConditionType.RUNNING if is_job else ConditionType.READY
        stands = Condition(goal, False, first.reason, first.message)
        told = {"state": state, "reason": first.message[:1024], "replicas": 0}
        return self._tell(obj, told, [first, applied, stands])

    def is_due(self, uid: str) -> bool:
        """Whether so much time has passed that progress alone may be told."""
        written_s, _ = self._told.get(uid, (float("-inf"), None))
        return self._monotonic() - written_s >= self._every_s()

    def forget(self, uids: set[str]) -> None:
        """Of all objects but these nothing is remembered."""
        self._told = {uid: told for uid, told in self._told.items() if uid in uids}

    def _tell(self, obj: Object, told: dict[str, Any], conditions: list[Condition]) -> bool:
        uid, now_s = uid_of(obj), self._monotonic()
        shown = obj.get("status") or {}
        written_s, written = self._told.get(uid, (float("-inf"), shown))
        if now_s - written_s > BELIEVED_S and shown != written:
            # Another writer changed or removed it.
            written = shown
        generation = int(obj["metadata"].get("generation", 1))
        unix_s = self._platform.now_s() + self._platform.wall_clock_offset_s
        status = {
            **without_nothing(told),
            "platform": self._name,
            "observedGeneration": generation,
            "conditions": merged_conditions(written.get("conditions", ()), conditions, unix_s, generation),
        }
        if status == written:
            return True
        if now_s - written_s < self._every_s() and _at_once(status) == _at_once(written):
            return False
        self._told[uid] = (now_s, status)
        self._objects.tell_status(obj, status)
        return True

    def _every_s(self) -> float:
        return max(PROGRESS_EVERY_S, len(self._told) / MOST_PROGRESS_PER_S)


def _at_once(status: Object) -> Any:
    """The part of a status whose changes are written without delay."""
    conditions = [(each["type"], each["status"], each["reason"]) for each in status.get("conditions", ())]
    plan = status.get("plan", {})
    return [*(status.get(name) for name in _AT_ONCE), conditions, plan.get("devices"), plan.get("generation")]


def _waits(pods: Iterable[PodStatus]) -> list[tuple[str, str]]:
    return sorted((pod.pod, pod.reason) for pod in pods)
