"""How many replicas a service wants, scaled lazily: bursts use the shares' limits, lasting load starts replicas."""

from __future__ import annotations

import math

import msgspec

from springtide.core.workload import InferenceService


class CoScalerRules(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of the co-scaler: those of Dilu (section 3.4.2) with its values, and our additions.

    `capacity_per_s` is how many requests a second one replica answers within the objective at the limit of its share.
    A replica is planned to carry `planned_fraction` of that for long; load above it is left to vertical scaling.

    The load is sampled once a second. If `num_above` of the last `window` samples are above the planned load of all
    replicas, more replicas are wanted; if more than `num_below` samples since the last change are below the planned
    load of one replica fewer, one fewer is wanted. After `idle_s` without requests, the minimum is wanted. Our
    additions: `num_surge` consecutive samples above what all replicas can answer at their limits ask for more at once
    (0: off). And after a service had to start a replica within `regret_s` seconds of stopping one, it stops the next
    one later: one replica fewer must have been enough for `first_hold_s`, after each further regret for twice as long,
    up to `max_hold_s` (`regret_s` 0: off).

    `is_stepwise` is the published prototype: one more at a time, and the window starts again after each change.
    """

    capacity_per_s: float
    min_replicas: int = 0
    max_replicas: int = 1
    idle_s: float = 30.0
    planned_fraction: float = 0.8
    window: int = 40
    num_above: int = 20
    num_below: int = 30
    num_surge: int = 2
    regret_s: int = 200
    first_hold_s: int = 120
    max_hold_s: int = 320
    is_stepwise: bool = False

    @property
    def planned_per_s(self) -> float:
        """The planned lasting load of a replica, in requests a second."""
        return self.planned_fraction * self.capacity_per_s


class CoScalerState(msgspec.Struct, frozen=True, kw_only=True):
    """The co-scaler's state. In the initial state `wanted` is the number of running replicas.

    `rates_per_s` are the latest samples of requests a second, `loads_per_s` the same plus queued requests, oldest
    first; `num_seen` counts samples since the last change, `num_spare` consecutive samples at which one replica fewer
    would have been enough, `hold_s` how many of these are needed to stop one; `stopped_s` are the ages of recent stops.
    """

    wanted: int = 0
    rates_per_s: tuple[float, ...] = ()
    loads_per_s: tuple[float, ...] = ()
    num_seen: int = 0
    num_spare: int = 0
    hold_s: int = 1
    stopped_s: tuple[int, ...] = ()


class LoadSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a service's load: requests in the last second, queued requests, and seconds without any request."""

    rate_per_s: float
    num_queued: int = 0
    idle_s: float = 0.0


class ScalerAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas are wanted, with the reason as part of a sentence if the number has changed."""

    wanted: int
    reason: str = ""


def rules_of(service: InferenceService) -> CoScalerRules | None:
    """Return the rules for a service; None if the capacity of its replicas is not known."""
    if service.capacity_per_s is None:
        return None
    return CoScalerRules(
        capacity_per_s=service.capacity_per_s,
        min_replicas=service.min_replicas,
        max_replicas=service.max_replicas,
        idle_s=service.idle_s,
    )


def co_scale(rules: CoScalerRules, state: CoScalerState, sample: LoadSample) -> tuple[CoScalerState, ScalerAdvice]:
    """Return the next state and the number of wanted replicas after one more sample. Deterministic."""
    now = _bounded(rules, state.wanted)
    state = msgspec.structs.replace(
        state,
        rates_per_s=(*state.rates_per_s, sample.rate_per_s)[-max(1, rules.num_surge) :],
        # Queued requests count again in each sample: that is how a capacity that was profiled too high shows.
        loads_per_s=(*state.loads_per_s, sample.rate_per_s + sample.num_queued)[-rules.window :],
        num_seen=state.num_seen + 1,
        stopped_s=tuple(age_s + 1 for age_s in state.stopped_s if age_s < rules.regret_s),
    )
    since = state.loads_per_s[-state.num_seen :]
    is_spare = now > 1 and _is_enough(rules, since, (now - 1) * rules.planned_per_s)
    state = msgspec.structs.replace(state, num_spare=state.num_spare + 1 if is_spare else 0)
    wanted, reason = _choose(rules, state, now, sample)
    wanted = _bounded(rules, wanted)
    has_changed = wanted != state.wanted
    return _after(rules, state, now, wanted), ScalerAdvice(wanted=wanted, reason=reason if has_changed else "")


def _choose(rules: CoScalerRules, state: CoScalerState, now: int, sample: LoadSample) -> tuple[int, str]:
    """The wanted replicas, before bounds, and the reason."""
    is_quiet = sample.rate_per_s == 0 and sample.num_queued == 0
    if now == 0:
        if is_quiet:
            return 0, ""
        return max(1, math.ceil(sample.rate_per_s / rules.capacity_per_s)), "requests wait and no replica runs"
    if is_quiet and sample.idle_s >= rules.idle_s:
        return rules.min_replicas, f"nobody has asked for {sample.idle_s:.0f} s"
    surge = state.rates_per_s
    if len(surge) == rules.num_surge and min(surge) > now * rules.capacity_per_s:
        wanted = max(now + 1, math.ceil(math.fsum(surge) / len(surge) / rules.capacity_per_s))
        return wanted, f"{surge[-1]:.0f} requests/s are more than {now} can answer in time at their limits"
    loads = state.loads_per_s
    if _num_above(loads, now * rules.planned_per_s) >= rules.num_above:
        wanted = now + 1
        while not rules.is_stepwise and _num_above(loads, wanted * rules.planned_per_s) >= rules.num_above:
            wanted += 1
        return wanted, f"over {now * rules.planned_per_s:.0f} requests/s in {rules.num_above} of {len(loads)} s"
    if state.num_spare >= state.hold_s:
        wanted = now - 1
        return (
            wanted,
            f"under {wanted * rules.planned_per_s:.0f} requests/s in over {rules.num_below} of {len(loads)} s",
        )
    return now, ""


def _after(rules: CoScalerRules, state: CoScalerState, now: int, wanted: int) -> CoScalerState:
    """The state after the choice: a change restarts the count, and a start soon after a stop lengthens `hold_s`."""
    if wanted == now:
        return msgspec.structs.replace(state, wanted=wanted)
    hold_s, stopped_s = state.hold_s, state.stopped_s
    if wanted > now and stopped_s:
        hold_s, stopped_s = min(rules.max_hold_s, max(rules.first_hold_s, 2 * hold_s)), ()
    elif 0 < wanted < now:
        stopped_s = (*stopped_s, 0)
    if wanted == 0:
        # Samples from before a scale to zero say nothing about the load after it.
        return CoScalerState()
    loads = () if rules.is_stepwise else state.loads_per_s
    return msgspec.structs.replace(
        state, wanted=wanted, loads_per_s=loads, num_seen=0, num_spare=0, hold_s=hold_s, stopped_s=stopped_s
    )


def _num_above(loads: tuple[float, ...], rate_per_s: float) -> int:
    return sum(1 for load in loads if load > rate_per_s)


def _is_enough(rules: CoScalerRules, loads: tuple[float, ...], rate_per_s: float) -> bool:
    num_below = sum(1 for load in loads if load < rate_per_s)
    # The paper says "more than 30 values"; its prototype uses 30 or more.
    return num_below >= rules.num_below if rules.is_stepwise else num_below > rules.num_below


def _bounded(rules: CoScalerRules, count: int) -> int:
    return max(rules.min_replicas, min(rules.max_replicas, count))
