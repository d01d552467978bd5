"""The time of decisions by kind of event, each event in a turn of its own, with everything on at once."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from springtide.core.errors import InvalidRequest
from springtide.core.events import (
    Event,
    JobFinished,
    JobResized,
    JobSubmitted,
    LoadObserved,
    ProgressReported,
    ReplicaReady,
    ReplicaStopped,
)
from springtide.scheduling.registry import make_live_policy
from springtide_studies.decision.everything import CASES, Case, MixedCrowd
from springtide_studies.decision.platform import BenchPlatform
from springtide_studies.rows import markdown_table, ratio

KINDS: Mapping[type[Event], str] = MappingProxyType(
    {
        JobSubmitted: "submit",
        JobFinished: "end",
        ProgressReported: "progress",
        JobResized: "resize",
        ReplicaReady: "replica",
        ReplicaStopped: "replica",
        LoadObserved: "load",
    }
)
# Beside the kinds: a moment for which the policy has asked, and what is none of these.
TIME, OTHER, ALL = "time", "other", "all"
# Of the reports that come at one moment, so many get turns of their own; the others come in one, which is not counted.
_SINGLE_REPORTS = 10
# Parts that take less are not told.
LEAST_PART = 0.02
# Where the time goes: by what the path of a source file contains, the first that fits.
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "families": ("scheduling/families", "springtide/batches"),
        "table": ("solvers/reservations", "springtide/first_runs", "springtide/services"),
        "market": ("springtide/market", "solvers/share_dp"),
        "places": ("scheduling/placement", "springtide/places", "springtide/packing", "springtide/moves"),
        "models": ("springtide/accelerators", "solvers/model_choice"),
        "sharers": ("scheduling/sharing",),
        "pools": ("scheduling/loans", "perf/tide"),
        "reasons": ("springtide/reasons",),
        "rows and fingerprints": ("scheduling/decisions", "springtide/rows", "perf/curve", "core/decision"),
        "memory": ("springtide/memory",),
        "the decision itself": ("springtide/decision", "springtide/policy", "springtide/capacity"),
    }
)


class KindTimes(msgspec.Struct, frozen=True, kw_only=True):
    """CPU milliseconds of decisions after one kind of event."""

    case: str
    num_devices: int
    num_jobs: int
    kind: str
    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class MixedTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What one case took: times by kind of event, and the part of the time that each part of the policy took."""

    times: tuple[KindTimes, ...]
    parts: Mapping[str, float]


def measure_kinds(
    case: Case, num_devices: int, *, seed: int, timer: Callable[[], float], num_events: int
) -> MixedTimes:
    """Warm a cluster up and time every decision over `num_events` further arrivals and endings, then profile a quarter
    as many."""
    crowd = MixedCrowd(case, num_devices, seed)
    platform = BenchPlatform(make_live_policy(CASES[case]), crowd, timer)
    platform.warm_up()
    spent = _play(platform, num_events)
    profile = cProfile.Profile()
    profile.enable()
    _play(platform, max(1, num_events // 4))
    profile.disable()
    together = {ALL: [ms for times in spent.values() for ms in times]}
    return MixedTimes(
        times=tuple(
            KindTimes(
                case=case,
                num_devices=num_devices,
                num_jobs=platform.num_live,
                kind=kind,
                count=len(times),
                p50_ms=float(np.percentile(times, 50)),
                p99_ms=float(np.percentile(times, 99)),
                max_ms=max(times),
            )
            for kind, times in (spent | together).items()
            if times
        ),
        parts=_parts(profile),
    )


def measure_cases(
    cases: Sequence[str],
    sizes: Sequence[int],
    *,
    seed: int,
    timer: Callable[[], float],
    num_events: int,
    tell: Callable[[str], None],
) -> list[MixedTimes]:
    """Measure each of these cases on each size; `tell` is given a line after each. Raises InvalidRequest for a case
    that is not known."""
    unknown = [case for case in cases if case not in CASES]
    if unknown:
        raise InvalidRequest(f"there is no case {unknown[0]!r}; choose of {', '.join(CASES)}")
    found: list[MixedTimes] = []
    for num_devices in sizes:
        for case in [known for known in CASES if known in cases]:
            found.append(measure_kinds(case, num_devices, seed=seed, timer=timer, num_events=num_events))
            whole = found[-1].times[-1]
            parts = sorted(found[-1].parts.items(), key=lambda item: -item[1])
            tell(
                f"{case} on {num_devices} devices, {whole.num_jobs} jobs: p50 {whole.p50_ms:.2f} ms, p99 "
                f"{whole.p99_ms:.2f} ms, max {whole.max_ms:.2f} ms over {whole.count} decisions; of the time "
                + ", ".join(f"{name} {part:.0%}" for name, part in parts if part >= LEAST_PART)
            )
    return found


def mixed_rows(found: Sequence[MixedTimes], bound_at: int, bound_ms: float) -> list[dict[str, Any]]:
    """A row for all decisions of each measurement; those on `bound_at` devices have the bound. The baseline is the
    slowest kind of event."""
    rows: list[dict[str, Any]] = []
    for *kinds, whole in [each.times for each in found]:
        slowest = max(kinds, key=lambda times: times.p99_ms)
        rows.append(
            {
                "case": f"{whole.num_devices} devices, {whole.num_jobs} jobs, everything on ({whole.case}): p99",
                "ours": whole.p99_ms,
                "baseline": slowest.p99_ms,
                "baseline_name": f"after {slowest.kind} p99",
                "ratio": ratio(whole.p99_ms, slowest.p99_ms),
                "bound": bound_ms if whole.num_devices == bound_at else None,
                "unit": "ms CPU",
            }
        )
    return rows


def _play(platform: BenchPlatform, num_events: int) -> dict[str, list[float]]:
    """The milliseconds of the decisions over so many arrivals and endings, by kind of event."""
    spent: dict[str, list[float]] = {kind: [] for kind in (*KINDS.values(), TIME, OTHER)}
    until = platform.num_events + num_events
    while platform.num_events < until and not platform.is_over:
        events = platform.wait()
        reports = [event for event in events if isinstance(event, ProgressReported)]
        if reports[_SINGLE_REPORTS:]:
            platform.step(reports[_SINGLE_REPORTS:])
        others = [event for event in events if not isinstance(event, ProgressReported)]
        singles: list[Sequence[Event]] = [[event] for event in (*reports[:_SINGLE_REPORTS], *others)]
        for single in singles or [[]]:
            decide_s = platform.step(single).decide_s
            spent[KINDS.get(type(single[0]), OTHER) if single else TIME].append(decide_s * 1000.0)
    return spent


def _parts(profile: cProfile.Profile) -> dict[str, float]:
    """The part of the time of decisions that each of PARTS took itself, what it called in the library included."""
    own_s = dict.fromkeys((*PARTS, OTHER), 0.0)
    for (path, _, _), (_, _, seconds, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        home = _part_of(path)
        if home is not None:
            own_s[home] += seconds
            continue
        for (caller, _, _), (_, _, seconds_there, _) in callers.items():
            home = _part_of(caller)
            if home is not None:
                own_s[home] += seconds_there
    total_s = sum(own_s.values()) or 1.0
    return {name: seconds / total_s for name, seconds in own_s.items()}


def _part_of(path: str) -> str | None:
    for name, pieces in PARTS.items():
        if any(piece in path for piece in pieces):
            return name
    return OTHER if "/springtide/scheduling/" in path or "/springtide/solvers/" in path else None


def kinds_markdown(found: Sequence[Mapping[str, Any]]) -> str:
    """The tables of measurements, as plain values: times by kind of event, and where the time goes."""
    table = [times for each in found for times in each["times"]]
    header = ("case", "devices", "jobs", "event", "decisions", "p50 ms", "p99 ms", "max ms")
    times = markdown_table(
        header,
        [
            (
                row["case"],
                f"{row['num_devices']:,}",
                f"{row['num_jobs']:,}",
                row["kind"],
                str(row["count"]),
                *(f"{row[key]:.3g}" for key in ("p50_ms", "p99_ms", "max_ms")),
            )
            for row in table
        ],
    )
    names = [name for name in (*PARTS, OTHER) if any(each["parts"][name] >= LEAST_PART for each in found)]
    wholes = [each["times"][-1] for each in found]
    parts = markdown_table(
        ("part", *(f"{whole['case']}, {whole['num_devices']:,}" for whole in wholes)),
        [(name, *(f"{each['parts'][name]:.0%}" for each in found)) for name in names],
    )
    return f"{times}\n\n{parts}"
