"""Compares a TrainingFunction with its job: asks for the difference, and reports what cannot be changed."""

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
from springtide.service.submission.schemas import ScaleIn
from springtide.service.submission.shares import num_devices_of
from springtide.service.submission.submission import SubmissionService

KIND = TRAINING_FUNCTION.name
# Parts of a spec that say what is wanted now, not what the job is.
_WISHES = frozenset({"suspend", "workers", "replicas"})
# Parts of which the platform keeps by its own record what is in force: those that may change, and the goal of them.
_EDITS = frozenset(option.object.name for option in CHANGEABLE_OPTIONS if option.object is not None)
_GOAL = _EDITS - {"retries"}
# What is read when the job has ended.
_AFTERWARDS = frozenset({"ttlSecondsAfterFinished", "ttlKeeps"})

# How long a policy's no to a new goal is believed, in seconds.
ASKED_AGAIN_S = 30.0
DEFAULT_RETRIES = JobOptionsIn.model_fields["max_restarts"].default
_BEGIN_ANEW = "put it back, or delete the object and apply it again to begin anew"
_COMPUTED = "it says what is computed, and the job has begun to compute that"
_PODS = "its pods are made of it, and were made when the job began"
_STARTED = "workers are started with it, and the job has begun"
_WHY_FIXED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("container", "share", "deviceMemory"), _PODS),
        **dict.fromkeys(("grace", "checkpointEvery", "speeds", "stepProfile", "study"), _STARTED),
        "functions": "a job stays where it began, on pods or on functions",
        "workers": "a script's number of workers is fixed when the job begins",
    }
)


def refusal_of(error: SpringtideError) -> Condition:
    """The condition of an object whose job was not submitted."""
    if isinstance(error, SourceMissing):
        reason = Reason.SOURCE_MISSING
    elif isinstance(error, InvalidRequest):
        reason = Reason.INVALID_SPEC
    else:
        reason = Reason.PLATFORM_UNAVAILABLE
    return Condition(ConditionType.ACCEPTED, False, reason, str(error))


class JobReconciler:
    """Compares one TrainingFunction at a time, by level: what it says, as it is now, against the platform's record.

    Nothing counts here that is not in the journal. `submissions` takes every request; `quota_caps` says which
    jobs a quota holds down, and to how many workers: those are not raised above it. Before anything is changed for an
    object's sake the server is asked for the object once more: what is cached may be of the past.
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
        # A policy is asked about one wish once, and again after a while: by uid, the parts wished for, and until when.
        self._refused: dict[str, tuple[dict[str, str], float, InvalidRequest]] = {}

    def take_in(self, obj: Object) -> tuple[JobRecord | None, Condition | None]:
        """The job of an object that has none yet, or the condition instead; neither where the object is gone."""
        known = self._admission.job_of(uid_of(obj))
        if known is not None:
            return known, None
        found = self._as_it_is(obj)
        if found is None:
            return None, None
        if found["spec"].get("suspend"):
            return None, Condition(ConditionType.ACCEPTED, False, Reason.SUSPENDED, "spec.suspend is true")
        try:
            return self._admission.take_job(found), None
        except SpringtideError as error:
            return None, refusal_of(error)

    def compare(self, obj: Object, record: JobRecord) -> Condition:
        """Ask for what an object wants of its job now; whether all that it says is in force."""
        refusals: list[str] = []
        trouble = ""
        self._forget_refusals()
        accepted = _accepted(record)
        changed = _changed(obj, accepted)
        if not record.lifecycle.state.is_terminal and record.lifecycle.outcome is None:
            wishes = (self._suspend, self._resize, *((self._edit,) if changed & _EDITS else ()))
            for wish in wishes:
                try:
                    wish(obj, record)
                except BackendError as error:
                    # Neither done nor refused: the next round asks again.
                    trouble = str(error)
                except SpringtideError as error:
                    refusals.append(str(error))
        now = self._platform.view().jobs.get(record.workload_id, record)
        if _accepted(now) is not accepted:
            changed = _changed(obj, _accepted(now))
        refusals += _refused_parts(changed, now)
        if refusals:
            return Condition(ConditionType.APPLIED, False, Reason.CHANGE_REFUSED, "; ".join(refusals))
        if trouble:
            return Condition(ConditionType.APPLIED, False, Reason.PLATFORM_UNAVAILABLE, trouble)
        return Condition(ConditionType.APPLIED, True, Reason.IN_FORCE, "all of the spec is in force")

    def end_orphan(self, record: JobRecord) -> None:
        """End a job whose object is gone, once the server itself says so."""
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
            if self._still(obj, "suspend") is not None:
                self._submissions.pause_job(record.workload_id)
        elif record.bounds.is_paused and not is_wanted:
            budget_usd = self._new_budget(obj, record)
            if record.bounds.pause_reason and budget_usd is None:
                # Not its owner's pause: it takes more than an owner who did not ask for one.
                return
            if self._still(obj, "suspend", "budget") is not None:
                self._submissions.resume_job(record.workload_id, budget_usd)

    def _edit(self, obj: Object, record: JobRecord) -> None:
        """Bring what its owner wants of the job now to the platform: its goal, and how often it may begin again."""
        accepted = _accepted(record)
        wished = _changed(obj, accepted) & _EDITS
        uid, parts = uid_of(obj), parts_of(obj)
        known = self._refused.get(uid)
        if known is not None and known[0] == parts:
            raise known[2]
        if self._still(obj, *wished) is None:
            return
        if "retries" in wished:
            # Regardless of the outcome for the goal.
            accepted = _taken_over(accepted, parts, {"retries"})
            retries = int(obj["spec"].get("retries", DEFAULT_RETRIES))
            self._submissions.edit_job(record.workload_id, max_restarts=retries, accepted=accepted)
        if wished & _GOAL:
            try:
                goal = self._goal(obj["spec"], record, wished)
                accepted = _taken_over(accepted, parts, _GOAL)
                self._submissions.edit_job(record.workload_id, goal=goal, accepted=accepted)
            except InvalidRequest as error:
                self._refused[uid] = (parts, self._platform.now_s() + ASKED_AGAIN_S, error)
                raise

    def _goal(self, spec: Mapping[str, Any], record: JobRecord, wished: frozenset[str]) -> Goal:
        """The goal that a spec names. A time of the clock counts from now on, a duration from the submission on."""
        goal, offset_s = record.job.goal, self._platform.wall_clock_offset_s
        if "budget" in wished:
            named = "budget" in spec
            goal = replace(goal, budget_usd=parse_money_usd(spec["budget"], "spec.budget") if named else None)
        if "deadline" in wished:
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
            and self._still(obj, "workers", "replicas") is not None
        ):
            self._submissions.scale(record.workload_id, ScaleIn(minimum=wanted[0], maximum=wanted[1]))

    def _bounds(self, spec: Mapping[str, Any], record: JobRecord) -> tuple[int, int]:
        is_auto = spec.get("workers", "auto") == "auto"
        # What was counted when it was submitted: machines that come and go do not change what its owner asked for.
        devices = record.job.max_workers if is_auto else num_devices_of(self._platform.view())
        low, high = worker_bounds(spec, devices)
        cap = self._quota_caps().get(record.workload_id)
        return (low, high) if cap is None else (min(low, max(1, cap)), max(low, min(high, cap)))

    def _new_budget(self, obj: Object, record: JobRecord) -> float | None:
        if "budget" not in obj["spec"]:
            return None
        budget_usd = parse_money_usd(obj["spec"]["budget"], "spec.budget")
        return None if budget_usd == record.job.goal.budget_usd else budget_usd

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


def _accepted(record: JobRecord) -> Mapping[str, str]:
    """The digests of the parts of a job's object as they are in force."""
    return {} if record.job.container is None else record.job.container.accepted


def _refused_parts(changed: frozenset[str], record: JobRecord) -> list[str]:
    """Why these parts of an object cannot be in force, as sentences; nothing of those that can change."""
    wishes = _WISHES if record.job.elastic else _WISHES - {"workers", "replicas"}
    asked = wishes | _AFTERWARDS | (frozenset() if record.lifecycle.state.is_terminal else _EDITS)
    fixed = sorted(changed - asked)
    if not fixed:
        return []
    if record.lifecycle.state.is_terminal:
        told = ", ".join(f"spec.{name}" for name in fixed)
        return [f"{told} cannot change any more: it has ended ({record.lifecycle.state}); {_BEGIN_ANEW}"]
    whys: dict[str, list[str]] = {}
    for name in fixed:
        whys.setdefault(_WHY_FIXED.get(name, _COMPUTED), []).append(f"spec.{name}")
    return [f"{', '.join(names)} cannot change any more: {why}; {_BEGIN_ANEW}" for why, names in whys.items()]


def _changed(obj: Object, accepted: Mapping[str, str]) -> frozenset[str]:
    """The parts of an object's spec that are not as they are in force; none where that is not known."""
    if not accepted:
        return frozenset()
    now = parts_of(obj)
    return frozenset(name for name in accepted.keys() | now.keys() if accepted.get(name) != now.get(name))


def _taken_over(accepted: Mapping[str, str], now: Mapping[str, str], parts: Set[str]) -> dict[str, str]:
    """The digests of what is in force once these parts are as they are now."""
    kept = {name: digest for name, digest in accepted.items() if name not in parts}
    return kept | {name: digest for name, digest in now.items() if name in parts}
