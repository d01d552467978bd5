"""What sharers open or hold beyond guaranteed minimums and leave to stronger claims on whole devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

from springtide.core.decision import Plan, Snapshot
from springtide.core.resources import DeviceId
from springtide.core.workload import JobState, WorkloadId
from springtide.scheduling.replicas import wanted_replicas
from springtide.scheduling.sharing.answer import ALL_WEAK, Lack
from springtide.scheduling.sharing.plan import WEAK_CLAIMS, SharePlan, WeakClaim
from springtide.scheduling.sharing.search import Search

_NONE: frozenset[DeviceId] = frozenset()
# How many claims of sharers are tried one by one in a decision where promises leave no room for all of them.
MOST_TRIED = 8
# Up to so many devices of best-effort sharers are tried for a workload on whole devices without a look at whether all
# of them would help.
FEW = 8
# Beside a workload, in place of the number of a replica that it lacks: it waits, as a promised job does until its
# schedule begins, or its promise is given up or refused, or it does not run any more.
_WAITS, _IS_LOST, _STOPS = -1, -2, -3


def with_what_sharers_yield(
    snapshot: Snapshot,
    parts: SharePlan,
    plan: Plan,
    planned: Callable[[frozenset[DeviceId]], tuple[SharePlan, Plan]],
    before: frozenset[DeviceId],
    search: Search,
    given: frozenset[DeviceId] | None = None,
) -> tuple[SharePlan, Plan, frozenset[DeviceId] | None]:
    """The plans in which sharers leave devices to workloads that lack some and may have them, and these devices; None
    if none were asked for. Those that were left `before` are the first: some may be on their way out there. These plans
    are beside those that are `given` already. The search may be left waiting."""
    if not can_help(asking(snapshot, parts, plan)[0], plan):
        return parts, plan, given
    lacking_in = partial(_lacking, snapshot)
    yielded, lacking = given or _NONE, lacking_in(parts, plan)
    most = None
    if len(parts.weak) > FEW:
        # On a full cluster this is often so: one plan with all that can be given up, before a long search.
        most = search.ask("all", lambda: planned(yielded.union(parts.spare, parts.weak)), lacking_in)
        if most is None or not lacking - most.lacking:
            return parts, plan, yielded
    if parts.spare:
        spare = yielded.union(parts.spare)
        tried = search.ask("spare", lambda: planned(spare), lacking_in, lambda found: found < lacking)
        if tried is None:
            return parts, plan, yielded
        if tried.made is not None and tried.lacking < lacking:
            (parts, plan), yielded = tried.made, spare
    strong = _without_best_effort(snapshot, lacking_in(parts, plan)) if parts.weak else set()
    weak = sorted(parts.weak, key=lambda at: at not in before) if can_help(strong, plan) else ()
    if most is not None and not plan.rejected and not _without_best_effort(snapshot, most.lacking) < strong:
        # With all of them one workload is helped at the cost of another: one device alone may be without harm, and how
        # many more would be is not searched for, unless a job is refused, which is final.
        weak = weak[:1]

    def helps(found: frozenset[Lack]) -> bool:
        return _without_best_effort(snapshot, found) < strong

    for count in _doubling(len(weak)):
        more = yielded.union(weak[:count])
        tried = search.ask(f"{count}", partial(planned, more), lacking_in, helps)
        if tried is None:
            return parts, plan, yielded
        if tried.made is not None and helps(tried.lacking):
            return *tried.made, more
    return parts, plan, yielded


def _doubling(most: int) -> Iterator[int]:
    """1, 2, 4 and so on, and `most` at last."""
    count = 1
    while count < most:
        yield count
        count *= 2
    if most:
        yield most


def with_what_promises_need(
    snapshot: Snapshot,
    parts: SharePlan,
    plan: Plan,
    planned: Callable[[frozenset[WeakClaim], frozenset[DeviceId]], tuple[SharePlan, Plan]],
    parts_of: Callable[[frozenset[WeakClaim], frozenset[DeviceId]], SharePlan],
    before: tuple[frozenset[WeakClaim], frozenset[DeviceId] | None],
    search: Search,
) -> tuple[SharePlan, Plan, frozenset[WeakClaim], frozenset[DeviceId] | None]:
    """The plans in which all that has a weaker claim leaves devices to promises that would be lost otherwise and to
    guaranteed minimums, as few as it takes; the claims that open nothing then, and all devices that are left.

    `before` are those claims and devices until now. The search may be left waiting.
    """
    barred, yielded = before
    lost = frozenset(lost_promises(snapshot, parts, plan))
    if not lost or not can_help(lost, plan) or search.is_waiting:
        return parts, plan, barred, yielded
    closed, given = barred | {ALL_WEAK}, yielded or _NONE
    given_now = given
    lost_in = partial(lost_promises, snapshot)

    def helps(found: frozenset[Lack]) -> bool:
        return lost > found

    devices = parts_of(closed, given).below_promises()
    if len(devices) > FEW:
        every = search.ask("promises all", partial(planned, closed, given.union(devices)), lost_in)
        if every is None or not helps(every.lacking):
            return parts, plan, barred, given
    for count in (0, *_doubling(len(devices))):
        more = given.union(devices[:count])
        tried = search.ask(f"promises {count}", partial(planned, closed, more), lost_in, helps)
        if tried is None:
            break
        if tried.made is not None and helps(tried.lacking):
            # More of them may help those that are still lost.
            (parts, plan), lost, barred, given_now = tried.made, tried.lacking, closed, more
            if not can_help(lost, plan):
                break
    return parts, plan, barred, given_now


def without_harm(
    snapshot: Snapshot,
    parts: SharePlan,
    plan: Plan,
    parts_of: Callable[[frozenset[WeakClaim]], SharePlan],
    plan_beside: Callable[[SharePlan], Plan],
) -> tuple[SharePlan, Plan, frozenset[WeakClaim]]:
    """The plans in which what sharers open harms no workload, and the claims that open nothing therefore."""
    barred, least_parts = frozenset[WeakClaim](), parts

    def harm(tried: SharePlan, found: Plan) -> set[tuple[WorkloadId, int]]:
        return harmed_by(snapshot, tried, found) | stopped_by(found)

    while more := least_parts.opened.keys() - barred:
        # Without the first claims others open what these would have shared.
        barred |= more
        least_parts = parts_of(barred)
    least_plan = plan_beside(least_parts)
    weak = sorted(barred, key=lambda claim: (WEAK_CLAIMS.index(claim[0]), claim[1]))
    least = harm(parts, least_plan)
    if harm(parts, plan) <= least:
        return parts, plan, frozenset()
    parts, plan = least_parts, least_plan
    for claim in weak[:MOST_TRIED] if len(weak) > 1 else ():
        tried_parts = parts_of(barred - {claim})
        tried_plan = plan_beside(tried_parts)
        if harm(tried_parts, tried_plan) <= least:
            parts, plan, barred = tried_parts, tried_plan, barred - {claim}
    return parts, plan, barred


def harmed_by(snapshot: Snapshot, parts: SharePlan, plan: Plan) -> set[tuple[WorkloadId, int]]:
    """Whom the inner policy's plan gives up or refuses; beside new promises, also each replica that services lack;
    beside best effort, all that wait with a stronger claim, too."""
    harmed = {(who, _IS_LOST) for who, claim in plan.claims.items() if claim.code == "given_up"}
    harmed |= {(who, _IS_LOST) for who in plan.rejected}
    if any(claim == "promise" for claim, _ in parts.opened):
        harmed |= _missing_replicas(snapshot, plan)
    best_effort = {view.job.job_id for view in parts.jobs if not view.job.goal.is_hard}
    if any(claim == "job" and who in best_effort for claim, who in parts.opened):
        harmed |= _without_best_effort(snapshot, _waiting(snapshot, parts, plan) | _missing_replicas(snapshot, plan))
    return harmed


def stopped_by(plan: Plan) -> set[tuple[WorkloadId, int]]:
    """The jobs whose promise is given up and that the inner policy's plan never brings to an end: they have too few
    devices to run at all. Late as they are, they are to end as soon as they can."""
    return {(who, _STOPS) for who, claim in plan.claims.items() if claim.code == "given_up" and claim.at_s is None}


def can_help(lacking: Collection[tuple[WorkloadId, int]], plan: Plan) -> bool:
    """Whether another plan, with more devices, may be without any of what is lacking in this one: a deadline that is
    given up for certain stays so."""
    claims = plan.claims
    return not all(who in claims and claims[who].is_certain for who, _ in lacking)


def _missing_replicas(snapshot: Snapshot, plan: Plan) -> set[tuple[WorkloadId, int]]:
    """Each replica on a whole device that a service lacks, with its number."""
    missing: set[tuple[WorkloadId, int]] = set()
    for view in snapshot.services:
        if view.service.share is None:
            given = plan.allocations.get(view.service.service_id)
            num_given = 0 if given is None else given.num_devices
            missing |= {(view.service.service_id, number) for number in range(num_given, wanted_replicas(view))}
    return missing


def _lacking(snapshot: Snapshot, parts: SharePlan, plan: Plan) -> set[tuple[WorkloadId, int]]:
    """Whom the inner policy's plan gives up, refuses or lets wait, and each replica that services lack."""
    harmed = harmed_by(snapshot, parts, plan)
    # To be given up is worse than to wait.
    harmed |= {(who, _WAITS) for who, number in harmed if number == _IS_LOST}
    return _waiting(snapshot, parts, plan) | harmed | _missing_replicas(snapshot, plan)


def asking(snapshot: Snapshot, parts: SharePlan, plan: Plan) -> tuple[set[tuple[WorkloadId, int]], frozenset[DeviceId]]:
    """Those lacking something that sharers could leave them, and what these could leave: devices of best effort are for
    stronger claims alone, and others for promises and guaranteed minimums."""
    lost = frozenset(lost_promises(snapshot, parts, plan))
    lacking = _lacking(snapshot, parts, plan) if parts.spare or parts.weak else set()
    lacking = lacking if parts.spare else _without_best_effort(snapshot, lacking)
    return lacking | lost, parts.spare.union(parts.weak, parts.below_promises() if lost else ())


def _waiting(snapshot: Snapshot, parts: SharePlan, plan: Plan) -> set[tuple[WorkloadId, int]]:
    """The jobs on whole devices that could start and get none."""
    return {
        (view.job.job_id, _WAITS)
        for view in snapshot.jobs
        if view.job.job_id not in parts.sharers
        and view.job.job_id not in plan.allocations
        and not view.job.is_on_functions
        and view.state is not JobState.PREEMPTING
        and view.restarts.starts_at_s <= snapshot.now_s
    }


def _without_best_effort(snapshot: Snapshot, lacking: Collection[Lack]) -> set[tuple[WorkloadId, int]]:
    """Those of `lacking` whose claim is stronger than best effort."""
    weak = {view.job.job_id for view in snapshot.jobs if not view.job.goal.is_hard}
    return {(who, number) for who, number in lacking if who not in weak}


def lost_promises(snapshot: Snapshot, parts: SharePlan, plan: Plan) -> set[tuple[WorkloadId, int]]:
    """The promises that are given up, and the replicas that services lack to their guaranteed minimums."""
    promised = {view.job.job_id for view in snapshot.jobs if view.promise.admitted_at_s is not None}
    least = {view.service.service_id: view.min_replicas for view in snapshot.services}
    lost = {(who, _IS_LOST) for who, claim in plan.claims.items() if claim.code == "given_up" and who in promised}
    missing = {(who, number) for who, number in _missing_replicas(snapshot, plan) if number < least[who]}
    return lost | missing | parts.below_minimum() | {(who, _IS_LOST) for who in parts.late()}


def is_urgent(snapshot: Snapshot, parts: SharePlan, plan: Plan) -> bool:
    """Whether a promise would be lost, a guaranteed minimum is not met, or a service lacks its first replica."""
    return bool(lost_promises(snapshot, parts, plan)) or any(
        number == 0 for _, number in _missing_replicas(snapshot, plan)
    )
