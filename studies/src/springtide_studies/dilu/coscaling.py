"""`springtide simulate --study dilu-coscaling`: lazy co-scaling against eager scaling on three kinds of traces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from springtide.core.errors import InvalidRequest
from springtide_studies.dilu.coscaling_play import MAX_QUEUE, TIMEOUT_S, RunFigures, play, profile_of
from springtide_studies.dilu.coscaling_world import ARMS, EAGER, MAX_REPLICAS, OURS, Profile, ScalingArm, ServedModel
from springtide_studies.rows import ratio
from springtide_studies.workloads.request_rates import KINDS, Rates, draw_arrivals, draw_rates, read_rates

# The published traces are unitless; the prototype's own script takes 25 requests a second for 1.
SCALE = 25.0
# Drawn traces differ from seed to seed, published ones by their arrivals alone.
_NUM_DRAWN, _NUM_READ, _SECONDS = 8, 3, 900
_SMALL_SECONDS = 240
_SAMPLE_S = 10
MOST_COLD_STARTS_FRACTION, MOST_VIOLATIONS_FRACTION = 0.25, 0.5
# Table 3 of the paper: cold starts, percent of violations, GPU seconds that Dilu saves.
PAPER: Mapping[str, Mapping[str, tuple[int, float, float | None]]] = MappingProxyType(
    {
        "bursty": {"fast-gs+": (40, 10.79, 715.4), "infless+": (27, 6.28, 433.6), "dilu": (7, 1.79, None)},
        "periodic": {"fast-gs+": (41, 19.25, 650.4), "infless+": (27, 11.09, 346.8), "dilu": (11, 9.85, None)},
        "sporadic": {"fast-gs+": (4, 7.57, 65.0), "infless+": (11, 5.17, 216.8), "dilu": (1, 2.33, None)},
    }
)
_SHOWN = (
    ("cold_starts", "COLD STARTS"),
    ("violation_fraction", "VIOLATIONS"),
    ("p50_s", "P50"),
    ("p95_s", "P95"),
    ("reserved_gpu_s", "RESERVED GPU S"),
    ("held_gpu_s", "HELD GPU S"),
    ("saved_gpu_s", "OURS SAVES GPU S"),
    ("most_replicas", "MOST"),
)


class _Case(msgspec.Struct, frozen=True):
    """One trace: what it is called, whether it was drawn here, and its rates with the seed of their arrivals."""

    name: str
    is_drawn: bool
    runs: tuple[tuple[int, Any], ...]


def run_study(
    *,
    data: Path | None = None,
    seed: int = 0,
    is_small: bool = False,
    on_progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    model: ServedModel | None = None,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Play every arm on traces of the three kinds, and on those in `data`/traces where it is given.

    Each drawn trace is drawn anew for each seed; of a published one the arrivals are. `passed` of a trace: cold starts
    at most a quarter of the eager baseline's (or the one that every arm needs), violations at most half. `only` plays
    these arms beside the two that are compared. Raises InvalidRequest.
    """
    served = model or ServedModel()
    arms = tuple(arm for arm in ARMS if not only or arm.name in (OURS, EAGER, *only))
    cases = [*_drawn(seed, is_small), *(_published(data, seed, is_small) if data is not None else ())]
    profile = profile_of(served, duration_s=60 if is_small else 240)
    total = sum(len(case.runs) for case in cases) * len(arms)
    done = 0
    traces = []
    for case in cases:
        figures: dict[str, list[RunFigures]] = {arm.name: [] for arm in arms}
        for run_seed, rates in case.runs:
            arrivals_s, known = draw_arrivals(rates, run_seed).tolist(), rates.tolist()
            for arm in arms:
                figures[arm.name].append(play(served, profile, arm, arrivals_s, known))
                done += 1
                on_progress(case.name, done, total)
        traces.append(_trace_row(case, figures))
    return {
        "study": "dilu-coscaling",
        "seed": seed,
        "is_small": is_small,
        "scale": SCALE,
        "model": msgspec.to_builtins(served),
        "cold_start_s": served.cold_start_s,
        "capacity_per_s": _capacities(served, profile),
        "gateway": {"max_queue": MAX_QUEUE, "timeout_s": TIMEOUT_S, "max_replicas": MAX_REPLICAS},
        "arms": {arm.name: arm.what for arm in arms},
        "rule": (
            f"passed: cold starts of {OURS} at most {MOST_COLD_STARTS_FRACTION:g} of {EAGER}'s, or the one that "
            f"anybody needs, and violations at most {MOST_VIOLATIONS_FRACTION:g} of its"
        ),
        "traces": traces,
        "passed": all(row["passed"] for row in traces),
        "paper": {trace: dict(rows) for trace, rows in PAPER.items()},
    }


def study_text(answer: Mapping[str, Any]) -> str:
    """A table for each trace, what is compared, and the paper's Table 3 beside it."""
    parts = [
        f"a replica answers {answer['capacity_per_s']['request']:.0f} requests/s in time at its request, "
        f"{answer['capacity_per_s']['limit']:.0f} at its limit; a cold start takes {answer['cold_start_s']:g} s"
    ]
    for trace in answer["traces"]:
        header = ["ARM", *[title for _, title in _SHOWN], "PAPER"]
        rows = []
        for name, figures in trace["arms"].items():
            known = answer["paper"].get(trace["name"], {}).get(name)
            paper = "" if known is None else f"{known[0]} / {known[1]:g} %"
            rows.append([name, *[_cell(key, figures[key]) for key, _ in _SHOWN], paper])
        told = "drawn here" if trace["is_drawn"] else "read"
        verdict = "passed" if trace["passed"] else "NOT passed"
        versus = trace["against_eager"]
        parts.append(
            f"{trace['name']} ({told}, {trace['num_seconds']} s, {trace['num_runs']} runs): {verdict}, cold starts "
            f"{_times(versus['cold_starts'])} and violations {_times(versus['violations'])} of {EAGER}'s\n"
            + _aligned([header, *rows])
        )
    if answer["is_small"]:
        parts.append(f"--small plays {_SMALL_SECONDS} s of one trace of a kind: too little for a verdict")
    parts.append(answer["rule"] + "\nARM: " + "; ".join(f"{name}: {what}" for name, what in answer["arms"].items()))
    return "\n\n".join(parts)


def _drawn(seed: int, is_small: bool) -> list[_Case]:
    num_seconds = _SMALL_SECONDS if is_small else _SECONDS
    seeds = _seeds(seed, 1 if is_small else _NUM_DRAWN)
    return [
        _Case(kind, True, tuple((one, draw_rates(kind, one, num_seconds) * SCALE) for one in seeds)) for kind in KINDS
    ]


def _published(data: Path, seed: int, is_small: bool) -> list[_Case]:
    """Every file of rates in the folder, of any name."""
    paths = sorted((data / "traces").glob("*.txt"))
    if not paths:
        raise InvalidRequest(f"there are no traces in {data / 'traces'}; it holds files of one request rate a line")
    cases = []
    for path in paths:
        rates: Rates = read_rates(path, scale=SCALE)[: _SMALL_SECONDS if is_small else None]
        cases.append(_Case(path.stem, False, tuple((one, rates) for one in _seeds(seed, 1 if is_small else _NUM_READ))))
    return cases


def _seeds(seed: int, count: int) -> range:
    """The seeds of the drawn traces; those of different `seed`s never overlap."""
    return range(seed * _NUM_DRAWN, seed * _NUM_DRAWN + count)


def _capacities(model: ServedModel, profile: Profile) -> dict[str, float]:
    return {
        "request": profile.request_per_s,
        "limit": profile.limit_per_s,
        "request_without_objective": model.capacity_per_s(model.request),
        "limit_without_objective": model.capacity_per_s(model.reachable_limit),
    }


def _trace_row(case: _Case, figures: Mapping[str, Sequence[RunFigures]]) -> dict[str, Any]:
    by_name = {arm.name: arm for arm in ARMS}
    arms = {name: _arm_row(by_name[name], runs) for name, runs in figures.items()}
    mine, rival = arms[OURS], arms[EAGER]
    for row in arms.values():
        row["saved_gpu_s"] = row["held_gpu_s"] - mine["held_gpu_s"]
        row["saved_reserved_gpu_s"] = row["reserved_gpu_s"] - mine["reserved_gpu_s"]
    most = max(1.0, MOST_COLD_STARTS_FRACTION * rival["cold_starts"])
    return {
        "name": case.name,
        "is_drawn": case.is_drawn,
        "num_seconds": len(case.runs[0][1]),
        "num_runs": len(case.runs),
        "num_requests": sum(run.num_requests for run in figures[OURS]),
        "arms": arms,
        "against_eager": {
            "cold_starts": ratio(mine["cold_starts"], rival["cold_starts"]),
            "violations": ratio(mine["violation_fraction"], rival["violation_fraction"]),
        },
        "passed": bool(
            mine["cold_starts"] <= most
            and mine["violation_fraction"] <= MOST_VIOLATIONS_FRACTION * rival["violation_fraction"]
        ),
    }


def _arm_row(arm: ScalingArm, runs: Sequence[RunFigures]) -> dict[str, Any]:
    """Means over the runs; requests of all runs together for what is counted by request."""
    num_requests = sum(run.num_requests for run in runs)
    latencies_s = sorted(latency_s for run in runs for latency_s in run.latencies_s)
    reserved_s, used_s = _mean(runs, "reserved_gpu_s"), _mean(runs, "used_gpu_s")
    return {
        "cold_starts": _mean(runs, "cold_starts"),
        "violation_fraction": sum(run.late + run.refused for run in runs) / max(1, num_requests),
        "refused_fraction": sum(run.refused for run in runs) / max(1, num_requests),
        "p50_s": _quantile(latencies_s, 0.50),
        "p95_s": _quantile(latencies_s, 0.95),
        "p99_s": _quantile(latencies_s, 0.99),
        "reserved_gpu_s": reserved_s,
        "used_gpu_s": used_s,
        # A static share is kept from all others; of a share from request to limit, what is not used is not.
        "held_gpu_s": used_s if arm.fraction is None else reserved_s,
        "replica_s": _mean(runs, "replica_s"),
        "stops": _mean(runs, "stops"),
        "most_replicas": max(max(run.replicas) for run in runs),
        "each_run": [
            {
                "cold_starts": run.cold_starts,
                "violation_fraction": (run.late + run.refused) / max(1, run.num_requests),
            }
            for run in runs
        ],
        "replicas_each_10_s": list(runs[0].replicas[::_SAMPLE_S]),
    }


def _mean(runs: Sequence[RunFigures], name: str) -> float:
    return math.fsum(float(getattr(run, name)) for run in runs) / len(runs)


def _quantile(ordered: Sequence[float], fraction: float) -> float | None:
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, math.ceil(fraction * len(ordered)) - 1)]


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "violation_fraction":
        return f"{100 * value:.2f} %"
    if key in ("p50_s", "p95_s"):
        return f"{1000 * value:.0f} ms"
    if key == "cold_starts":
        return f"{value:.1f}"
    return f"{round(value)}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"x{value:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *[cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
