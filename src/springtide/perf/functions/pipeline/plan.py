"""Plans for a profiled model on functions: the co-optimisation of FuncPipe (section 3.4) for any weights.

The solver proves each plan optimal, and the plan's value is checked with the model as the paper writes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from springtide.core.errors import InvalidRequest, SpringtideError
from springtide.core.functions import MAX_LAYERS, MIB, Collective, FunctionPlan, FunctionStage, ModelProfile
from springtide.perf.functions.pipeline.step_time import (
    NUM_CHUNKS,
    NUM_IN_FLIGHT,
    PipelineStepEstimate,
    estimate_step,
    objective,
    sync_rule,
)
from springtide.solvers.pipeline.exact import PipelineSolver, Weights, unfit_layers
from springtide.solvers.pipeline.problem import Degree, PipelineProblem, PipelineSolution, Stage

# FuncPipe, section 5.1.
WEIGHTS: tuple[Weights, ...] = ((1.0, 0.0), (1.0, 2.0**16), (1.0, 2.0**19), (1.0, 2.0**22))
DEGREES = (1, 2, 4, 8, 16)
CHEAPEST: Weights = (1.0, 0.0)
# The least delta at which a speed-up is worth its cost (section 5.1).
LEAST_DELTA = 0.8
# Rounding errors of the solver are far smaller; a larger difference to the model is a bug.
_AGREEMENT = 1e-9


class PlannedPipeline(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan for one pair of weights. `value` is equation 3a; no plan has a lower value than `bound`.

    `delta` is its relative speed-up over the cheapest plan per relative increase in cost (section 5.1); None for the
    cheapest plan itself.
    """

    weights: tuple[float, float]
    plan: FunctionPlan
    estimate: PipelineStepEstimate
    value: float
    bound: float
    is_proved: bool
    num_labels: int
    delta: float | None = None


class PipelinePlanner:
    """Plans one profile with one global batch for any weights; the preparation is shared."""

    def __init__(
        self,
        profile: ModelProfile,
        num_micro_batches: int,
        *,
        weights: Sequence[Weights] = WEIGHTS,
        degrees: Sequence[int] = DEGREES,
        collective: Collective = "duplex",
        num_chunks: int = NUM_CHUNKS,
        num_in_flight: int = NUM_IN_FLIGHT,
        max_functions: int | None = None,
    ) -> None:
        """`num_micro_batches` is M, of the whole step; `max_functions` limits concurrency. Raises InvalidRequest."""
        check_profile(profile)
        self.profile = profile
        self.collective = collective
        self.num_chunks = num_chunks
        self.num_in_flight = num_in_flight
        self.problem = problem_of(
            profile,
            num_micro_batches,
            degrees=degrees,
            collective=collective,
            num_chunks=num_chunks,
            num_in_flight=num_in_flight,
            max_functions=max_functions,
        )
        for alpha_1, alpha_2 in weights:
            if not (0.0 <= alpha_1 < float("inf") and 0.0 <= alpha_2 < float("inf") and alpha_1 + alpha_2 > 0.0):
                raise InvalidRequest(
                    f"weights {alpha_1:g},{alpha_2:g}: give two finite numbers, not both 0, as 1,65536"
                )
        self._solver = PipelineSolver(self.problem, weights)

    def plan(self, weights: Weights, *, max_labels: int | None = None) -> PlannedPipeline:
        """The best plan; `max_labels` is as for the solver. Raises InvalidRequest if none fits."""
        found = self._solver.best(weights, max_labels=max_labels)
        if found is None:
            raise InvalidRequest(_why_nothing_fits(self.profile, self.problem))
        plan = self._as_plan(found)
        estimate = estimate_step(self.profile, plan)
        value = objective(estimate, weights)
        if abs(value - found.value) > _AGREEMENT * value:
            raise SpringtideError(
                f"the solver's plan for {self.profile.model} comes to {found.value:.12g} by its own arithmetic and to "
                f"{value:.12g} by the model; please report this with the profile"
            )
        return PlannedPipeline(
            weights=weights,
            plan=plan,
            estimate=estimate,
            value=value,
            bound=min(found.bound, value),
            is_proved=found.is_proved,
            num_labels=found.num_labels,
        )

    def _as_plan(self, found: PipelineSolution) -> FunctionPlan:
        return plan_of(
            found.stages,
            found.degree,
            self.profile,
            collective=self.collective,
            num_chunks=self.num_chunks,
            num_in_flight=self.num_in_flight,
        )


def plan_of(
    stages: Sequence[Stage],
    degree: Degree,
    profile: ModelProfile,
    *,
    collective: Collective = "duplex",
    num_chunks: int = NUM_CHUNKS,
    num_in_flight: int = NUM_IN_FLIGHT,
) -> FunctionPlan:
    return FunctionPlan(
        stages=tuple(
            FunctionStage(first_layer=first, end_layer=end, memory_mb=profile.memory_mb[size])
            for first, end, size in stages
        ),
        num_replicas=degree.num_replicas,
        num_micro_batches=degree.num_micro_batches,
        micro_batch_size=profile.micro_batch_size,
        collective=collective,
        num_chunks=num_chunks,
        num_in_flight=num_in_flight,
    )


def problem_of(
    profile: ModelProfile,
    num_micro_batches: int,
    *,
    degrees: Sequence[int] = DEGREES,
    collective: Collective = "duplex",
    num_chunks: int = NUM_CHUNKS,
    num_in_flight: int = NUM_IN_FLIGHT,
    max_functions: int | None = None,
) -> PipelineProblem:
    """The profile as the solver's problem. Degrees above the number of micro-batches are left out.

    `max_functions` is how many may run at a time. Micro-batches per replica are rounded up: mu = ceil(M / d). Raises
    InvalidRequest for impossible counts.
    """
    if num_micro_batches < 1:
        raise InvalidRequest(f"{num_micro_batches} micro-batches: a step has at least 1")
    if not degrees or min(degrees) < 1:
        raise InvalidRequest("degrees of data parallelism are whole numbers from 1 on, as 1,2,4,8,16")
    most = num_micro_batches if max_functions is None else min(num_micro_batches, max_functions)
    usable = sorted({degree for degree in degrees if degree <= most})
    if not usable:
        raise InvalidRequest(f"{min(degrees)} replicas are too many for this step; allow a degree of at most {most}")

    def times(rows: list[tuple[float | None, ...]]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        return np.array([[np.inf if value is None else value * profile.slowdown for value in row] for row in rows])

    layers = profile.layers
    return PipelineProblem(
        forward_s=times([layer.forward_s for layer in layers]),
        backward_s=times([layer.backward_s for layer in layers]),
        parameter_bytes=np.array([float(layer.parameter_bytes) for layer in layers]),
        activation_bytes=np.array([float(layer.activation_bytes) for layer in layers]),
        output_bytes=np.array([float(layer.output_bytes) for layer in layers]),
        gradient_bytes=np.array([float(layer.gradient_bytes) for layer in layers]),
        memory_mb=np.array([float(memory_mb) for memory_mb in profile.memory_mb]),
        bytes_per_s=np.array(profile.bytes_per_s),
        latency_s=profile.latency_s,
        base_bytes=float(profile.base_bytes),
        degrees=tuple(
            Degree(
                num_replicas=degree,
                num_micro_batches=-(-num_micro_batches // degree),
                sync=sync_rule(collective, degree, num_chunks, num_in_flight).pairs if degree > 1 else (),
                max_stages=None
                if max_functions is None or max_functions >= degree * len(layers)
                else max_functions // degree,
            )
            for degree in usable
        ),
    )


def with_deltas(planned: Sequence[PlannedPipeline], cheapest: PipelineStepEstimate) -> list[PlannedPipeline]:
    """The plans with their deltas over the cheapest plan: (t_mc / t_p - 1) / (c_p / c_mc - 1), section 5.1."""
    return [msgspec.structs.replace(one, delta=delta_of(one.estimate, cheapest)) for one in planned]


def delta_of(estimate: PipelineStepEstimate, cheapest: PipelineStepEstimate) -> float | None:
    """Relative speed-up over the cheapest plan per relative increase in cost; None if it costs no more."""
    cost_increase = estimate.cost_mb_s / cheapest.cost_mb_s - 1.0
    return (cheapest.step_s / estimate.step_s - 1.0) / cost_increase if cost_increase > 1e-12 else None


def recommended(planned: Sequence[PlannedPipeline]) -> int:
    """The index of the fastest plan whose delta is at least 0.8; the cheapest one always qualifies."""
    worth = [n for n, one in enumerate(planned) if one.delta is None or one.delta >= LEAST_DELTA]
    worth = worth or [min(range(len(planned)), key=lambda n: planned[n].estimate.cost_mb_s)]
    return min(worth, key=lambda n: (planned[n].estimate.step_s, planned[n].estimate.cost_mb_s, n))


def check_profile(profile: ModelProfile) -> None:
    """Raise InvalidRequest for a profile that cannot be planned, with the layer and the reason."""
    num_sizes = len(profile.memory_mb)
    if not 1 <= len(profile.layers) <= MAX_LAYERS:
        raise InvalidRequest(f"the profile has {len(profile.layers)} layers; from 1 to {MAX_LAYERS} can be planned")
    if num_sizes == 0 or len(profile.bytes_per_s) != num_sizes:
        raise InvalidRequest(
            f"the profile has {num_sizes} memory sizes and {len(profile.bytes_per_s)} bandwidths; each size has one"
        )
    if list(profile.memory_mb) != sorted(set(profile.memory_mb)) or profile.memory_mb[0] < 1:
        raise InvalidRequest("the profile's memory_mb must be positive, ascending, and each size there once")
    constants = (profile.latency_s, profile.base_bytes, *profile.bytes_per_s, profile.slowdown)
    positive = (*profile.bytes_per_s, profile.slowdown)
    if (
        not all(0.0 <= value < float("inf") for value in constants)
        or min(positive) <= 0
        or profile.micro_batch_size < 1
    ):
        raise InvalidRequest(
            "the profile's bytes_per_s, slowdown and micro_batch_size must be above 0, latency_s and base_bytes not "
            "below, all of them finite"
        )
    for number, layer in enumerate(profile.layers):
        sizes = (layer.parameter_bytes, layer.activation_bytes, layer.output_bytes, layer.gradient_bytes)
        known = [value for value in (*layer.forward_s, *layer.backward_s) if value is not None]
        if len(layer.forward_s) != num_sizes or len(layer.backward_s) != num_sizes:
            raise InvalidRequest(f"layer {number} ({layer.name}) must have {num_sizes} times, one for each memory size")
        if min(sizes) < 0 or not all(0.0 <= value < float("inf") for value in known):
            raise InvalidRequest(f"layer {number} ({layer.name}) has a size or a time that is negative or not finite")


def _why_nothing_fits(profile: ModelProfile, problem: PipelineProblem) -> str:
    """The message on the layer that needs too much memory, at the degree with the smallest need."""
    unfit = {degree: unfit_layers(problem, degree) for degree in problem.degrees}
    if not all(unfit.values()):
        limits = ", ".join(f"{one.max_stages} for {one.num_replicas}" for one in problem.degrees if not unfit[one])
        return (
            f"{profile.model} fits no pipeline of as few functions as may run at a time (at most so many stages for so "
            f"many replicas: {limits}); raise the limit, or take a smaller batch"
        )
    degree = min(unfit, key=lambda one: (max((needed for _, needed in unfit[one]), default=0.0), one.num_replicas))
    layer, needed = max(unfit[degree], key=lambda one: one[1])
    largest = max(profile.memory_mb)
    name = f"layer {layer} ({profile.layers[layer].name})"
    batches = f"{degree.num_micro_batches} micro-batches of {profile.micro_batch_size} on each replica"
    if needed <= largest * MIB:
        return f"{name} fits no function: it was measured on none, up to {largest} MB; split the layer or profile again"
    return (
        f"{name} fits no function: alone it needs {np.ceil(needed / MIB):.0f} MB with {batches} "
        f"({degree.num_replicas} replicas), the largest has {largest} MB; split the layer, allow more replicas, "
        "or take a smaller batch"
    )
