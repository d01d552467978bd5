"""The tide of inference: functions that owners submit and end over the days, each with its bounds, and their load.

The shape is FaPES's Figure 1 (SoCC'24): of a pool that is sized for the peak 95 % is allocated by day and 41.2 % of
that used, by night 86.3 % and 10 %. What is truly needed at night is then 22 % of what is needed by day. The figure
gives no hours; those here are the waking hours of a shop's customers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.errors import InvalidRequest
from springtide.core.events import CancelRequested, Event, LoadObserved, ServiceDeployed
from springtide.core.workload import DEFAULT_GRACE_S, Entrypoint, InferenceService, WorkloadId
from springtide_studies.workloads.generators import DAY_S

# FaPES, Figure 1: allocated times used, by night and by day.
NIGHT_FRACTION = (0.863 * 0.100) / (0.950 * 0.412)
# FaPES, section 3.2: a function that is given 8 workers at least and 12 at most.
MAX_OVER_MIN = 12 / 8
MAX_DEVICES = 100_000
MAX_DAYS = 400
# Hours of the day: the night ends, the day begins, the evening begins, and the next night.
_HOURS = (6.0, 11.0, 21.0, 27.0)
_BINS_PER_DAY = 96
# Owners' minimums, in means: some functions are small, some large.
_SIZES = (0.5, 0.75, 1.0, 1.0, 1.75)
# A day begins and ends earlier or later by about this much of it: 15 minutes.
_SHIFT_DAYS = 1.0 / 96.0
# A surge lasts 30 to 90 minutes and needs so much of the peak on top of what is needed anyway.
_SURGE_DAYS, _SURGE_FRACTION = (30.0 / 1440.0, 90.0 / 1440.0), (0.3, 0.6)
# A function's load is this much of its minimum, give or take; it forgets where it was within half an hour.
_LOAD_MEAN, _LOAD_DEVIATION, _LOAD_MEMORY_DAYS = 0.8, 0.2, 1.0 / 48.0
_LOADS_PER_DAY = 288
_ANSWER_S = 0.1
_SOURCE = Entrypoint(source_path="trace", object_name="Serve", kind="class")

Floats = NDArray[np.float64]


class TidalSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A tide to be drawn. `num_servers` is the paper's N_r^max: what all minimums together need at the highest tide.

    `num_functions` are about as many as are deployed then: their minimums grow in proportion with `num_servers`, as in
    section 7.2. Days are as high as each other but for `noise_fraction` (a standard deviation), weekends (the sixth and
    seventh day) are as high as `weekend_fraction` of a workday. `surges_per_day` happen at any hour, on average, and
    never need more than the highest tide. `day_s` is the length of a day in seconds. One replica holds one device.
    """

    num_servers: int
    days: int = 3
    devices_per_server: int = 8
    num_functions: int = 20
    night_fraction: float = NIGHT_FRACTION
    noise_fraction: float = 0.05
    weekend_fraction: float = 1.0
    surges_per_day: float = 0.0
    max_over_min: float = MAX_OVER_MIN
    grace_s: float = DEFAULT_GRACE_S
    day_s: float = DAY_S


class TidalFunction(msgspec.Struct, frozen=True, kw_only=True):
    """One inference function from its submission until its owner ends it; None: it outlives the trace."""

    service: InferenceService
    begin_s: float
    end_s: float | None = None


class TidalTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What was drawn, in order of submission. `timed_events` are the events of owners and gateway at their moments."""

    functions: tuple[TidalFunction, ...]
    timed_events: tuple[tuple[float, Event], ...]

    def minimums(self) -> tuple[tuple[float, int], ...]:
        """From each moment on the sum of all minimums in force, in devices."""
        changes = [(f.begin_s, f.service.min_replicas) for f in self.functions]
        changes += [(f.end_s, -f.service.min_replicas) for f in self.functions if f.end_s is not None]
        level, found = 0, dict[float, int]()
        for at_s, change in sorted(changes):
            level += change
            found[at_s] = level
        return tuple(found.items())


def tide_level(day: float | Floats) -> Floats:
    """How high the tide is at a time of day (in days, 0 is midnight): 0 through the night, 1 through the day."""
    hours = (np.asarray(day, dtype=float) % 1.0) * 24.0
    # The evening goes on after midnight.
    hours = np.where(hours < _HOURS[3] - 24.0, hours + 24.0, hours)
    rise = np.clip((hours - _HOURS[0]) / (_HOURS[1] - _HOURS[0]), 0.0, 1.0)
    fall = np.clip((hours - _HOURS[2]) / (_HOURS[3] - _HOURS[2]), 0.0, 1.0)
    level: Floats = _smooth(rise) * (1.0 - _smooth(fall))
    return level


def _smooth(share: Floats) -> Floats:
    smoothed: Floats = share * share * (3.0 - 2.0 * share)
    return smoothed


def draw_needs(seed: int, setting: TidalSetting) -> Floats:
    """The devices that all minimums together need in each quarter of an hour; the largest are `num_servers` full ones.

    Each of the chances has its own stream. Raises InvalidRequest.
    """
    _check(seed, setting)
    heights, shifts, wobbles, surges = _streams(seed, 4)
    days = np.arange(setting.days)
    height = 1.0 + setting.noise_fraction * np.clip(heights.standard_normal(setting.days), -2.0, 2.0)
    height = height * np.where(days % 7 >= 5, setting.weekend_fraction, 1.0)
    shift = _SHIFT_DAYS * np.clip(shifts.standard_normal(setting.days), -2.0, 2.0)
    bins = np.arange(setting.days * _BINS_PER_DAY)
    day_of = bins // _BINS_PER_DAY
    moments = (bins + 0.5) / _BINS_PER_DAY
    # Where a day runs into the next one, its own height fades with its own evening.
    level = tide_level(moments - shift[day_of]) * _blend(height, moments)
    shape = setting.night_fraction + (1.0 - setting.night_fraction) * level
    noise = _wander(wobbles, len(bins), 1.0 / _BINS_PER_DAY) * setting.noise_fraction / 2.0
    shape = np.maximum(shape * (1.0 + noise), setting.night_fraction / 2.0)
    shape = shape / shape.max() + _surges(surges, setting, moments)
    peak = setting.num_servers * setting.devices_per_server
    needs: Floats = np.maximum(np.floor(np.minimum(shape, 1.0) * peak + 1e-9), 1.0)
    return needs


def draw_tidal(seed: int, setting: TidalSetting) -> TidalTrace:
    """Functions whose minimums add up to the tide, never to more, and reach its highest point. Raises InvalidRequest.

    A function that is no longer needed is ended by its owner; priority is the order of submission.
    """
    needs = draw_needs(seed, setting)
    chance = _streams(seed, 8)[4]
    mean = setting.num_servers * setting.devices_per_server / setting.num_functions
    bin_s = setting.day_s / _BINS_PER_DAY
    top = int(np.argmax(needs))
    open_functions: list[TidalFunction] = []
    ended: list[TidalFunction] = []
    level = number = 0
    for index, need in enumerate(needs.astype(int).tolist()):
        begin_s = index * bin_s
        # Ends come in the first half of a quarter of an hour and submissions in the second, so that no moment needs
        # more than the higher of the two.
        while level > need:
            function = open_functions.pop(int(chance.integers(len(open_functions))))
            level -= function.service.min_replicas
            ended.append(msgspec.structs.replace(function, end_s=begin_s + bin_s * 0.5 * float(chance.random())))
        while level < need:
            size = max(1, round(mean * _SIZES[int(chance.integers(len(_SIZES)))]))
            is_exact = index in (0, top)
            if size > need - level:
                if not is_exact:
                    break
                size = need - level
            at_s = begin_s + bin_s * 0.5 * (1.0 + float(chance.random())) if index else 0.0
            open_functions.append(_function(f"function-{number:04d}", size, at_s, setting))
            level += size
            number += 1
    functions = tuple(sorted([*ended, *open_functions], key=lambda f: (f.begin_s, f.service.service_id)))
    return TidalTrace(functions=functions, timed_events=_timed_events(_streams(seed, 8)[5], functions, setting))


def _function(name: str, minimum: int, begin_s: float, setting: TidalSetting) -> TidalFunction:
    service = InferenceService(
        service_id=WorkloadId(name),
        name=name,
        entrypoint=_SOURCE,
        min_replicas=minimum,
        max_replicas=math.ceil(minimum * setting.max_over_min),
        grace_s=setting.grace_s,
    )
    return TidalFunction(service=service, begin_s=begin_s)


# --- chances ----------------------------------------------------------------------------------------------------------


def _blend(height: Floats, moments: Floats) -> Floats:
    """The height of the tide's day: until the night ends that of the day before."""
    tidal_day = np.floor(moments - (_HOURS[3] - 24.0) / 24.0).astype(int)
    found: Floats = height[np.clip(tidal_day, 0, len(height) - 1)]
    return found


def _wander(rng: np.random.Generator, count: int, step_days: float) -> Floats:
    """Noise with a standard deviation of 1 that is correlated over about half an hour."""
    keep = math.exp(-step_days / _LOAD_MEMORY_DAYS)
    draws = rng.standard_normal(count)
    found = np.empty(count)
    value = 0.0
    for index, draw in enumerate(draws.tolist()):
        value = draw if index == 0 else keep * value + math.sqrt(1.0 - keep * keep) * draw
        found[index] = value
    return found


def _surges(rng: np.random.Generator, setting: TidalSetting, moments: Floats) -> Floats:
    count = int(rng.poisson(setting.surges_per_day * setting.days))
    begins = rng.random(count) * setting.days
    lengths, heights = rng.uniform(*_SURGE_DAYS, size=count), rng.uniform(*_SURGE_FRACTION, size=count)
    found = np.zeros(len(moments))
    for begin, length, height in zip(begins.tolist(), lengths.tolist(), heights.tolist(), strict=True):
        found[(moments >= begin) & (moments < begin + length)] += height
    return found


def _timed_events(
    rng: np.random.Generator, functions: Sequence[TidalFunction], setting: TidalSetting
) -> tuple[tuple[float, Event], ...]:
    """Submissions, ends and loads in order of time; a load is told where it asks for another number of replicas."""
    found: list[tuple[float, Event]] = []
    load_s, horizon_s = setting.day_s / _LOADS_PER_DAY, setting.days * setting.day_s
    for function in functions:
        service, end_s = function.service, horizon_s if function.end_s is None else function.end_s
        found.append((function.begin_s, ServiceDeployed(service=service)))
        if function.end_s is not None:
            found.append((function.end_s, CancelRequested(workload_id=service.service_id)))
        first, last = math.floor(function.begin_s / load_s) + 1, math.ceil(end_s / load_s)
        known = None
        for step, wandered in enumerate(_wander(rng, max(0, last - first), 1.0 / _LOADS_PER_DAY).tolist(), start=first):
            share = max(0.0, _LOAD_MEAN + _LOAD_DEVIATION * wandered)
            asked = min(service.max_replicas, math.ceil(share * service.min_replicas))
            if asked != known:
                known = asked
                found.append((step * load_s, _load(service, asked)))
    # Loads of one moment are reported together; a submission comes before other events of its moment.
    found.sort(key=lambda entry: entry[0])
    return tuple(found)


def _load(service: InferenceService, asked: int) -> LoadObserved:
    in_flight = asked * service.target_in_flight
    return LoadObserved(
        service_id=service.service_id,
        arrivals_per_s=in_flight / _ANSWER_S,
        in_flight=in_flight,
        queued=0,
        idle_s=0.0,
    )


def _streams(seed: int, count: int) -> list[np.random.Generator]:
    return [np.random.default_rng(child) for child in np.random.SeedSequence([seed, 5]).spawn(count)]


def _check(seed: int, setting: TidalSetting) -> None:
    if seed < 0:
        raise InvalidRequest(f"seed {seed} is negative; give 0 or more")
    for name, value, lowest, highest in (
        ("num_servers", setting.num_servers, 1, MAX_DEVICES),
        ("devices_per_server", setting.devices_per_server, 1, MAX_DEVICES),
        ("days", setting.days, 1, MAX_DAYS),
        ("num_functions", setting.num_functions, 1, MAX_DEVICES),
        ("night_fraction", setting.night_fraction, 0.0, 1.0),
        ("noise_fraction", setting.noise_fraction, 0.0, 0.3),
        ("weekend_fraction", setting.weekend_fraction, 0.0, 1.0),
        ("surges_per_day", setting.surges_per_day, 0.0, 100.0),
        ("max_over_min", setting.max_over_min, 1.0, 100.0),
        ("grace_s", setting.grace_s, 0.0, 1e6),
        ("day_s", setting.day_s, 1.0, 1e9),
    ):
        if not lowest <= value <= highest:
            raise InvalidRequest(f"{name} {value!r} must be from {lowest:g} to {highest:g}")
    if setting.num_servers * setting.devices_per_server > MAX_DEVICES:
        raise InvalidRequest(f"over {MAX_DEVICES:,} devices for inference; give fewer or smaller servers")
