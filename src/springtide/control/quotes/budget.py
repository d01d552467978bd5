"""Budgets as admission: what a plan costs, and a policy that rejects jobs whose planned cost exceeds their budget."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from springtide.core.decision import JobView, Plan, Policy, Refusal, Schedule, Snapshot
from springtide.core.quantities import format_duration
from springtide.core.workload import Goal, WorkloadId
from springtide.perf.curve import curve_of
from springtide.scheduling.decisions.cache import DecisionCache


def cost_usd(schedule: Schedule, usd_per_device_hour: float) -> float:
    """What the devices of a schedule cost."""
    device_s = sum((run.end_s - run.start_s) * run.num_devices for run in schedule)
    return device_s / 3600.0 * usd_per_device_hour


class WithinBudget(msgspec.Struct, frozen=True):
    """Wraps a policy so that a job is refused at its arrival if its planned cost exceeds its budget.

    The planned cost is that of the job's schedule in `Plan.future`. Where the policy plans no future, it is the cost of
    running to the end on the devices given now (for a waiting job: on the fewest it can run on). A job of unknown
    length or speed is not checked. The inner policy decides again without the refused jobs, so that they displace no
    other job.
    """

    policy: Policy
    usd_per_device_hour: float

    def make_derived(self) -> DecisionCache:
        """An empty cache for the inner policy."""
        return DecisionCache(self.policy)

    def decide(self, snapshot: Snapshot, derived: DecisionCache | None = None) -> Plan:
        """Return the inner policy's plan for the jobs that are within their budgets."""
        decisions = derived or DecisionCache(self.policy)
        plan = decisions.decide(snapshot)
        refusals: dict[WorkloadId, Refusal] = {}
        for view in reversed(snapshot.jobs):
            # Jobs are in order of arrival, and only those that arrive now are checked: a later change of plans does not
            # revoke an acceptance.
            if view.submitted_at_s != snapshot.now_s:
                break
            budget_usd = view.job.goal.budget_usd
            is_settled = view.num_replicas or view.promise.admitted_at_s is not None or view.job.job_id in plan.rejected
            if budget_usd is None or is_settled:
                continue
            planned_usd = self._planned_usd(view, plan, snapshot)
            if planned_usd is not None and planned_usd > budget_usd:
                refusals[view.job.job_id] = Refusal(
                    reason=f"its planned cost of {money(planned_usd)} exceeds the budget of {money(budget_usd)}",
                    alternatives=(f"--budget {planned_usd + 0.005:.2f}",),
                )
        if not refusals:
            return plan
        others = tuple(view for view in snapshot.jobs if view.job.job_id not in refusals)
        plan = decisions.decide(replace(snapshot, jobs=others))
        return replace(plan, rejected={**plan.rejected, **refusals})

    def _planned_usd(self, view: JobView, plan: Plan, snapshot: Snapshot) -> float | None:
        schedule = plan.future.get(view.job.job_id)
        curve = curve_of(view)
        if view.total_steps is None or curve.source == "guess" or not curve.sizes:
            return None
        if schedule:
            return cost_usd(schedule, self.usd_per_device_hour)
        given = plan.allocations.get(view.job.job_id)
        num_devices = curve.sizes[0] if given is None else given.num_devices
        if curve.rate(num_devices) <= 0:
            return None
        time_s = snapshot.overheads.cost_s(num_devices) + view.total_steps / curve.rate(num_devices)
        return num_devices * time_s / 3600.0 * self.usd_per_device_hour


def money(usd: float) -> str:
    """`$4.20`; amounts below half a cent with two significant digits."""
    return f"${usd:.2f}" if usd >= 0.005 or usd == 0 else f"${usd:.2g}"


def goal_parts(goal: Goal, now_s: float) -> list[str]:
    """A goal as text, part by part."""
    deadline_s, kind = goal.deadline_s, "soft deadline" if goal.is_soft else "deadline"
    parts = ["no deadline" if deadline_s is None else f"{kind} in {format_duration(deadline_s - now_s)}"]
    return [*parts, *(["no budget"] if goal.budget_usd is None else [f"budget {money(goal.budget_usd)}"])]
