"""The world of the co-scaling study: a served model on shares of a device, its cold start, and the scalers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from springtide.serving.co_scaler import CoScalerRules, CoScalerState, LoadSample, co_scale
from springtide_studies.dilu.eager_scaler import (
    EagerRules,
    EagerState,
    KeepAliveRules,
    KeepAliveState,
    keep_alive_of,
    scale_eagerly,
    scale_with_keep_alive,
)

MAX_REPLICAS = 16


def published_rules(throughput_per_s: float, minimum: int, maximum: int) -> CoScalerRules:
    """Return the rules of Dilu's prototype: `throughput_per_s` is what it profiles at a share's request.

    It always keeps a last replica, changes by one at a time, and has neither surges nor regrets.
    """
    return CoScalerRules(
        capacity_per_s=throughput_per_s,
        min_replicas=max(1, minimum),
        max_replicas=maximum,
        idle_s=math.inf,
        planned_fraction=1.0,
        num_surge=0,
        regret_s=0,
        is_stepwise=True,
    )


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served, after RoBERTa-large on an A100 as profiled for Dilu.

    A batch of b takes base + (fixed + b * item) / min(fraction, saturation + per_doubling * log2 b) seconds on that
    fraction of a device: fitted to the published profile for batches up to 8 (median error 4 %, at most 12 %).
    `request` and `limit` are its share, `batch_size` its profiled batch, `slo_s` its objective, of which half is for
    the batch. A device's other tenant is a training job that always wants more and is sure of `neighbour_fraction`.
    `reaction_s` is how long the vertical control takes to see that a batch runs (two ticks).
    A cold start is made of `schedule_s`, `load_s` (process, libraries and weights) and `first_answer_s`.
    """

    base_s: float = 0.0083
    fixed_s: float = 0.0003
    item_s: float = 0.0022
    saturation_fraction: float = 0.2
    saturation_per_doubling: float = 0.15
    request: float = 0.2
    limit: float = 0.4
    batch_size: int = 4
    slo_s: float = 0.12
    batch_wait_s: float = 0.02
    neighbour_fraction: float = 0.4
    reaction_s: float = 0.01
    schedule_s: float = 0.5
    load_s: float = 6.0
    first_answer_s: float = 0.5

    @property
    def cold_start_s(self) -> float:
        """From the decision until a replica can answer as fast as it always will."""
        return self.schedule_s + self.load_s + self.first_answer_s

    @property
    def reachable_limit(self) -> float:
        """The limit, or what the other tenant is not sure of."""
        return max(self.request, min(self.limit, 1.0 - self.neighbour_fraction))

    def batch_s(self, num_items: int, fraction: float) -> float:
        """How long a batch takes on that fraction of a device."""
        usable = self.saturation_fraction + self.saturation_per_doubling * math.log2(num_items)
        return self.base_s + (self.fixed_s + num_items * self.item_s) / min(fraction, usable)

    def capacity_per_s(self, fraction: float) -> float:
        """Requests a second in full batches, one after the other, on that fraction of a device."""
        return self.batch_size / self.batch_s(self.batch_size, fraction)


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What profiling tells all contenders alike: requests a second that one replica answers within the objective.

    Poisson arrivals, at most 1 % late; on a static share of the request, and from request to limit.
    """

    request_per_s: float
    limit_per_s: float


class Scaler(Protocol):
    """Says how many replicas are wanted, once a second."""

    def look(self, look: LoadSample) -> int:
        """Observe one second; returns the number of replicas wanted."""
        ...


class ScalingArm(msgspec.Struct, frozen=True, kw_only=True):
    """One way to scale a service: its rule, its share while it runs (`fraction` None: from request to limit)."""

    name: str
    what: str
    make: Callable[[Profile, Sequence[float]], Scaler]
    fraction: Callable[[ServedModel], float] | None = None
    min_replicas: int = 1


class CoScaling:
    """The co-scaler over the seconds of one run."""

    def __init__(self, rules: CoScalerRules) -> None:
        self._rules = rules
        self._state = CoScalerState(wanted=rules.min_replicas)

    def look(self, look: LoadSample) -> int:
        """See Scaler."""
        self._state, advice = co_scale(self._rules, self._state, look)
        return advice.wanted


class Eager:
    """The reactive rival over the seconds of one run."""

    def __init__(self, rules: EagerRules) -> None:
        self._rules = rules
        self._state = EagerState(wanted=rules.min_replicas)

    def look(self, look: LoadSample) -> int:
        """See Scaler."""
        self._state = scale_eagerly(self._rules, self._state, look.rate_per_s)
        return self._state.wanted


class KeepAlive:
    """The rival with prior knowledge over the seconds of one run."""

    def __init__(self, rules: KeepAliveRules) -> None:
        self._rules = rules
        self._state = KeepAliveState()

    def look(self, look: LoadSample) -> int:
        """See Scaler."""
        self._state = scale_with_keep_alive(self._rules, self._state, look.rate_per_s)
        return self._state.wanted


def at_request(model: ServedModel) -> float:
    """A static share as large as the request."""
    return model.request


def at_limit(model: ServedModel) -> float:
    """A static share as large as the limit."""
    return model.limit


def ours(capacity_per_s: float, *, minimum: int = 1, **changes: float) -> CoScaling:
    """The platform's co-scaler with its own rules, but for `changes`."""
    rules = CoScalerRules(capacity_per_s=capacity_per_s, min_replicas=minimum, max_replicas=MAX_REPLICAS)
    return CoScaling(msgspec.structs.replace(rules, **changes))


def eager(throughput_per_s: float, *, minimum: int = 1, window: int = 10, period: int = 2) -> Eager:
    """FaST-GS+ with what a replica does on its static share."""
    return Eager(
        EagerRules(
            throughput_per_s=throughput_per_s,
            min_replicas=minimum,
            max_replicas=MAX_REPLICAS,
            window=window,
            period=period,
        )
    )


def _kept_alive(profile: Profile, rates: Sequence[float]) -> KeepAlive:
    return KeepAlive(
        KeepAliveRules(
            throughput_per_s=profile.request_per_s, keep_alive_s=keep_alive_of(rates), max_replicas=MAX_REPLICAS
        )
    )


OURS, EAGER = "springtide", "fast-gs+"

ARMS = (
    ScalingArm(
        name=OURS,
        what="lazy, a surge above the limits at once, from request to limit",
        make=lambda profile, _: ours(profile.limit_per_s),
    ),
    ScalingArm(
        name="dilu",
        what="lazy as published: plans at the request, one at a time, from request to limit",
        make=lambda profile, _: CoScaling(published_rules(profile.request_per_s, 1, MAX_REPLICAS)),
    ),
    ScalingArm(
        name=EAGER,
        what="reactive: mean of 10 s every 2 s, static share of the request",
        make=lambda profile, _: eager(profile.request_per_s),
        fraction=at_request,
    ),
    ScalingArm(
        name="fast-gs+-l",
        what="the same with a static share of the limit: twice the device for each replica",
        make=lambda profile, _: eager(profile.limit_per_s),
        fraction=at_limit,
    ),
    ScalingArm(
        name="fast-gs+-1s",
        what="the same on the request, every second by the last second",
        make=lambda profile, _: eager(profile.request_per_s, window=1, period=1),
        fraction=at_request,
    ),
    ScalingArm(
        name="infless+",
        what="reactive with keep-alive learnt from the whole trace, to zero, static share of the request",
        make=_kept_alive,
        fraction=at_request,
        min_replicas=0,
    ),
    ScalingArm(
        name="springtide-static",
        what="ours without vertical scaling: static share of the request, planned with that",
        make=lambda profile, _: ours(profile.request_per_s),
        fraction=at_request,
    ),
    ScalingArm(
        name="springtide-patient",
        what="ours without the rule for surges",
        make=lambda profile, _: ours(profile.limit_per_s, num_surge=0),
    ),
    ScalingArm(
        name="springtide-to-zero",
        what="ours, from zero and to zero after 30 s",
        make=lambda profile, _: ours(profile.limit_per_s, minimum=0),
        min_replicas=0,
    ),
    ScalingArm(
        name="fast-gs+-to-zero",
        what="reactive, from zero and to zero after 10 s",
        make=lambda profile, _: eager(profile.request_per_s, minimum=0),
        fraction=at_request,
        min_replicas=0,
    ),
)
