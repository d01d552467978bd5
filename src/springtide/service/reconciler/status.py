"""Writes the status of every object from the platform's view: at once after changes, less often for progress."""

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
MAX_PROGRESS_PER_S = 20.0
# A written status appears in the cache within this time, else another writer has changed it.
CACHE_DELAY_S = 20.0
# At most this fraction of the time is spent on reading the status of all pods.
_POD_TIME_FRACTION = 0.05
# The fields of a status that are written at once when they change.
_AT_ONCE = ("state", "workers", "replicas", "readyReplicas", "deadline", "artifact", "revision", "observedGeneration")


class StatusWriter:
    """Writes the status of objects. No decision depends on a written status.

    `platform_name` and `base_url` are the platform's name and address for users; `cluster_status` returns the state of
    the pods. `usual_ttl_s` is how many seconds ended jobs are kept whose objects do not specify it.
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
        self._written: dict[str, tuple[float, Object]] = {}
        self._pods: Mapping[str, list[PodStatus]] = {}
        # For each workload, its pods and what they wait for.
        self._waits: Mapping[str, list[tuple[str, str]]] = {}
        self._next_update_s = float("-inf")

    def update_pods(self) -> set[WorkloadId]:
        """Read the state of the pods. Returns the workloads whose pods wait for something else than before.

        If reading takes long, because there are many pods, it is done less often.
        """
        began_s = self._monotonic()
        if began_s < self._next_update_s:
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
        self._next_update_s = ended_s + (ended_s - began_s) / _POD_TIME_FRACTION
        return {WorkloadId(workload_id) for workload_id in changed}

    def write_job(self, obj: Object, record: JobRecord, more: Iterable[Condition]) -> bool:
        """Write the status of a job. Returns False if the write was postponed and must be tried again."""
        platform = self._platform
        view, now_s, offset_s = platform.view(), platform.now_s(), platform.wall_clock_offset_s
        planned = view.future.get(record.workload_id, ())
        job = job_status(
            record,
            now_s,
            planned=planned,
            condition=view.conditions.get(record.workload_id),
            usd_per_device_hour=platform.usd_per_device_hour,
            live=platform.function_status(record.workload_id),
        )
        pods = self._pods.get(record.workload_id, [])
        fields = job_told(job, offset_s=offset_s, planned=planned, pods=pods)
        end_s = expires_s(obj, record, self._usual_ttl_s)
        fields |= {} if end_s is None else {"expiresAt": stamp(end_s + offset_s)}
        return self._write(obj, fields, [*job_conditions(job, pods), *more])

    def write_service(self, obj: Object, record: ServiceRecord, more: Iterable[Condition]) -> bool:
        """Write the status of a service. Returns False if the write was postponed and must be tried again."""
        platform = self._platform
        now_s = platform.now_s()
        service = service_status(record, now_s, self._base_url)
        pods = self._pods.get(record.workload_id, [])
        cost_usd = record.attained_service_s(now_s) / 3600.0 * platform.usd_per_device_hour
        fields = service_told(service, cost_usd=cost_usd, pods=pods)
        return self._write(obj, fields, [*service_conditions(service, pods), *more])

    def write_refused(self, obj: Object, conditions: list[Condition]) -> bool:
        """Write why the workload of an object was not submitted."""
        first = conditions[0]
        waits = first.reason is Reason.SUSPENDED
        state = "SUSPENDED" if waits else "REFUSED" if first.reason is not Reason.PLATFORM_UNAVAILABLE else "ACCEPTING"
        is_job = obj["kind"] == "TrainingFunction"
        applied = Condition(ConditionType.APPLIED, waits, Reason.IN_FORCE if waits else Reason.CHANGE_REFUSED)
        goal = ConditionType.RUNNING if is_job else ConditionType.READY
        stands = Condition(goal, False, first.reason, first.message)
        fields = {"state": state, "reason": first.message[:1024], "replicas": 0}
        return self._write(obj, fields, [first, applied, stands])

    def is_due(self, uid: str) -> bool:
        """Whether enough time has passed to write the status for progress alone."""
        written_s, _ = self._written.get(uid, (float("-inf"), None))
        return self._monotonic() - written_s >= self._every_s()

    def forget(self, uids: set[str]) -> None:
        """Forget all objects except these."""
        self._written = {uid: fields for uid, fields in self._written.items() if uid in uids}

    def _write(self, obj: Object, fields: dict[str, Any], conditions: list[Condition]) -> bool:
        uid, now_s = uid_of(obj), self._monotonic()
        shown = obj.get("status") or {}
        written_s, written = self._written.get(uid, (float("-inf"), shown))
        if now_s - written_s > CACHE_DELAY_S and shown != written:
            # Another writer changed or removed it.
            written = shown
        generation = int(obj["metadata"].get("generation", 1))
        unix_s = self._platform.now_s() + self._platform.wall_clock_offset_s
        status = {
            **without_nothing(fields),
            "platform": self._name,
            "observedGeneration": generation,
            "conditions": merged_conditions(written.get("conditions", ()), conditions, unix_s, generation),
        }
        if status == written:
            return True
        if now_s - written_s < self._every_s() and _at_once(status) == _at_once(written):
            return False
        self._written[uid] = (now_s, status)
        self._objects.tell_status(obj, status)
        return True

    def _every_s(self) -> float:
        return max(PROGRESS_EVERY_S, len(self._written) / MAX_PROGRESS_PER_S)


def _at_once(status: Object) -> Any:
    """The part of a status whose changes are written without delay."""
    conditions = [(each["type"], each["status"], each["reason"]) for each in status.get("conditions", ())]
    plan = status.get("plan", {})
    return [*(status.get(name) for name in _AT_ONCE), conditions, plan.get("devices"), plan.get("generation")]


def _waits(pods: Iterable[PodStatus]) -> list[tuple[str, str]]:
    return sorted((pod.pod, pod.reason) for pod in pods)
