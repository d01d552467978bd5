"""FuncPipe's evaluation (section 5) by its own performance model: the four models of Table 1, planned and timed by each
method. What is published about a figure stands beside it.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType

import msgspec

from springtide.core.functions import Collective, FunctionPlan, FunctionService, ModelProfile
from springtide.perf.functions.pipeline.plan import (
    WEIGHTS,
    PipelinePlanner,
    plan_of,
    problem_of,
    recommended,
    with_deltas,
)
from springtide.perf.functions.pipeline.step_time import PipelineStepEstimate, estimate_step
from springtide.perf.functions.scale import scaled_profile
from springtide.perf.functions.services import aws_lambda
from springtide_studies.rivals.pipeline_baselines import BASELINES, BaselineName, baseline_step
from springtide_studies.rivals.solvers.pipeline_bayes import bayes
from springtide_studies.rivals.solvers.tpdmp import tpdmp

MODELS = ("resnet101", "amoebanet-d18", "amoebanet-d36", "bert-large")
BATCHES = (16, 64, 256)
# Parameters and activations of a sample in MiB, as Table 1 has them.
TABLE_1: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"resnet101": (170, 198), "amoebanet-d18": (476, 432), "amoebanet-d36": (900, 697), "bert-large": (1153, 263)}
)
DEGREES = (1, 2, 4, 8, 16, 32)
FACTORS = (1.0, 2.0, 4.0, 8.0, 20.0)
FUNCPIPE, OURS = "FuncPipe", "Springtide"
RIVALS = ("TPDMP", "TPDMP, one replica", "Bayes")
# The exchange that each of the two pipelines runs.
COLLECTIVES: Mapping[str, Collective] = MappingProxyType({FUNCPIPE: "funcpipe", OURS: "duplex"})
_MB_PER_GB = 1024.0


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train: a step's time and price, and what runs. `delta` as in section 5.1; `plan` of pipelines only.

    `cost_usd` is that of the functions and of a parameter server, where there is one (equation 6), without requests.
    """

    method: str
    model: str
    global_batch_size: int
    step_s: float
    cost_usd: float
    num_functions: int
    memory_mb: int
    computation_s: float
    sync_s: float
    flush_s: float = 0.0
    alpha_2: float | None = None
    is_recommended: bool = False
    plan: FunctionPlan | None = None


@cache
def measured_profile(model: str) -> ModelProfile:
    """The model's layers as measured on one core (docs/results say where), micro-batches of 4."""
    data = importlib.resources.files("springtide_studies.funcpipe").joinpath("profiles", f"{model}.json").read_bytes()
    return msgspec.json.decode(data, type=ModelProfile)


def lambda_profile(
    model: str,
    *,
    service: FunctionService | None = None,
    has_table_1_activations: bool = False,
    core_speed: float = 1.0,
) -> ModelProfile:
    """The same on Lambda's memory sizes, whose vCPU computes `core_speed` times as fast as the core that measured.

    With `has_table_1_activations` every layer's activations are scaled so that they add up to what Table 1 says.
    """
    profile = measured_profile(model)
    if has_table_1_activations:
        held = sum(layer.activation_bytes for layer in profile.layers) / profile.micro_batch_size
        factor = TABLE_1[model][1] * (1 << 20) / held
        layers = tuple(
            msgspec.structs.replace(layer, activation_bytes=round(layer.activation_bytes * factor))
            for layer in profile.layers
        )
        profile = msgspec.structs.replace(profile, layers=layers, source=f"{profile.source}; activations of Table 1")
    return scaled_profile(profile, service or aws_lambda(), core_speed=core_speed)


def pipeline_points(profile: ModelProfile, global_batch_size: int, method: str) -> list[Point]:
    """The best plans under the four pairs of weights of section 5.1, the recommended one marked."""
    planner = PipelinePlanner(
        profile,
        num_micro_batches_of(profile, global_batch_size),
        degrees=DEGREES,
        collective=COLLECTIVES[method],
    )
    planned = [planner.plan(weights) for weights in WEIGHTS]
    planned = with_deltas(planned, planned[0].estimate)
    chosen = recommended(planned)
    return [
        _point(method, profile, one.plan, one.estimate, one.weights[1], is_recommended=index == chosen)
        for index, one in enumerate(planned)
    ]


def recommended_point(points: Sequence[Point]) -> Point:
    """The one that is marked."""
    return next(point for point in points if point.is_recommended)


def num_micro_batches_of(profile: ModelProfile, global_batch_size: int) -> int:
    """M: how many micro-batches a step has."""
    return -(-global_batch_size // profile.micro_batch_size)


def baseline_points(profile: ModelProfile, global_batch_size: int) -> list[Point]:
    """The four ways without a pipeline; one that the model does not fit is left out."""
    found = (_baseline_point(name, profile, global_batch_size) for name in BASELINES)
    return [point for point in found if point is not None]


def _baseline_point(name: BaselineName, profile: ModelProfile, global_batch_size: int) -> Point | None:
    step = baseline_step(name, profile, global_batch_size)
    if step is None:
        return None
    return Point(
        method=name,
        model=profile.model,
        global_batch_size=global_batch_size,
        step_s=step.step_s,
        cost_usd=_usd(step.cost_mb_s) + step.server_usd,
        num_functions=step.num_workers,
        memory_mb=step.num_workers * step.memory_mb,
        computation_s=step.computation_s,
        sync_s=step.sync_s,
    )


def rival_points(
    profile: ModelProfile, global_batch_size: int, method: str, *, seeds: Sequence[int] = (0, 1, 2)
) -> list[Point]:
    """What one of RIVALS finds under each pair of weights, on the model and the exchange of FuncPipe as published.

    TPDMP searches its grid over degrees, too, or with one replica, as the published code does. Of Bayes the run in the
    middle of those by `seeds` is taken. Weights under which nothing that fits is found are left out.
    """
    degrees = (1,) if method == RIVALS[1] else DEGREES
    num_micro_batches = num_micro_batches_of(profile, global_batch_size)
    problem = problem_of(profile, num_micro_batches, degrees=degrees, collective="funcpipe")
    points = []
    for weights in WEIGHTS:
        if method == RIVALS[2]:
            runs = [bayes(problem, weights, seed=seed) for seed in seeds]
            fitting = sorted((run for run in runs if run is not None), key=lambda run: run.value)
            solution = fitting[len(fitting) // 2] if fitting else None
        else:
            solution = tpdmp(problem, weights)
        if solution is not None:
            plan = plan_of(solution.stages, solution.degree, profile, collective="funcpipe")
            points.append(_point(method, profile, plan, estimate_step(profile, plan), weights[1]))
    return points


def _scaled_link(service: FunctionService, factor: float) -> FunctionService:
    """The service with links `factor` times as fast (FuncPipe, section 5.8)."""
    sizes = [msgspec.structs.replace(size, bytes_per_s=size.bytes_per_s * factor) for size in service.sizes]
    return msgspec.structs.replace(service, sizes=tuple(sizes))


def at_bandwidth(model: str, factor: float) -> ModelProfile:
    """The model's profile on functions with links so many times as fast (section 5.8)."""
    return lambda_profile(model, service=_scaled_link(aws_lambda(), factor))


def _point(
    method: str,
    profile: ModelProfile,
    plan: FunctionPlan,
    estimate: PipelineStepEstimate,
    alpha_2: float,
    *,
    is_recommended: bool = False,
) -> Point:
    return Point(
        method=method,
        model=profile.model,
        global_batch_size=plan.num_replicas * plan.num_micro_batches * plan.micro_batch_size,
        step_s=estimate.step_s,
        cost_usd=_usd(estimate.cost_mb_s),
        num_functions=plan.num_functions,
        memory_mb=plan.memory_mb,
        computation_s=estimate.computation_s,
        sync_s=estimate.sync_s,
        flush_s=estimate.flush_s,
        alpha_2=alpha_2,
        is_recommended=is_recommended,
        plan=plan,
    )


def _usd(cost_mb_s: float) -> float:
    return cost_mb_s / _MB_PER_GB * aws_lambda().prices.usd_per_gb_s
