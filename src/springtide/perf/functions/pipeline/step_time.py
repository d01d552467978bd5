"""Time and memory of a step of a pipeline of functions: FuncPipe's model, equation by equation.

Indices start at 0: layer i is the paper's layer i + 1. Written to be compared with the paper, not for speed.
"""

from __future__ import annotations

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.core.functions import MIB, Collective, FunctionPlan, FunctionStage, ModelProfile
from springtide.perf.functions.collective_time import sync_time_s

NUM_CHUNKS = 4
NUM_IN_FLIGHT = 4
# The number of ratios of transfer time to latency at which slopes are computed, a quarter of a power of two apart, and
# the step of the finite difference.
_NUM_RATIOS = 80
_LONGER = 1.0 + 2.0**-10


class SyncRule(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a gradient exchange among a stage's replicas (equation 9): gamma transfers plus delta latencies.

    `others` are further pairs (gamma, delta); the time is the maximum over all pairs.
    """

    gamma: float
    delta: float
    others: tuple[tuple[float, float], ...] = ()

    @property
    def pairs(self) -> tuple[tuple[float, float], ...]:
        """All (gamma, delta)."""
        return ((self.gamma, self.delta), *self.others)

    def seconds(self, num_bytes: float, bytes_per_s: float, latency_s: float) -> float:
        """Seconds of an exchange of `num_bytes` over links of this speed."""
        return max(num_bytes / bytes_per_s * gamma + latency_s * delta for gamma, delta in self.pairs)


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: seconds per micro-batch, seconds of the exchange after the last one, and bytes of memory.

    `end_s` is when the stage finishes the step (t_f + t_b + t_s), from the step's start.
    """

    forward_s: float
    backward_s: float
    upload_s: float
    download_s: float
    gradient_upload_s: float
    gradient_download_s: float
    sync_s: float
    end_s: float
    memory_bytes: float


class PipelineStepEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted step: `step_s` (t_iter), `memory_mb` of all functions (c_mem), `cost_mb_s` (c_iter with P = 1).

    The parts are those of figure 6, for the stage that ends last: `computation_s`, `sync_s`, and `flush_s`, the time
    without either. They add up to `step_s`.
    """

    step_s: float
    memory_mb: int
    cost_mb_s: float
    forward_s: float
    computation_s: float
    flush_s: float
    sync_s: float
    stages: tuple[StageTimes, ...]


def sync_rule(
    collective: Collective, num_replicas: int, num_chunks: int = NUM_CHUNKS, num_in_flight: int = NUM_IN_FLIGHT
) -> SyncRule:
    """Gamma and delta of equation 9 among `num_replicas` (d) functions; a single one exchanges nothing.

    LambdaML's three phases are equation 1, FuncPipe's pipelined ones equation 2; SMLT's shards, as many as workers, go
    through the store even to their own aggregator: 3 + 1/d. The other collectives are timed as the communicator
    executes them: their times are convex and piecewise linear in transfer time and latency, so the slopes at a few
    ratios of the two describe them completely.
    """
    if num_replicas <= 1:
        return SyncRule(gamma=0.0, delta=0.0)
    d = float(num_replicas)
    match collective:
        case "lambdaml":
            return SyncRule(gamma=3.0 - 2.0 / d, delta=4.0)
        case "funcpipe":
            return SyncRule(gamma=2.0, delta=2.0 + d)
        case "smlt":
            return SyncRule(gamma=3.0 + 1.0 / d, delta=4.0)
        case _:

            def seconds(transfer_s: float, latency_s: float) -> float:
                return sync_time_s(collective, num_replicas, transfer_s, 1.0, latency_s, num_chunks, num_in_flight)

            found: dict[tuple[float, float], None] = {}
            for number in range(-_NUM_RATIOS // 2, _NUM_RATIOS // 2):
                transfer_s = 2.0 ** (number / 4) * num_replicas * num_chunks
                once, longer = seconds(transfer_s, 1.0), seconds(transfer_s * _LONGER, 1.0)
                gamma = (longer - once) / (transfer_s * _LONGER - transfer_s)
                found[(round(gamma, 8), round(once - gamma * transfer_s, 5))] = None
            (gamma, delta), *others = found
            return SyncRule(gamma=gamma, delta=delta, others=tuple(others))


def memory_bytes(
    profile: ModelProfile, first_layer: int, end_layer: int, num_micro_batches: int, num_replicas: int
) -> float:
    """Memory of a function with these layers, in bytes: the left side of equation 3b, with y_1 = 1 for one replica."""
    layers = profile.layers[first_layer:end_layer]
    activations = sum(layer.activation_bytes for layer in layers)
    parameters = sum(layer.parameter_bytes for layer in layers)
    return float(num_micro_batches * activations + parameters * (2 if num_replicas == 1 else 4) + profile.base_bytes)


def estimate_step(profile: ModelProfile, plan: FunctionPlan, sync: SyncRule | None = None) -> PipelineStepEstimate:
    """Equations 3b and 4 to 11 for one plan; `sync` replaces the rule of the plan's collective.

    Raises InvalidRequest if the plan is not for this profile, or a stage does not fit its functions' memory.
    """
    _check(profile, plan)
    rule = sync_rule(plan.collective, plan.num_replicas, plan.num_chunks, plan.num_in_flight) if sync is None else sync
    layers, latency_s, mu = profile.layers, profile.latency_s, plan.num_micro_batches
    num_layers = len(layers)
    # x_i: whether the model is cut after layer i. z_ij: layer i's functions have the j-th memory size.
    lowest = [stage.first_layer for stage in plan.stages]
    cut = [i + 1 in lowest for i in range(num_layers)]
    size = [profile.memory_mb.index(stage.memory_mb) for stage in plan.stages for _ in _layers_of(stage)]
    bandwidth = [profile.bytes_per_s[j] for j in size]
    forward = [profile.slowdown * _known(layers[i].forward_s[size[i]]) for i in range(num_layers)]
    backward = [profile.slowdown * _known(layers[i].backward_s[size[i]]) for i in range(num_layers)]

    ups, downs, gradient_ups, gradient_downs = _crossings(profile, cut, bandwidth)

    # t_f: the time of the first micro-batch through all stages, then the lag of each further one.
    lag_forward = max([*_hat(forward, cut), *ups, *downs])
    forward_s = sum(forward) + sum(ups) + sum(downs) + (mu - 1) * lag_forward

    # Equations 9 to 11, from the last layer down.
    tilde_backward = _tilde(backward, cut)
    tilde_parameters = _tilde([float(layer.parameter_bytes) for layer in layers], cut)
    ends = []
    syncs = []
    for i in range(num_layers):
        above = [*gradient_ups[i + 1 :], *gradient_downs[i + 1 :]]
        lag_backward = max([*tilde_backward[i:], *above])
        backward_s = sum(backward[i:]) + sum(above) + (mu - 1) * lag_backward
        alone = plan.num_replicas == 1
        syncs.append(0.0 if alone else rule.seconds(tilde_parameters[i], bandwidth[i], latency_s))
        ends.append(forward_s + backward_s + syncs[i])

    # Equations 5 to 7.
    step_s = max(ends)
    stages = tuple(
        StageTimes(
            forward_s=sum(forward[stage.first_layer : stage.end_layer]),
            backward_s=sum(backward[stage.first_layer : stage.end_layer]),
            upload_s=ups[stage.end_layer - 1],
            download_s=downs[stage.first_layer - 1] if stage.first_layer else 0.0,
            gradient_upload_s=gradient_ups[stage.first_layer],
            gradient_download_s=gradient_downs[stage.end_layer] if stage.end_layer < num_layers else 0.0,
            sync_s=syncs[stage.first_layer],
            end_s=ends[stage.first_layer],
            memory_bytes=memory_bytes(profile, stage.first_layer, stage.end_layer, mu, plan.num_replicas),
        )
        for stage in plan.stages
    )
    last = max(stages, key=lambda stage: stage.end_s)
    computation_s = mu * (last.forward_s + last.backward_s)
    return PipelineStepEstimate(
        step_s=step_s,
        memory_mb=plan.memory_mb,
        cost_mb_s=step_s * plan.memory_mb,
        forward_s=forward_s,
        computation_s=computation_s,
        flush_s=step_s - computation_s - last.sync_s,
        sync_s=last.sync_s,
        stages=stages,
    )


def objective(estimate: PipelineStepEstimate, weights: tuple[float, float]) -> float:
    """Equation 3a with weights (alpha_1, alpha_2): MB s, plus seconds times alpha_2."""
    return weights[0] * estimate.cost_mb_s + weights[1] * estimate.step_s


def _crossings(
    profile: ModelProfile, cut: list[bool], bandwidth: list[float]
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Equation 8 and appendix B: t_fu, t_fd, t_bu, t_bd, each by the paper's layer; 0 where the model is not cut."""
    layers, latency_s = profile.layers, profile.latency_s
    ups, downs, gradient_ups, gradient_downs = ([0.0] * len(layers) for _ in range(4))
    for i in range(len(layers) - 1):
        if cut[i]:
            ups[i] = layers[i].output_bytes / bandwidth[i] + latency_s
            downs[i] = layers[i].output_bytes / bandwidth[i + 1] + latency_s
            gradient_ups[i + 1] = layers[i + 1].gradient_bytes / bandwidth[i + 1] + latency_s
            gradient_downs[i + 1] = layers[i + 1].gradient_bytes / bandwidth[i] + latency_s
    return ups, downs, gradient_ups, gradient_downs


def _hat(values: list[float], cut: list[bool]) -> list[float]:
    """Equation 4: sums within each stage, upwards."""
    sums: list[float] = []
    for i, value in enumerate(values):
        sums.append(value + (0.0 if i == 0 or cut[i - 1] else sums[i - 1]))
    return sums


def _tilde(values: list[float], cut: list[bool]) -> list[float]:
    """Equation 10: sums within each stage, downwards."""
    sums = list(values)
    for i in range(len(values) - 2, -1, -1):
        sums[i] = values[i] + (0.0 if cut[i] else sums[i + 1])
    return sums


def _layers_of(stage: FunctionStage) -> range:
    return range(stage.first_layer, stage.end_layer)


def _known(seconds: float | None) -> float:
    assert seconds is not None, "_check has refused sizes that a layer was not measured on"
    return seconds


def _check(profile: ModelProfile, plan: FunctionPlan) -> None:
    """Raise InvalidRequest for plans that the model does not cover."""
    if plan.stages[-1].end_layer != len(profile.layers):
        raise InvalidRequest(
            f"the plan is for {plan.stages[-1].end_layer} layers, the profile of {profile.model} has "
            f"{len(profile.layers)}; plan again with this profile"
        )
    for number, stage in enumerate(plan.stages):
        if stage.memory_mb not in profile.memory_mb:
            sizes = ", ".join(str(size) for size in profile.memory_mb)
            raise InvalidRequest(f"stage {number} asks for {stage.memory_mb} MB; the profile knows {sizes} MB")
        j = profile.memory_mb.index(stage.memory_mb)
        for i in _layers_of(stage):
            layer = profile.layers[i]
            if layer.forward_s[j] is None or layer.backward_s[j] is None:
                raise InvalidRequest(
                    f"layer {i} ({layer.name}) does not fit {stage.memory_mb} MB; give stage {number} more memory"
                )
        needed = memory_bytes(profile, stage.first_layer, stage.end_layer, plan.num_micro_batches, plan.num_replicas)
        if needed > stage.memory_mb * MIB:
            raise InvalidRequest(
                f"stage {number} needs {needed / MIB:.0f} MB and has {stage.memory_mb} MB; give it more memory, "
                "or fewer layers or micro-batches"
            )
