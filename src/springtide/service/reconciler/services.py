"""Compares an InferenceFunction with its service: deploys, changes or removes it."""

from __future__ import annotations

from springtide.backends.kubernetes.client.kinds import INFERENCE_FUNCTION, Key, Object, is_ending, key_of, uid_of
from springtide.backends.kubernetes.resources.client import Objects
from springtide.backends.kubernetes.resources.from_object import workload_name
from springtide.backends.kubernetes.resources.status import Condition
from springtide.backends.kubernetes.resources.status_schema import ConditionType, Reason
from springtide.control.records import ServiceRecord
from springtide.control.releases.steps import release_text
from springtide.core.errors import SpringtideError
from springtide.core.workload import WorkloadId
from springtide.service.ports import PlatformLike
from springtide.service.reconciler.admission import ResourceAdmission
from springtide.service.reconciler.jobs import refusal_of
from springtide.service.submission.submission import SubmissionService

KIND = INFERENCE_FUNCTION.name


class ServiceObjects:
    """Compares one InferenceFunction at a time with its service (level-triggered).

    An object is deployed unless this process has deployed its present generation; deploying it again changes nothing.
    A source in a ConfigMap is read again with `is_due`, because ConfigMaps are not watched.
    """

    def __init__(
        self, platform: PlatformLike, objects: Objects, admission: ResourceAdmission, submissions: SubmissionService
    ) -> None:
        self._platform = platform
        self._objects = objects
        self._admission = admission
        self._submissions = submissions
        # By uid: the generation that this process has deployed or that was refused.
        self._deployed: dict[str, int] = {}
        self._refused: dict[str, tuple[int, Condition]] = {}

    def compare(self, obj: Object, *, is_due: bool = False) -> tuple[ServiceRecord | None, list[Condition]]:
        """Request what an object specifies. Returns its service afterwards, and the conditions to report."""
        record = self._service_of(obj)
        if obj["spec"].get("suspend"):
            return self._suspend(obj, record)
        conflict = self._name_conflict(obj)
        if conflict:
            return None, [Condition(ConditionType.ACCEPTED, False, Reason.NAME_TAKEN, conflict)]
        uid, generation = uid_of(obj), obj["metadata"].get("generation", 1)
        is_read_again = is_due and bool(obj["spec"]["source"].get("configMap"))
        if record is None or self._deployed.get(uid) != generation or is_read_again:
            refused = self._deploy(obj, is_due=is_due)
            if refused is not None and record is None:
                return None, [refused]
            if refused is not None:
                return record, [refused._replace(type=ConditionType.APPLIED, reason=Reason.CHANGE_REFUSED)]
            record = self._service_of(obj)
        return record, [_applied(record)]

    def end_orphan(self, record: ServiceRecord) -> None:
        """Remove a service whose object is gone, after confirming that with the API server."""
        container = record.service.container
        if container is None or container.owner_kind != KIND or record.is_removed:
            return
        found = self._objects.read(KIND, Key(container.namespace, container.owner_name))
        if found is None or uid_of(found) != container.owner_uid:
            self._submissions.remove_service(record.service.name)

    def forget(self, uids: set[str]) -> None:
        """Forget all objects except these."""
        self._deployed = {uid: generation for uid, generation in self._deployed.items() if uid in uids}
        self._refused = {uid: refused for uid, refused in self._refused.items() if uid in uids}

    def _deploy(self, obj: Object, *, is_due: bool) -> Condition | None:
        uid, generation = uid_of(obj), obj["metadata"].get("generation", 1)
        known = self._refused.get(uid)
        if known is not None and known[0] == generation and not is_due:
            return known[1]
        try:
            found = self._objects.read(KIND, key_of(obj))
            if found is None or uid_of(found) != uid or is_ending(found) or found["spec"].get("suspend"):
                return None
            self._admission.deploy_service(found)
        except SpringtideError as error:
            refused = refusal_of(error)
            self._refused[uid] = (generation, refused)
            return refused
        self._deployed[uid] = found["metadata"].get("generation", 1)
        self._refused.pop(uid, None)
        return None

    def _suspend(self, obj: Object, record: ServiceRecord | None) -> tuple[ServiceRecord | None, list[Condition]]:
        if record is not None:
            found = self._objects.read(KIND, key_of(obj))
            if found is not None and uid_of(found) == uid_of(obj) and found["spec"].get("suspend"):
                self._submissions.remove_service(record.service.name)
        self._deployed.pop(uid_of(obj), None)
        return None, [Condition(ConditionType.ACCEPTED, False, Reason.SUSPENDED, "spec.suspend is true")]

    def _service_of(self, obj: Object) -> ServiceRecord | None:
        record = self._platform.view().services.get(WorkloadId(workload_name(obj)))
        if record is None or record.is_removed:
            return None
        container = record.service.container
        return record if container is not None and container.owner_uid == uid_of(obj) else None

    def _name_conflict(self, obj: Object) -> str:
        """A sentence that names the other object with the address that this one needs; empty if the address is free."""
        name = workload_name(obj)
        record = self._platform.view().services.get(WorkloadId(name))
        if record is None or record.is_removed:
            return ""
        container = record.service.container
        if container is None or container.owner_uid == uid_of(obj):
            return ""
        holder = self._objects.get(KIND, Key(container.namespace, container.owner_name))
        if holder is None or uid_of(holder) != container.owner_uid:
            return ""
        return (
            f"/f/{name} is the address of {container.namespace}/{container.owner_name}; give this one another name, or "
            "delete that one"
        )


def _applied(record: ServiceRecord | None) -> Condition:
    """Whether what answers is what the object says now: not yet while replicas of an older revision do."""
    if record is not None and record.rolled_back:
        return Condition(ConditionType.APPLIED, False, Reason.CHANGE_REFUSED, record.rolled_back)
    if record is not None and record.release is not None:
        return Condition(ConditionType.APPLIED, False, Reason.STARTING, release_text(record))
    if record is not None and record.old_revision is not None:
        text = f"revision {record.service.revision} replaces the replicas of revision {record.old_revision}"
        return Condition(ConditionType.APPLIED, False, Reason.STARTING, text)
    return Condition(ConditionType.APPLIED, True, Reason.IN_FORCE, "all of the spec is in force")
