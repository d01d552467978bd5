"""Compares a TrainingFunction with its job: requests the differences, and reports what cannot be changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from springtide.backends.kubernetes.client.kinds import TRAINING_FUNCTION, Key, Object, is_ending, key_of, uid_of
from springtide.backends.kubernetes.resources.client import Objects
from springtide.backends.kubernetes.resources.from_object import left_s, parts_of, worker_bounds
from springtide.backends.kubernetes.resources.status import Condition
from springtide.backends.kubernetes.resources.status_schema import ConditionType, Reason
from springtide.control.records import JobRecord
from springtide.core.errors import BackendError, InvalidRequest, SpringtideError
from springtide.core.options.jobs import CHANGEABLE_OPTIONS
from springtide.core.quantities import parse_money_usd
from springtide.core.workload import Goal, WorkloadId
from springtide.service.ports import PlatformLike
from springtide.service.reconciler.admission import ResourceAdmission, SourceMissing
from springtide.service.submission.option_models import JobOptionsIn
from springtide.service.submission.quarantine import SetAside
from springtide.service.submission.schemas import ScaleIn
from springtide.service.submission.shares import num_devices_of
from springtide.service.submission.submission import SubmissionService

KIND = TRAINING_FUNCTION.name
# Parts of a spec that may change at any time: they say how the job should run now.
_RUN_PARTS = frozenset({"suspend", "workers", "replicas"})
# Parts that an edit of the job may change, and those of them that make up its goal.
_EDITABLE_PARTS = frozenset(option.object.name for option in CHANGEABLE_OPTIONS if option.object is not None)
_GOAL_PARTS = _EDITABLE_PARTS - {"retries"}
# Parts that are used only after the job has ended.
_PARTS_AFTER_END = frozenset({"ttlSecondsAfterFinished", "ttlKeeps"})

# A goal that the policy has refused is tried again after this many seconds.
REFUSAL_VALID_S = 30.0
DEFAULT_RETRIES = JobOptionsIn.model_fields["max_restarts"].default
_BEGIN_ANEW = "put it back, or delete the object and apply it again to begin anew"
_COMPUTED = "it says what is computed, and the job has begun to compute that"
_PODS = "its pods are made of it, and were made when the job began"
_STARTED = "workers are started with it, and the job has begun"
_WHY_FIXED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("container", "share", "deviceMemory", "gpu"), _PODS),
        **dict.fromkeys(("grace", "checkpointEvery", "speeds", "stepProfile", "study"), _STARTED),
        "functions": "a job stays where it began, on pods or on functions",
        "workers": "a script's number of workers is fixed when the job begins",
    }
)


def refusal_of(error: SpringtideError) -> Condition:
    """The condition of an object whose job could not be submitted."""
    if isinstance(error, SourceMissing):
        reason = Reason.SOURCE_MISSING
    elif isinstance(error, SetAside):
        reason = Reason.ENDED_THE_CONTROL_PLANE
    elif isinstance(error, InvalidRequest):
        reason = Reason.INVALID_SPEC
    else:
        reason = Reason.PLATFORM_UNAVAILABLE
    return Condition(ConditionType.ACCEPTED, False, reason, str(error))


class JobReconciler:
    """Compares one TrainingFunction at a time with the platform's record of its job (level-triggered).

    Every change goes through `submissions` and so into the journal. `quota_caps` returns the jobs limited by a quota
    and their maximum number of workers. Before a change the object is read from the API server again, because the
    cached object may be out of date.
    """

    def __init__(
        self,
        platform: PlatformLike,
        objects: Objects,
        admission: ResourceAdmission,
        submissions: SubmissionService,
        quota_caps: Callable[[], Mapping[WorkloadId, int]],
    ) -> None:
        self._platform = platform
        self._objects = objects
        self._admission = admission
        self._submissions = submissions
        self._quota_caps = quota_caps
        # Refused edits by uid: the parts of the spec, the time until which they are not tried again, and the error.
        self._refused: dict[str, tuple[dict[str, str], float, InvalidRequest]] = {}

    def submit(self, obj: Object) -> tuple[JobRecord | None, Condition | None]:
        """Submit the job of an object. Returns the job, or why there is none; neither if the object is gone."""
        known = self._admission.job_of(uid_of(obj))
        if known is not None:
            return known, None
        found = self._read_current(obj)
        if found is None:
            return None, None
        if found["spec"].get("suspend"):
            return None, Condition(ConditionType.ACCEPTED, False, Reason.SUSPENDED, "spec.suspend is true")
        try:
            return self._admission.submit_job(found), None
        except SpringtideError as error:
            return None, refusal_of(error)

    def compare(self, obj: Object, record: JobRecord) -> Condition:
        """Request the changes that an object specifies. Returns whether all of its spec is in force."""
        refusals: list[str] = []
        failure = ""
        self._forget_refusals()
        accepted = _accepted(record)
        changed = _changed(obj, accepted)
        if not record.lifecycle.state.is_terminal and record.lifecycle.outcome is None:
            changes = (self._suspend, self._resize, *((self._edit,) if changed & _EDITABLE_PARTS else ()))
            for apply in changes:
                try:
                    apply(obj, record)
                except BackendError as error:
                    # Neither done nor refused: the next round tries again.
                    failure = str(error)
                except SpringtideError as error:
                    refusals.append(str(error))
        now = self._platform.view().jobs.get(record.workload_id, record)
        if _accepted(now) is not accepted:
            changed = _changed(obj, _accepted(now))
        refusals += _refused_parts(changed, now)
        if refusals:
            return Condition(ConditionType.APPLIED, False, Reason.CHANGE_REFUSED, "; ".join(refusals))
        if failure:
            return Condition(ConditionType.APPLIED, False, Reason.PLATFORM_UNAVAILABLE, failure)
        return Condition(ConditionType.APPLIED, True, Reason.IN_FORCE, "all of the spec is in force")

    def end_orphan(self, record: JobRecord) -> None:
        """End a job whose object is gone, after confirming that with the API server."""
        container = record.job.container
        if (
            container is None
            or container.owner_kind != KIND
            or record.lifecycle.state.is_terminal
            or record.lifecycle.outcome is not None
        ):
            return
        found = self._objects.read(KIND, Key(container.namespace, container.owner_name))
        if found is None or uid_of(found) != container.owner_uid:
            self._submissions.cancel_job(record.workload_id)

    def _suspend(self, obj: Object, record: JobRecord) -> None:
        is_wanted = bool(obj["spec"].get("suspend"))
        if is_wanted and not record.bounds.is_paused:
            if self._read_if_unchanged(obj, "suspend") is not None:
                self._submissions.pause_job(record.workload_id)
        elif record.bounds.is_paused and not is_wanted:
            budget_usd = self._new_budget(obj, record)
            if record.bounds.pause_reason and budget_usd is None:
                # The platform has paused the job, for its budget: only a new budget resumes it.
                return
            if self._read_if_unchanged(obj, "suspend", "budget") is not None:
                self._submissions.resume_job(record.workload_id, budget_usd)

    def _edit(self, obj: Object, record: JobRecord) -> None:
        """Apply a changed goal and a changed number of retries."""
        accepted = _accepted(record)
        edited = _changed(obj, accepted) & _EDITABLE_PARTS
        uid, parts = uid_of(obj), parts_of(obj)
        known = self._refused.get(uid)
        if known is not None and known[0] == parts:
            raise known[2]
        if self._read_if_unchanged(obj, *edited) is None:
            return
        if "retries" in edited:
            # Applied first, even if the goal is refused.
            accepted = _with_applied(accepted, parts, {"retries"})
            retries = int(obj["spec"].get("retries", DEFAULT_RETRIES))
            self._submissions.edit_job(record.workload_id, max_restarts=retries, accepted=accepted)
        if edited & _GOAL_PARTS:
            try:
                goal = self._goal(obj["spec"], record, edited)
                accepted = _with_applied(accepted, parts, _GOAL_PARTS)
                self._submissions.edit_job(record.workload_id, goal=goal, accepted=accepted)
            except InvalidRequest as error:
                self._refused[uid] = (parts, self._platform.now_s() + REFUSAL_VALID_S, error)
                raise

    def _goal(self, spec: Mapping[str, Any], record: JobRecord, edited: frozenset[str]) -> Goal:
        """The goal in a spec. A time of day means the next one from now; a duration counts from the submission."""
        goal, offset_s = record.job.goal, self._platform.wall_clock_offset_s
        if "budget" in edited:
            named = "budget" in spec
            goal = replace(goal, budget_usd=parse_money_usd(spec["budget"], "spec.budget") if named else None)
        if "deadline" in edited:
            now_s, deadline = self._platform.now_s(), None
            if "deadline" in spec:
                submitted = datetime.fromtimestamp(record.lifecycle.submitted_at_s + offset_s, UTC)
                now = datetime.fromtimestamp(now_s + offset_s, UTC)
                deadline = now_s + left_s(spec["deadline"], submitted, now)
            goal = replace(goal, deadline_s=deadline)
        return replace(goal, is_soft=bool(spec.get("soft")), waits=bool(spec.get("wait")))

    def _forget_refusals(self) -> None:
        now_s = self._platform.now_s()
        self._refused = {uid: known for uid, known in self._refused.items() if known[1] > now_s}

    def _resize(self, obj: Object, record: JobRecord) -> None:
        job = record.job
        if not job.elastic or job.is_on_functions:
            return
        wanted = self._bounds(obj["spec"], record)
        if (
            wanted != (record.bounds.min_workers, record.bounds.max_workers)
            and self._read_if_unchanged(obj, "workers", "replicas") is not None
        ):
            self._submissions.scale(record.workload_id, ScaleIn(minimum=wanted[0], maximum=wanted[1]))

    def _bounds(self, spec: Mapping[str, Any], record: JobRecord) -> tuple[int, int]:
        is_auto = spec.get("workers", "auto") == "auto"
        # Counted when the job was submitted: nodes that join or leave later do not change the bounds.
        devices = record.job.max_workers if is_auto else num_devices_of(self._platform.view())
        low, high = worker_bounds(spec, devices)
        cap = self._quota_caps().get(record.workload_id)
        return (low, high) if cap is None else (min(low, max(1, cap)), max(low, min(high, cap)))

    def _new_budget(self, obj: Object, record: JobRecord) -> float | None:
        if "budget" not in obj["spec"]:
            return None
        budget_usd = parse_money_usd(obj["spec"]["budget"], "spec.budget")
        return None if budget_usd == record.job.goal.budget_usd else budget_usd

    def _read_if_unchanged(self, obj: Object, *parts: str) -> Object | None:
        """The object on the server, if these parts of its spec are as in the cached one; else None."""
        found = self._read_current(obj)
        if found is None or any(found["spec"].get(part) != obj["spec"].get(part) for part in parts):
            return None
        return found

    def _read_current(self, obj: Object) -> Object | None:
        found = self._objects.read(KIND, key_of(obj))
        if found is None or uid_of(found) != uid_of(obj) or is_ending(found):
            return None
        return found


def _accepted(record: JobRecord) -> Mapping[str, str]:
    """The digests of the parts of the spec that are in force."""
    return {} if record.job.container is None else record.job.container.accepted


def _refused_parts(changed: frozenset[str], record: JobRecord) -> list[str]:
    """Sentences that say why changed parts of a spec cannot take effect; none for parts that may change."""
    run_parts = _RUN_PARTS if record.job.elastic else _RUN_PARTS - {"workers", "replicas"}
    changeable = run_parts | _PARTS_AFTER_END | (frozenset() if record.lifecycle.state.is_terminal else _EDITABLE_PARTS)
    fixed = sorted(changed - changeable)
    if not fixed:
        return []
    if record.lifecycle.state.is_terminal:
        names = ", ".join(f"spec.{name}" for name in fixed)
        return [f"{names} cannot change any more: it has ended ({record.lifecycle.state}); {_BEGIN_ANEW}"]
    whys: dict[str, list[str]] = {}
    for name in fixed:
        whys.setdefault(_WHY_FIXED.get(name, _COMPUTED), []).append(f"spec.{name}")
    return [f"{', '.join(names)} cannot change any more: {why}; {_BEGIN_ANEW}" for why, names in whys.items()]


def _changed(obj: Object, accepted: Mapping[str, str]) -> frozenset[str]:
    """The parts of a spec that differ from what is in force; none if that is not known."""
    if not accepted:
        return frozenset()
    now = parts_of(obj)
    return frozenset(name for name in accepted.keys() | now.keys() if accepted.get(name) != now.get(name))


def _with_applied(accepted: Mapping[str, str], now: Mapping[str, str], parts: Set[str]) -> dict[str, str]:
    """The digests in force once these parts have been applied."""
    kept = {name: digest for name, digest in accepted.items() if name not in parts}
    return kept | {name: digest for name, digest in now.items() if name in parts}
