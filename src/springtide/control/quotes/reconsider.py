"""Asks a policy whether it would promise another deadline to a job that it has already accepted."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from springtide.core.decision import Policy, Snapshot
from springtide.core.workload import Goal, JobState, WorkloadId
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.functions.policy import goal_offer

# The search for a deadline that would be promised: each try is longer by this factor than the one before.
STEP_FACTOR = 1.25
MOST_TRIES = 14


class Reconsidered(msgspec.Struct, frozen=True, kw_only=True):
    """A policy's answer: `finish_s` is the planned end if the deadline would be promised.

    Otherwise `refusal` says why not, and `alternatives` what would be accepted, where that is known. All are empty if
    the policy would accept the job without a promise.
    """

    finish_s: float | None = None
    refusal: str = ""
    alternatives: tuple[str, ...] = ()


def reconsider(snapshot: Snapshot, policy: Policy, job_id: WorkloadId, goal: Goal) -> Reconsidered:
    """Ask the policy about a job of the snapshot as if it arrived now with `goal` and its remaining work.

    In the snapshot for the policy the job is replaced by a copy under another id, so that the policy's memory of it has
    no effect, while all other jobs keep their promises. The devices that it holds count as free, and the cost of a
    start is included. A job on functions is asked about as it runs, and its budget counts.
    """
    view = next(view for view in snapshot.jobs if view.job.job_id == job_id)
    if view.job.is_on_functions:
        return _on_functions(snapshot, job_id, goal)
    alias = WorkloadId(f"{job_id}~")
    # Without its budget, which the policy would compare with the cost from now on only; and without waiting, so that it
    # decides at once.
    newcomer = replace(
        view,
        job=replace(view.job, job_id=alias, goal=replace(goal, budget_usd=None, waits=False)),
        state=JobState.PENDING,
        submitted_at_s=snapshot.now_s,
        num_replicas=0,
        promise=replace(view.promise, admitted_at_s=None, promised_finish_s=None),
    )
    others = tuple(other for other in snapshot.jobs if other.job.job_id != job_id)
    allocations = {who: given for who, given in snapshot.allocations.items() if who != job_id}
    plan = policy.decide(replace(snapshot, jobs=(*others, newcomer), allocations=allocations))
    refused = plan.rejected.get(alias)
    if refused is not None:
        return Reconsidered(refusal=refused.reason)
    return Reconsidered(finish_s=plan.admitted.get(alias))


def _on_functions(snapshot: Snapshot, job_id: WorkloadId, goal: Goal) -> Reconsidered:
    finish_s, refusal = goal_offer(snapshot, job_id, replace(goal, waits=False))
    if refusal is not None:
        return Reconsidered(refusal=refusal.reason, alternatives=refusal.alternatives)
    return Reconsidered(finish_s=finish_s if goal.is_hard and goal.deadline_s is not None else None)


def soonest_s(snapshot: Snapshot, policy: Policy, job_id: WorkloadId, goal: Goal) -> float | None:
    """The first deadline, in growing steps, that would be promised; None if none of the tried ones would be."""
    assert goal.deadline_s is not None
    left_s = max(1.0, goal.deadline_s - snapshot.now_s)
    decisions = DecisionCache(policy)
    for _ in range(MOST_TRIES):
        left_s *= STEP_FACTOR
        later = replace(goal, deadline_s=snapshot.now_s + left_s)
        if reconsider(snapshot, decisions, job_id, later).finish_s is not None:
            return later.deadline_s
    return None
