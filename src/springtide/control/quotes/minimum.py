"""Asks a policy whether it could guarantee a service a minimum of replicas and keep every promise."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from springtide.core.decision import Plan, Policy, ServiceView, Snapshot
from springtide.core.workload import InferenceService, WorkloadId
from springtide.scheduling.decisions.cache import DecisionCache


class MinimumAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas could be guaranteed, up to as many as were asked for. `jobs` are those whose promises would be
    given up for one more, `free_in_s` in how many seconds the last of them is planned to end (None: not known)."""

    most: int
    jobs: tuple[str, ...] = ()
    free_in_s: float | None = None


def ask_minimum(
    snapshot: Snapshot, policy: Policy, service: InferenceService, minimum: int, promised: int
) -> MinimumAnswer:
    """What the policy would do if the service were deployed now with this minimum. It has `promised` already.

    Nothing is changed: the policy decides on a copy of the snapshot.
    """
    decisions = DecisionCache(policy)
    before = decisions.decide(snapshot)
    kept, broken = _given_up(before), frozenset[WorkloadId]()
    for most in range(minimum, promised - 1, -1):
        plan = decisions.decide(_with_minimum(snapshot, service, most))
        found = (_given_up(plan) - kept) | _sharers_in_the_way(plan, snapshot, service, most)
        if not found:
            break
        broken = found
    if not broken:
        return MinimumAnswer(most=minimum)
    names = {view.job.job_id: view.job.name for view in snapshot.jobs}
    ends = [runs[-1].end_s for who in broken if (runs := before.future.get(who))]
    return MinimumAnswer(
        most=most,
        jobs=tuple(sorted(names[who] for who in broken if who in names)),
        free_in_s=max(ends) - snapshot.now_s if len(ends) == len(broken) else None,
    )


def _given_up(plan: Plan) -> frozenset[WorkloadId]:
    return frozenset(who for who, claim in plan.claims.items() if claim.code == "given_up")


def _sharers_in_the_way(
    plan: Plan, snapshot: Snapshot, service: InferenceService, minimum: int
) -> frozenset[WorkloadId]:
    """The promised jobs that hold the devices, if sharing replicas find no place and no other job could make room."""
    given = plan.allocations.get(service.service_id)
    if service.share is None or (given is not None and given.num_devices >= minimum * service.devices_each):
        return frozenset()
    promised = {view.job.job_id for view in snapshot.jobs if view.promise.admitted_at_s is not None}
    holders = frozenset(view.job.job_id for view in snapshot.jobs if view.job.job_id in plan.allocations)
    return holders if holders <= promised else frozenset()


def _with_minimum(snapshot: Snapshot, service: InferenceService, minimum: int) -> Snapshot:
    known = {view.service.service_id: view for view in snapshot.services}
    most = max(minimum, service.max_replicas)
    view = known.get(service.service_id) or ServiceView(service=service, min_replicas=minimum, max_replicas=most)
    known[service.service_id] = replace(view, service=service, min_replicas=minimum, max_replicas=most)
    return replace(snapshot, services=tuple(known.values()))
