"""The Pareto-optimal ways to run a job on a function service, planned and priced at submission."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.core.functions import (
    Collective,
    FunctionMenu,
    FunctionOption,
    FunctionPlan,
    FunctionService,
    ModelProfile,
)
from springtide.perf.functions.bill import (
    StepHabits,
    StepSizes,
    bill_of,
    gb_s_of,
    sizes_of,
    step_usd,
    usage_of_start,
)
from springtide.perf.functions.collective_time import best_chunks
from springtide.perf.functions.pipeline.merge import merged, unmerged
from springtide.perf.functions.pipeline.plan import (
    CHEAPEST,
    DEGREES,
    LEAST_DELTA,
    PipelinePlanner,
    PlannedPipeline,
    check_profile,
)
from springtide.perf.functions.pipeline.step_time import estimate_step

# Models with more layers are planned with merged layers, so that a menu takes a second or two at most.
MOST_LAYERS = 40
# Weights of time against memory, in units of the cheapest plan's memory: from cost only to time only.
_TIME_WEIGHTS = (0.5, 1.0, 2.0, 4.0, 8.0, 32.0, 256.0)
_MAX_LABELS = 100
# A function hands over to its successor while its remaining lifetime covers this many steps, saving the state, and a
# spare time.
_STEPS_LEFT = 1.5
_SPARE_S = 2.0


def menu_of(
    profile: ModelProfile,
    service: FunctionService,
    global_batch_size: int,
    *,
    total_steps: int | None = None,
    degrees: Sequence[int] = DEGREES,
    collective: Collective = "duplex",
    habits: StepHabits | None = None,
    state_factor: float = 3.0,
    error_fraction: float = 0.12,
    source: str = "profile",
) -> FunctionMenu:
    """Plan for a range of weights of time and cost, and return the Pareto-optimal plans with prices.

    The profile must be for sizes of the service. Micro-batches have the profile's size, ceil(batch / (d x size)) for
    each of d replicas; no plan has more functions than may run at a time, and all_options step fits a function's
    lifetime. The search is narrow, so a plan may be slightly worse than the optimum for its weights. With `total_steps`
    options are compared over the whole run, including their start. Raises InvalidRequest with the reason if no plan is
    possible.
    """
    if global_batch_size < 1:
        raise InvalidRequest(f"a global batch of {global_batch_size} samples: a step has at least 1")
    check_profile(profile)
    known = {size.memory_mb for size in service.sizes}
    if not known.issuperset(profile.memory_mb):
        unknown_mb = next(memory_mb for memory_mb in profile.memory_mb if memory_mb not in known)
        raise InvalidRequest(
            f"the profile is for functions of {unknown_mb} MB, which {service.name} does not have; scale it to "
            f"{', '.join(str(size.memory_mb) for size in service.sizes)} MB first"
        )
    habits = habits or StepHabits(lifetime_s=service.lifetime_s, start_s=service.cold_start_s)
    priced = _PlanPricing(profile, service, habits, state_factor)
    planned = _plans(profile, service, global_batch_size, degrees, collective)
    all_options = [priced.option(one) for one in planned]
    options = [option for option in all_options if priced.needed_s(option) <= service.lifetime_s]
    if not options:
        least = min(all_options, key=priced.needed_s)
        raise InvalidRequest(
            f"a function of {service.name} lives {service.lifetime_s:.0f} s; {profile.model} needs at least "
            f"{priced.needed_s(least):.0f} s of that: its start, {_STEPS_LEFT:g} steps of {least.step_s:.1f} s, saving "
            "its state; take a smaller global batch, or a service with a longer lifetime"
        )
    front = _front(options, total_steps)
    return FunctionMenu(
        service=service.name,
        options=tuple(front),
        recommended=_recommended(front),
        error_fraction=error_fraction,
        num_layers=len(profile.layers),
        source=source,
    )


def _plans(
    profile: ModelProfile,
    service: FunctionService,
    global_batch_size: int,
    degrees: Sequence[int],
    collective: Collective,
) -> list[PlannedPipeline]:
    """The distinct plans for all weights, in the profile's own layers."""
    num_micro_batches = -(-global_batch_size // profile.micro_batch_size)
    short, ends = merged(profile, MOST_LAYERS)
    possible = [degree for degree in degrees if degree <= service.concurrency]
    planner = PipelinePlanner(
        short,
        num_micro_batches,
        weights=[CHEAPEST, (1.0, 2.0**16), (1.0, 2.0**22)],
        degrees=possible or [1],
        collective=collective,
        max_functions=service.concurrency,
    )
    cheapest = planner.plan(CHEAPEST, max_labels=_MAX_LABELS)
    memory_mb = float(cheapest.estimate.memory_mb)
    spread = [cheapest]
    for factor in _TIME_WEIGHTS:
        spread.append(planner.plan((1.0, factor * memory_mb), max_labels=_MAX_LABELS))
    found: dict[FunctionPlan, PlannedPipeline] = {}
    for one in spread:
        plan = unmerged(one.plan, ends)
        found.setdefault(plan, msgspec.structs.replace(one, plan=plan))
    return list(found.values())


class _PlanPricing:
    """Computes time and cost of plans on one service."""

    def __init__(
        self, profile: ModelProfile, service: FunctionService, habits: StepHabits, state_factor: float
    ) -> None:
        self.profile = profile
        self.service = service
        self.habits = habits
        self.state_factor = state_factor

    def option(self, planned: PlannedPipeline) -> FunctionOption:
        """The plan with its cheapest number of chunks, its modelled step time, and prices."""
        plan = self._chunked(planned.plan)
        slowed = msgspec.structs.replace(self.profile, slowdown=self.profile.slowdown * self._contention(plan))
        step_s = estimate_step(slowed, plan).step_s
        start_s = self.service.cold_start_s + self.state_s(plan)
        return FunctionOption(
            plan=plan,
            step_s=step_s,
            step_usd=step_usd(plan, self.service.prices, step_s, self._sizes(plan), self.habits),
            start_s=start_s,
            start_usd=bill_of(usage_of_start(plan, start_s), self.service.prices).total_usd,
        )

    def needed_s(self, option: FunctionOption) -> float:
        """The lifetime that a function needs for its steps and a handover to its successor."""
        return option.start_s + _STEPS_LEFT * option.step_s + self.state_s(option.plan) + _SPARE_S

    def state_s(self, plan: FunctionPlan) -> float:
        """Seconds that the slowest stage needs to save or load its state."""
        return max(
            self.state_factor * num_bytes / self.service.size(stage.memory_mb).bytes_per_s + self.service.latency_s
            for stage, num_bytes in zip(plan.stages, self._sizes(plan).parameter_bytes, strict=True)
        )

    def _contention(self, plan: FunctionPlan) -> float:
        """The slowdown of functions that share one machine, assuming that all of them compute all the time."""
        if self.service.total_vcpus is None:
            return 1.0
        promised = plan.num_replicas * sum(self.service.size(stage.memory_mb).vcpus for stage in plan.stages)
        return max(1.0, promised / self.service.total_vcpus)

    def _sizes(self, plan: FunctionPlan) -> StepSizes:
        return msgspec.structs.replace(sizes_of(plan, self.profile), state_factor=self.state_factor)

    def _chunked(self, plan: FunctionPlan) -> FunctionPlan:
        """The plan with the cheapest number of chunks for the stage with most to exchange, which delays the others."""
        if plan.num_replicas == 1:
            return msgspec.structs.replace(plan, num_chunks=1)
        held = self._sizes(plan).parameter_bytes
        heaviest = max(range(len(held)), key=lambda stage: held[stage])
        num_chunks = best_chunks(
            plan.collective,
            plan.num_replicas,
            float(held[heaviest]),
            self.service.size(plan.stages[heaviest].memory_mb).bytes_per_s,
            self.service.latency_s,
            plan.num_in_flight,
            gb_s_of(plan.memory_mb, 1.0) * self.service.prices.usd_per_gb_s,
            self.service.prices,
        )
        return msgspec.structs.replace(plan, num_chunks=num_chunks)


def _front(options: list[FunctionOption], total_steps: int | None) -> list[FunctionOption]:
    """The Pareto-optimal options, cheapest first; compared over the whole run if its length is known."""

    def run(option: FunctionOption) -> tuple[float, float]:
        if total_steps is None:
            return option.step_usd, option.step_s
        return (
            option.start_usd + total_steps * option.step_usd,
            option.start_s + total_steps * option.step_s,
        )

    front: list[FunctionOption] = []
    for option in sorted(options, key=run):
        if not front or (run(option)[1] < run(front[-1])[1] and option.step_s < front[-1].step_s):
            front.append(option)
    return front


def _recommended(front: list[FunctionOption]) -> int:
    """The fastest whose speed-up over the cheapest is at least 0.8 of its cost's increase (FuncPipe, section 5.1)."""
    cheapest = front[0]
    best = 0
    for number, option in enumerate(front[1:], 1):
        faster = cheapest.step_s / option.step_s - 1.0
        dearer = option.step_usd / cheapest.step_usd - 1.0 if cheapest.step_usd > 0 else 0.0
        if faster >= LEAST_DELTA * dearer and option.step_s < front[best].step_s:
            best = number
    return best
