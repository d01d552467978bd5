"""The cost of runs on function services: usage times prices, and the expected usage of a step of a plan.

With short steps, requests cost more than function time: each transferred object is a request, and so is each poll for
one that does not exist yet. Both are priced here, while FuncPipe's cost (equation 6) has function time only.
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
# Counts per step may be fractional (a state saved every tenth step), so costs are computed over this many steps.
_MANY_STEPS = 1000


class PollPacing(msgspec.Struct, frozen=True, kw_only=True):
    """How a store is polled for a key: at once, then at growing intervals up to the longest.

    These are the mean intervals of the S3 store, which draws each between 0.75 and 1 of its length.
    """

    first_s: float = 0.022
    growth: float = 1.1
    longest_s: float = 0.875


class StepHabits(msgspec.Struct, frozen=True, kw_only=True):
    """How often functions make requests besides those for activations and gradients, and how long they live.

    Functions report at every step, but at most every `report_interval_s`, and read the control record at every step and
    every `control_interval_s`; the coordinator reads every function's report every `read_interval_s`. A state is saved
    after every `save_every` steps; `num_states_kept` of them are stored. Of its `lifetime_s` a function works all but
    the `start_s` in which its successor warms up. With a parameter store all transfers go through it, and waiting there
    costs no requests.
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
    """Bytes of a step: transfers across each boundary between stages per micro-batch, and each stage's parameters.

    `state_factor` is the size of a saved state over that of its parameters: Adam adds two moments.
    """

    activation_bytes: tuple[int, ...] = ()
    gradient_bytes: tuple[int, ...] = ()
    parameter_bytes: tuple[int, ...] = ()
    state_factor: float = 3.0


NO_SIZES = StepSizes()
USUAL_HABITS = StepHabits()


def bill_of(usage: Usage, prices: FunctionPrices, profiling_usage: Usage | None = None) -> Bill:
    """Price usage. The usage of profiling, if given, becomes a separate item."""
    profiling_usd = 0.0 if profiling_usage is None else bill_of(profiling_usage, prices).total_usd
    return Bill(
        function_usd=usage.function_gb_s * prices.usd_per_gb_s,
        invocation_usd=usage.num_invocations * prices.usd_per_invocation,
        request_usd=(usage.num_puts + usage.num_lists) * prices.usd_per_put + usage.num_gets * prices.usd_per_get,
        storage_usd=usage.stored_gb_s * prices.usd_per_stored_gb_month / SECONDS_PER_MONTH,
        parameter_store_usd=usage.parameter_store_s / SECONDS_PER_HOUR * prices.usd_per_parameter_store_hour,
        profiling_usd=profiling_usd,
        machines_usd=usage.machines_usd,
    )


def gb_s_of(memory_mb: float, duration_s: float) -> float:
    """Charged function time: memory in units of 1,024 MB, times seconds."""
    return memory_mb / MB_PER_GB * duration_s


def sizes_of(plan: FunctionPlan, profile: ModelProfile) -> StepSizes:
    """The sizes of a plan's boundaries and stages from a profile, scaled to the plan's micro-batches."""
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
    """Puts and gets of one rank in one all-reduce through a store, without polls.

    The mean over all ranks, which differ with a server or with fewer shards than ranks.
    """
    if num_ranks <= 1:
        return 0, 0
    puts, gets = requests_of(collective, num_ranks, num_chunks, num_shards)
    return puts / num_ranks, gets / num_ranks


def expected_polls(wait_s: float, pacing: PollPacing) -> float:
    """The number of unsuccessful polls during a wait of `wait_s`."""
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
    """The expected usage of `num_steps` steps of `step_s` seconds; counts are rounded up once, at the end.

    The download lane of a function is assumed to wait during the whole step, divided among its objects. This is an
    upper bound of the polls of a step without faults.
    """
    num_stages, num_replicas, num_micro = len(plan.stages), plan.num_replicas, plan.num_micro_batches
    transfers = 2 * (num_stages - 1) * num_micro * num_replicas
    puts, gets = collective_requests(plan.collective, num_replicas, plan.num_chunks, plan.num_shards)
    wire_puts = transfers + puts * plan.num_functions
    wire_gets = transfers + gets * plan.num_functions
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
    lifetimes = step_s / max(habits.lifetime_s - habits.start_s, 1e-9)
    warming_gb_s = lifetimes * gb_s_of(plan.memory_mb, habits.start_s)
    # A handover: the successor reads control record and job, the state is saved and loaded, and functions check which
    # ones have left.
    handovers = functions * lifetimes
    return Usage(
        function_gb_s=num_steps * (gb_s_of(plan.memory_mb, step_s) + warming_gb_s),
        num_invocations=math.ceil(num_steps * handovers),
        num_puts=math.ceil(num_steps * (wire_puts + reports + saves + 4 * handovers)),
        num_gets=math.ceil(num_steps * (wire_gets + polls + controls + read + 6 * handovers)),
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
    """The cost of one step of `step_s` seconds in US dollars: functions, requests and storage."""
    usage = usage_of_steps(plan, step_s, sizes, habits, num_steps=_MANY_STEPS)
    return bill_of(usage, prices).total_usd / _MANY_STEPS


def usage_of_start(plan: FunctionPlan, start_s: float) -> Usage:
    """The usage until the first step begins: invocations, warm-up and first reads of every function."""
    functions = plan.num_functions
    return Usage(
        function_gb_s=gb_s_of(plan.memory_mb, start_s),
        num_invocations=functions,
        num_puts=3 + 2 * functions,
        num_gets=functions * (4 + math.ceil(start_s)),
    )


def _stored_gb(plan: FunctionPlan, sizes: StepSizes, habits: StepHabits) -> float:
    """The mean size of stored objects: the states that are kept, and the objects of a step until they are deleted."""
    states = habits.num_states_kept * sizes.state_factor * sum(sizes.parameter_bytes)
    in_transit = 0.0
    if not habits.has_parameter_store:
        crossing = sum(sizes.activation_bytes) + sum(sizes.gradient_bytes)
        in_transit = plan.num_replicas * plan.num_micro_batches * crossing
        if plan.num_replicas > 1:
            in_transit += plan.num_replicas * sum(sizes.parameter_bytes)
    return (states + in_transit) / BYTES_PER_GB
