"""What runs on function services cost: usage times prices, and what a step of a plan is expected to use.

Functions are the smaller half of it where steps are short: each object on its way is a request, each look for one that
is not there yet is one, too, and both are priced here (FuncPipe's cost, equation 6, knows function time alone).
"""

from __future__ import annotations

import math

import msgspec

from springtide.core.functions import Bill, Collective, FunctionPlan, FunctionPrices, ModelProfile, Usage
from springtide.perf.functions.collective_time import requests_of

MB_PER_GB = 1024
BYTES_PER_GB = 1 << 30
# What providers call a month of storage: 730 hours.
SECONDS_PER_MONTH = 730 * 3600.0
SECONDS_PER_HOUR = 3600.0
# Counts of a step may be fractions (a state saved every tenth step), those of this many steps hardly are.
_MANY_STEPS = 1000


class PollPacing(msgspec.Struct, frozen=True, kw_only=True):
    """How a store is asked for a key that is not there yet: at once, then at intervals that grow up to the longest.

    The intervals are those of the store for an S3 API on average, which draws each between 0.75 of it and all of it.
    """

    first_s: float = 0.022
    growth: float = 1.1
    longest_s: float = 0.875


class StepHabits(msgspec.Struct, frozen=True, kw_only=True):
    """What a step asks of the stores beside its activations and gradients, and what a lifetime costs each function.

    Functions report at every step but not more often than `report_interval_s`, read the control record at every step
    and every `control_interval_s`; the coordinator reads every function's report every `read_interval_s`. A state is
    saved after every `save_every` steps; `num_states_kept` of them lie in the store. In a lifetime of `lifetime_s` a
    function works all but the `start_s` in which its successor warms up beside it. With a parameter store everything
    that travels goes through it, and waiting there is free.
    """

    save_every: int = 1
    num_states_kept: int = 2
    report_interval_s: float = 0.5
    control_interval_s: float = 1.0
    read_interval_s: float = 1.0
    lifetime_s: float = 900.0
    start_s: float = 5.0
    has_parameter_store: bool = False
    pacing: PollPacing = PollPacing()


class StepSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a step: what crosses each boundary between stages per micro-batch, and each stage's parameters.

    `state_factor` is a saved state over its parameters: with Adam two moments come on top.
    """

    activation_bytes: tuple[int, ...] = ()
    gradient_bytes: tuple[int, ...] = ()
    parameter_bytes: tuple[int, ...] = ()
    state_factor: float = 3.0


NO_SIZES = StepSizes()
USUAL_HABITS = StepHabits()


def bill_of(usage: Usage, prices: FunctionPrices, profiling_usage: Usage | None = None) -> Bill:
    """Price what was used. What profiling used, where it is given apart, becomes one item of its own."""
    profiling_usd = 0.0 if profiling_usage is None else bill_of(profiling_usage, prices).total_usd
    return Bill(
        function_usd=usage.function_gb_s * prices.usd_per_gb_s,
        invocation_usd=usage.num_invocations * prices.usd_per_invocation,
        request_usd=(usage.num_puts + usage.num_lists) * prices.usd_per_put + usage.num_gets * prices.usd_per_get,
        storage_usd=usage.stored_gb_s * prices.usd_per_stored_gb_month / SECONDS_PER_MONTH,
        parameter_store_usd=usage.parameter_store_s / SECONDS_PER_HOUR * prices.usd_per_parameter_store_hour,
        profiling_usd=profiling_usd,
    )


def gb_s_of(memory_mb: float, duration_s: float) -> float:
    """Function time as it is charged: memory in units of 1,024 MB, times seconds."""
    return memory_mb / MB_PER_GB * duration_s


def sizes_of(plan: FunctionPlan, profile: ModelProfile) -> StepSizes:
    """What the layers of a profile make of a plan's boundaries and stages. Micro-batches are scaled to the plan's."""
    scale = plan.micro_batch_size / profile.micro_batch_size
    layers = profile.layers
    inner = plan.stages[:-1]
    return StepSizes(
        activation_bytes=tuple(round(layers[stage.end_layer - 1].output_bytes * scale) for stage in inner),
        gradient_bytes=tuple(round(layers[stage.end_layer].gradient_bytes * scale) for stage in inner),
        parameter_bytes=tuple(
            sum(layer.parameter_bytes for layer in layers[stage.first_layer : stage.end_layer]) for stage in plan.stages
        ),
    )


def collective_requests(
    collective: Collective, num_ranks: int, num_chunks: int = 1, num_shards: int = 0
) -> tuple[float, float]:
    """Puts and gets of one rank in one all-reduce through a store, waiting left out: a rank's part of all ranks'.

    They are those of `sync_requests`; where ranks ask differently often (a server, fewer shards than ranks), the mean.
    """
    if num_ranks <= 1:
        return 0, 0
    puts, gets = requests_of(collective, num_ranks, num_chunks, num_shards)
    return puts / num_ranks, gets / num_ranks


def expected_polls(wait_s: float, pacing: PollPacing) -> float:
    """How many times a store is asked in vain during a wait of `wait_s`, at the growing intervals of `pacing`."""
    polls, asked_at_s, interval_s = 0.0, 0.0, pacing.first_s
    while asked_at_s < wait_s:
        if interval_s >= pacing.longest_s:
            return polls + math.ceil((wait_s - asked_at_s) / pacing.longest_s)
        polls += 1
        asked_at_s += interval_s
        interval_s = min(interval_s * pacing.growth, pacing.longest_s)
    return polls


def usage_of_steps(
    plan: FunctionPlan,
    step_s: float,
    sizes: StepSizes = NO_SIZES,
    habits: StepHabits = USUAL_HABITS,
    *,
    num_steps: int = 1,
) -> Usage:
    """What `num_steps` steps of `step_s` seconds use, in expectation: counts are rounded up once, at the end.

    A function's receiving lane waits all through the step, so its waits share the step among its objects: the polls
    are those of a step that is bound by others, the most there can be without a fault.
    """
    num_stages, num_replicas, num_micro = len(plan.stages), plan.num_replicas, plan.num_micro_batches
    moved = 2 * (num_stages - 1) * num_micro * num_replicas
    puts, gets = collective_requests(plan.collective, num_replicas, plan.num_chunks, plan.num_shards)
    wire_puts = moved + puts * plan.num_functions
    wire_gets = moved + gets * plan.num_functions
    polls = 0.0
    if not habits.has_parameter_store:
        for stage in range(num_stages):
            received = num_micro * ((stage > 0) + (stage < num_stages - 1)) + gets
            if received:
                polls += num_replicas * received * expected_polls(step_s / received, habits.pacing)
    else:
        wire_puts = wire_gets = 0
    functions = plan.num_functions
    reports = functions * min(1.0, step_s / habits.report_interval_s)
    controls = functions * max(1.0, step_s / habits.control_interval_s)
    read = functions * step_s / habits.read_interval_s
    saves = 2 * num_stages / habits.save_every
    lives = step_s / max(habits.lifetime_s - habits.start_s, 1e-9)
    warming_gb_s = lives * gb_s_of(plan.memory_mb, habits.start_s)
    # A hand-over: the successor's first look at control and job, the state there and back, a look at which functions
    # have left.
    handed = functions * lives
    return Usage(
        function_gb_s=num_steps * (gb_s_of(plan.memory_mb, step_s) + warming_gb_s),
        num_invocations=math.ceil(num_steps * handed),
        num_puts=math.ceil(num_steps * (wire_puts + reports + saves + 4 * handed)),
        num_gets=math.ceil(num_steps * (wire_gets + polls + controls + read + 6 * handed)),
        num_deletes=math.ceil(num_steps * (wire_puts + saves)),
        stored_gb_s=num_steps * _stored_gb(plan, sizes, habits) * step_s,
        parameter_store_s=num_steps * step_s if habits.has_parameter_store else 0.0,
    )


def step_usd(
    plan: FunctionPlan,
    prices: FunctionPrices,
    step_s: float,
    sizes: StepSizes = NO_SIZES,
    habits: StepHabits = USUAL_HABITS,
) -> float:
    """What one step of `step_s` seconds costs in US dollars, functions, requests and storage together."""
    usage = usage_of_steps(plan, step_s, sizes, habits, num_steps=_MANY_STEPS)
    return bill_of(usage, prices).total_usd / _MANY_STEPS


def usage_of_start(plan: FunctionPlan, start_s: float) -> Usage:
    """What it takes until the first step begins: every function's invocation, warm-up and first look around."""
    functions = plan.num_functions
    return Usage(
        function_gb_s=gb_s_of(plan.memory_mb, start_s),
        num_invocations=functions,
        num_puts=3 + 2 * functions,
        num_gets=functions * (4 + math.ceil(start_s)),
    )


def _stored_gb(plan: FunctionPlan, sizes: StepSizes, habits: StepHabits) -> float:
    """What lies in the object store at a time: the states that are kept, and a step's objects until they are gone."""
    states = habits.num_states_kept * sizes.state_factor * sum(sizes.parameter_bytes)
    moving = 0.0
    if not habits.has_parameter_store:
        crossing = sum(sizes.activation_bytes) + sum(sizes.gradient_bytes)
        moving = plan.num_replicas * plan.num_micro_batches * crossing
        if plan.num_replicas > 1:
            moving += plan.num_replicas * sum(sizes.parameter_bytes)
    return (states + moving) / BYTES_PER_GB
