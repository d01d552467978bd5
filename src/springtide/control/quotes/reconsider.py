"""Asking a policy whether it would promise another deadline to a job that it has taken in already."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from springtide.core.decision import Policy, Snapshot
from springtide.core.workload import Goal, JobState, WorkloadId
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.functions.policy import goal_offer

# Longer times are tried one after the other, each so much longer, until one would be promised.
STEP = 1.25
MOST_TRIES = 14


class Reconsidered(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy would say now: `finish_s` is when the job is planned to end if its deadline would be promised.

    Otherwise `refusal` says why not, and `alternatives` what could be had where that is known; all are empty where the
    policy takes it without a promise.
    """

    finish_s: float | None = None
    refusal: str = ""
    alternatives: tuple[str, ...] = ()


def reconsider(snapshot: Snapshot, policy: Policy, job_id: WorkloadId, goal: Goal) -> Reconsidered:
    """Put a job that is in the snapshot to the policy as one that arrives with that goal, with what it has left to do.

    It is asked about under another name, in the place of itself, so that whatever the policy remembers of it does not
    count and all others keep what they were promised. What it holds is free meanwhile; that it would have to start is
    reckoned with. One on functions is asked about as it is: it may go on as it runs, and what it may cost counts.
    """
    view = next(view for view in snapshot.jobs if view.job.job_id == job_id)
    if view.job.is_on_functions:
        return _on_functions(snapshot, job_id, goal)
    alias = WorkloadId(f"{job_id}~")
    # What it may cost is another question: here that would count from now. Nor is it to be put in line, but answered.
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
    """A later deadline that would be promised, and none that is much sooner would be; None where none was found."""
    assert goal.deadline_s is not None
    left_s = max(1.0, goal.deadline_s - snapshot.now_s)
    decisions = DecisionCache(policy)
    for _ in range(MOST_TRIES):
        left_s *= STEP
        later = replace(goal, deadline_s=snapshot.now_s + left_s)
        if reconsider(snapshot, decisions, job_id, later).finish_s is not None:
            return later.deadline_s
    return None
