"""The real Controller and the real policy play jobs in the world of goals; what became of each is looked at after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from springtide.control import loop
from springtide.control.controller import Controller
from springtide.core.decision import Policy
from springtide.core.functions import Bill, FunctionPlan, FunctionService
from springtide.core.workload import JobState
from springtide.scheduling.functions.policy import WithFunctions
from springtide.scheduling.registry import make_policy
from springtide.simulator.clock import VirtualClock
from springtide.simulator.fluid.play import NullJournal
from springtide_studies.goals.world.cases import node_of
from springtide_studies.goals.world.executor import GoalWorld, JobArrival
from springtide_studies.goals.world.function_pool import SimulatedFunctionPool
from springtide_studies.goals.world.streams import Arrivals
from springtide_studies.goals.world.truth import Truth


class GoalPlayed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one job. `took_s` runs from its submission to its end; `bill` is all that it cost.

    `off_s` and `off_usd` are what passed, and was spent, until it ran as what it ran as at last for good: what looking
    took, the steps of that time being real ones. `plan` is what it ended as.
    """

    state: JobState
    reason: str
    alternatives: tuple[str, ...]
    took_s: float
    bill: Bill
    num_steps: int
    plan: FunctionPlan | None
    num_changes: int
    num_starts: int
    num_deaths: int
    num_redone: int
    num_measured: int
    off_s: float
    off_usd: float

    @property
    def usd(self) -> float:
        """All that it cost."""
        return self.bill.total_usd


def platform_policy() -> Policy:
    """What a platform with a function service decides by."""
    return WithFunctions(make_policy("fifo"))


def play_world(
    truth: Truth,
    service: FunctionService,
    arrivals: Sequence[JobArrival],
    *,
    seed: int = 0,
    policy: Policy | None = None,
    streams: Mapping[str, Arrivals] | None = None,
    num_places: int = 4,
) -> GoalWorld:
    """Let the platform play all arrivals to their end."""
    clock = VirtualClock()
    world = GoalWorld(clock, node_of(service, num_places), truth, arrivals, seed=seed, streams=streams)
    controller = Controller(policy or platform_policy())
    loop.run(controller, world, clock, NullJournal(), until=lambda: world.is_over)
    return world


def outcome_of(crew: SimulatedFunctionPool, now_s: float | None = None) -> GoalPlayed:
    """What became of a job; one that has not ended is looked at as of its last step."""
    run = crew.run
    ended_s = run.ended_s if run.ended_s is not None else (now_s or (run.told[-1].at_s if run.told else 0.0))
    ran = [moment for moment in run.moments if moment.plan is not None]
    last = ran[-1] if ran else None
    settled = next((moment for moment in ran if last is not None and moment.plan == last.plan), None)
    # Back to a plan that was left before: it is settled only from its last return on.
    for moment in ran:
        if last is not None and moment.plan != last.plan:
            settled = None
        elif settled is None:
            settled = moment
    return GoalPlayed(
        state=run.state,
        reason=run.reason,
        alternatives=run.alternatives,
        took_s=ended_s - run.submitted_s,
        bill=run.meter.bill(),
        num_steps=run.step,
        plan=last.plan if last is not None else None,
        num_changes=run.num_changes,
        num_starts=run.num_starts,
        num_deaths=run.num_deaths,
        num_redone=run.num_redone,
        num_measured=len(run.shown),
        off_s=settled.at_s - run.submitted_s if settled is not None else 0.0,
        off_usd=settled.spent_usd if settled is not None else 0.0,
    )
