"""What a TrainingFunction wants against what its job is: the difference is asked for, what cannot be is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from springtide.backends.kubernetes.kinds import TRAINING_FUNCTION, Key, Object, is_ending, key_of, uid_of
from springtide.backends.kubernetes.object_spec import parts_of, worker_bounds
from springtide.backends.kubernetes.object_status import ConditionType, Reason
from springtide.backends.kubernetes.objects import Objects
from springtide.backends.kubernetes.status_words import Condition
from springtide.control.records import JobRecord
from springtide.core.errors import BackendError, InvalidRequest, SpringtideError
from springtide.core.quantities import parse_money_usd
from springtide.core.workload import WorkloadId
from springtide.service.contract import PlatformLike
from springtide.service.resource_controller_intake import Intake, SourceMissing
from springtide.service.schemas import ScaleIn
from springtide.service.shares import devices_of
from springtide.service.submission import Desk

KIND = TRAINING_FUNCTION.name
# Parts of a spec that say what is wanted now, not what the job is.
_WISHES = frozenset({"suspend", "workers", "replicas", "budget"})


def refusal_of(error: SpringtideError) -> Condition:
    """What is told of an object that was not taken in."""
    if isinstance(error, SourceMissing):
        reason = Reason.SOURCE_MISSING
    elif isinstance(error, InvalidRequest):
        reason = Reason.INVALID_SPEC
    else:
        reason = Reason.PLATFORM_UNAVAILABLE
    return Condition(ConditionType.ACCEPTED, False, reason, str(error))


class JobObjects:
    """Compares one TrainingFunction at a time, by level: what it says, as it is now, against the platform's record.

    Nothing is remembered here that is not in the journal. `room` is the desk of every door; `quota_caps` says which
    jobs a quota holds down, and to how many workers: those are not raised above it. Before anything is changed for an
    object's sake the server is asked for the object once more: what is cached may be of the past.
    """

    def __init__(
        self,
        platform: PlatformLike,
        objects: Objects,
        intake: Intake,
        room: Desk,
        quota_caps: Callable[[], Mapping[WorkloadId, int]],
    ) -> None:
        self._platform = platform
        self._objects = objects
        self._intake = intake
        self._room = room
        self._quota_caps = quota_caps

    def take_in(self, obj: Object) -> tuple[JobRecord | None, Condition | None]:
        """The job of an object that has none yet, or what is told instead; neither where the object is gone."""
        known = self._intake.job_of(uid_of(obj))
        if known is not None:
            return known, None
        found = self._as_it_is(obj)
        if found is None:
            return None, None
        if found["spec"].get("suspend"):
            return None, Condition(ConditionType.ACCEPTED, False, Reason.SUSPENDED, "spec.suspend is true")
        try:
            return self._intake.take_job(found), None
        except SpringtideError as error:
            return None, refusal_of(error)

    def compare(self, obj: Object, record: JobRecord) -> Condition:
        """Ask for what an object wants of its job now; whether all that it says is in force."""
        refusals: list[str] = []
        trouble = ""
        if not record.state.is_terminal and record.outcome is None:
            wishes = (self._suspend, self._resize)
            for wish in wishes:
                try:
                    wish(obj, record)
                except BackendError as error:
                    # Neither done nor refused: the next round asks again.
                    trouble = str(error)
                except SpringtideError as error:
                    refusals.append(str(error))
        refusals += self._changed_parts(obj, record)
        if refusals:
            return Condition(ConditionType.APPLIED, False, Reason.CHANGE_REFUSED, "; ".join(refusals))
        if trouble:
            return Condition(ConditionType.APPLIED, False, Reason.PLATFORM_UNAVAILABLE, trouble)
        return Condition(ConditionType.APPLIED, True, Reason.IN_FORCE, "all of the spec is in force")

    def end_orphan(self, record: JobRecord) -> None:
        """End a job whose object is gone, once the server itself says so."""
        container = record.job.container
        if container is None or container.owner_kind != KIND or record.state.is_terminal or record.outcome is not None:
            return
        found = self._objects.read(KIND, Key(container.namespace, container.owner_name))
        if found is None or uid_of(found) != container.owner_uid:
            self._room.cancel_job(record.workload_id)

    def _suspend(self, obj: Object, record: JobRecord) -> None:
        is_wanted = bool(obj["spec"].get("suspend"))
        if is_wanted and not record.is_paused:
            if self._still(obj, "suspend") is not None:
                self._room.pause_job(record.workload_id)
        elif record.is_paused and not is_wanted:
            budget_usd = self._new_budget(obj, record)
            if record.pause_reason and budget_usd is None:
                # Not its owner's pause: it takes more than an owner who did not ask for one.
                return
            if self._still(obj, "suspend", "budget") is not None:
                self._room.resume_job(record.workload_id, budget_usd)

    def _resize(self, obj: Object, record: JobRecord) -> None:
        job = record.job
        if not job.elastic or job.is_on_functions:
            return
        wanted = self._bounds(obj["spec"], record)
        if wanted != (record.min_workers, record.max_workers) and self._still(obj, "workers", "replicas") is not None:
            self._room.scale(record.workload_id, ScaleIn(minimum=wanted[0], maximum=wanted[1]))

    def _bounds(self, spec: Mapping[str, Any], record: JobRecord) -> tuple[int, int]:
        is_auto = spec.get("workers", "auto") == "auto"
        # What was counted when it was submitted: machines that come and go do not change what its owner asked for.
        devices = record.job.max_workers if is_auto else len(devices_of(self._platform.view()))
        low, high = worker_bounds(spec, devices)
        cap = self._quota_caps().get(record.workload_id)
        return (low, high) if cap is None else (min(low, max(1, cap)), max(low, min(high, cap)))

    def _new_budget(self, obj: Object, record: JobRecord) -> float | None:
        if "budget" not in obj["spec"]:
            return None
        budget_usd = parse_money_usd(obj["spec"]["budget"], "spec.budget")
        return None if budget_usd == record.job.goal.budget_usd else budget_usd

    def _changed_parts(self, obj: Object, record: JobRecord) -> list[str]:
        container = record.job.container
        accepted = {} if container is None else container.accepted
        if not accepted:
            return []
        now = parts_of(obj)
        wishes = _WISHES if record.job.elastic else _WISHES - {"workers", "replicas"}
        changed = sorted(name for name in accepted.keys() | now.keys() if accepted.get(name) != now.get(name))
        fixed = [name for name in changed if name not in wishes]
        refusals = []
        if fixed:
            told = ", ".join(f"spec.{name}" for name in fixed)
            state = f"it has ended ({record.state})" if record.state.is_terminal else "the job has begun"
            refusals.append(
                f"{told} cannot change any more: {state}; put it back, or delete the object and apply it again "
                "to begin anew"
            )
        if "budget" in changed and not record.state.is_terminal and self._new_budget(obj, record) is not None:
            refusals.append(
                "spec.budget is taken over when a paused job goes on: set spec.suspend to true, and to false again"
            )
        return refusals

    def _still(self, obj: Object, *parts: str) -> Object | None:
        """The object as the server has it, if it still wants what the cached one does."""
        found = self._as_it_is(obj)
        if found is None or any(found["spec"].get(part) != obj["spec"].get(part) for part in parts):
            return None
        return found

    def _as_it_is(self, obj: Object) -> Object | None:
        found = self._objects.read(KIND, key_of(obj))
        if found is None or uid_of(found) != uid_of(obj) or is_ending(found):
            return None
        return found
