"""The figures of one played trace: times of jobs, deadlines met and causes of misses, use of the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import numpy as np

from springtide.core.decision import EMPTY
from springtide.core.workload import JobState, WorkloadId
from springtide.simulator.fluid.play import FluidRunResult
from springtide.simulator.fluid.rules import DEADLINE_TOLERANCE_S, MISS_CAUSES, OverheadRule
from springtide.simulator.fluid.runs import FluidRun, UtilisationTimeline

MAX_POINTS = 2000
# ElasticFlow's Figure 10 compares the cluster efficiency of this much of the start.
_START_S = 100 * 3600.0


class RunSetting(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster, and what changes cost on it."""

    num_devices: int
    devices_per_node: int
    rule: OverheadRule


def figures_of(
    played: FluidRunResult,
    setting: RunSetting,
    *,
    met_without: Mapping[str, AbstractSet[WorkloadId]] = EMPTY,
    with_series: bool = False,
    with_rows: bool = False,
) -> dict[str, Any]:
    """All keys of one policy's answer; `series` and `rows` only if requested.

    `met_without` are, for "fault" and "misprediction", the jobs that meet their deadline in the same run without it.
    """
    runs = list(played.runs.values())
    causes = {run.job.job_id: miss_cause(run, setting, met_without) for run in runs}
    figures = _job_figures(runs, played, causes)
    figures |= _cluster_figures(runs, played.timeline, setting)
    figures |= _decision_figures(played)
    figures["num_faults"] = played.num_faults
    if with_series:
        figures["series"] = _series(runs, played, setting.num_devices)
    if with_rows:
        figures["rows"] = [_row(run, causes[run.job.job_id]) for run in runs]
    return figures


def met_deadlines(played: FluidRunResult) -> frozenset[WorkloadId]:
    return frozenset(job_id for job_id, run in played.runs.items() if run.met_deadline(DEADLINE_TOLERANCE_S))


def miss_cause(run: FluidRun, setting: RunSetting, met_without: Mapping[str, AbstractSet[WorkloadId]]) -> str:
    """Why the job missed its deadline: the first of MISS_CAUSES that holds, "" if it met it or had none."""
    if run.job.goal.deadline_s is None or run.met_deadline(DEADLINE_TOLERANCE_S):
        return ""
    if not _is_feasible_alone(run, run.job.goal.deadline_s, setting):
        return "impossible"
    for cause, met in met_without.items():
        if run.job.job_id in met:
            return cause
    return "not_admitted" if run.state is JobState.REJECTED and run.admitted_s is None else "scheduler"


def _is_feasible_alone(run: FluidRun, deadline_s: float, setting: RunSetting) -> bool:
    """Whether it makes its deadline alone on the empty cluster, as profiled, after one start on used devices."""
    part = 1.0 if run.job.share is None else run.job.share.limit
    best = max(run.curve[: run.job.max_workers + 1], default=0.0) * part
    start_s = setting.rule.announced.cost_s(1, is_fresh=False)
    return best > 0.0 and run.submitted_s + start_s + run.total_steps / best <= deadline_s + DEADLINE_TOLERANCE_S


def _job_figures(runs: Sequence[FluidRun], played: FluidRunResult, causes: Mapping[WorkloadId, str]) -> dict[str, Any]:
    deadline_runs = [run for run in runs if run.job.goal.deadline_s is not None]
    met = [run for run in deadline_runs if run.met_deadline(DEADLINE_TOLERANCE_S)]
    declined = sum(run.state is JobState.REJECTED for run in runs)
    if played.admits:
        promised = [run for run in deadline_runs if run.admitted_s is not None]
    else:
        promised = [run for run in deadline_runs if run.state is not JobState.REJECTED]
    times_s = _times_s(runs)
    effort_s = _times_s([run for run in runs if run.job.goal.deadline_s is None])
    waits_s = _waits_s(runs)
    late_s = [run.ended_s - run.job.goal.deadline_s for run in promised if run.ended_s and run.job.goal.deadline_s]
    counted = Counter(causes.values())
    return {
        "jobs": len(runs),
        "deadline_jobs": len(deadline_runs),
        "deadlines_met": len(met),
        "deadline_satisfactory_ratio": _ratio(len(met), len(deadline_runs)),
        "admitted": len(runs) - declined,
        "declined": declined,
        "promised": len(promised) if played.admits else 0,
        "admitted_and_broken": sum(not run.met_deadline(DEADLINE_TOLERANCE_S) for run in promised),
        "latest_s": max([0.0, *late_s]),
        "misses": {cause: counted[cause] for cause in MISS_CAUSES if counted[cause]},
        "best_effort_jobs": len(runs) - len(deadline_runs),
        "best_effort_jct_mean_s": _mean(effort_s),
        "jct_mean_s": _mean(times_s),
        "jct_p50_s": _percentile(times_s, 50),
        "jct_p95_s": _percentile(times_s, 95),
        "jct_p99_s": _percentile(times_s, 99),
        "queueing_mean_s": _mean(waits_s),
        "queueing_p99_s": _percentile(waits_s, 99),
        "resizes": sum(run.num_resizes for run in runs),
        "preemptions": sum(run.num_preemptions for run in runs),
    }


def _cluster_figures(runs: Sequence[FluidRun], timeline: UtilisationTimeline, setting: RunSetting) -> dict[str, Any]:
    makespan_s = max((run.ended_s for run in runs if run.state is JobState.SUCCEEDED and run.ended_s), default=0.0)
    capacity_s = makespan_s * setting.num_devices
    held_s = sum(run.device_s for run in runs)
    # Work done in device-seconds of one device: the integral over time of the sum of T(n) / T(1).
    useful_s = sum(run.done_steps / run.single_steps_per_s for run in runs if run.single_steps_per_s)
    return {
        "makespan_s": makespan_s,
        "cluster_efficiency": _ratio(useful_s, capacity_s),
        "cluster_efficiency_100h": _start_efficiency(timeline, min(_START_S, makespan_s), setting.num_devices),
        "utilisation": _ratio(held_s, capacity_s),
        "gpu_hours": held_s / 3600.0,
        "overhead_gpu_hours": sum(run.paused_device_s for run in runs) / 3600.0,
        "scattered_gpu_hours": sum(run.scattered_device_s for run in runs) / 3600.0,
    }


def _start_efficiency(timeline: UtilisationTimeline, until_s: float, num_devices: int) -> float | None:
    """The mean of equation (8) from the start to `until_s`; a group counts from when it is formed."""
    time_s = np.append(np.minimum(np.frombuffer(timeline.time_s), until_s), until_s)
    efficiency = np.frombuffer(timeline.efficiency)
    return _ratio(float(np.diff(time_s) @ efficiency), until_s * num_devices) if efficiency.size else None


def _decision_figures(played: FluidRunResult) -> dict[str, Any]:
    milliseconds = np.array(played.decisions_s) * 1000.0
    return {
        "decisions": played.num_decisions,
        "decision_ms_p50": _percentile(milliseconds, 50),
        "decision_ms_p99": _percentile(milliseconds, 99),
        "decision_ms_max": float(milliseconds.max()) if milliseconds.size else None,
        "cpu_s": played.cpu_s,
        "jobs_per_cpu_s": None if not played.cpu_s else len(played.runs) / played.cpu_s,
        "steps": played.num_steps,
    }


def _series(runs: Sequence[FluidRun], played: FluidRunResult, num_devices: int) -> dict[str, list[list[float]]]:
    """Curves of at most MAX_POINTS points [x, y]; moments in seconds from the first submission."""
    timeline = played.timeline
    admitted_s = [
        (run.admitted_s if run.admitted_s is not None else run.submitted_s)
        for run in runs
        if run.state is not JobState.REJECTED and (run.admitted_s is not None or not played.admits)
    ]
    finished_s = [run.ended_s for run in runs if run.state is JobState.SUCCEEDED and run.ended_s is not None]
    time_s = np.frombuffer(timeline.time_s)
    return {
        "jct_s": _distribution(_times_s(runs)),
        "queueing_s": _distribution(_waits_s(runs)),
        "finished": _cumulative(finished_s),
        "submitted": _cumulative([run.submitted_s for run in runs]),
        "admitted": _cumulative(admitted_s),
        "allocated": _steps(time_s, np.array(timeline.devices)),
        "running": _steps(time_s, np.array(timeline.running)),
        "efficiency": _steps(time_s, np.array(timeline.efficiency) / num_devices),
    }


def _row(run: FluidRun, cause: str) -> dict[str, Any]:
    return {
        "job_id": run.job.job_id,
        "state": str(run.state),
        "reason": run.reason,
        "submit_s": run.submitted_s,
        "deadline_s": run.job.goal.deadline_s,
        "admitted_s": run.admitted_s,
        "start_s": run.started_s,
        "end_s": run.ended_s,
        "is_met": run.met_deadline(DEADLINE_TOLERANCE_S),
        "cause": cause,
        "gpu_hours": run.device_s / 3600.0,
        "resizes": run.num_resizes,
        "preemptions": run.num_preemptions,
        "losses": run.num_losses,
    }


# --- numbers and curves ---------------------------------------------------------------------------------------------


def _times_s(runs: Sequence[FluidRun]) -> np.ndarray[Any, Any]:
    done = [
        run.ended_s - run.submitted_s for run in runs if run.state is JobState.SUCCEEDED and run.ended_s is not None
    ]
    return np.sort(np.array(done, dtype=float))


def _waits_s(runs: Sequence[FluidRun]) -> np.ndarray[Any, Any]:
    waits = [run.started_s - run.submitted_s for run in runs if run.started_s is not None]
    return np.sort(np.array(waits, dtype=float))


def _sampled(size: int) -> np.ndarray[Any, Any]:
    """The indices of at most MAX_POINTS of `size` points, first and last among them."""
    return np.unique(np.linspace(0, size - 1, min(size, MAX_POINTS)).astype(int)) if size else np.zeros(0, dtype=int)


def _distribution(ordered: np.ndarray[Any, Any]) -> list[list[float]]:
    return [[float(ordered[i]), float(i + 1) / ordered.size] for i in _sampled(ordered.size)]


def _cumulative(moments_s: Sequence[float]) -> list[list[float]]:
    ordered = np.sort(np.array(moments_s, dtype=float))
    return [[float(ordered[i]), float(i + 1)] for i in _sampled(ordered.size)]


def _steps(time_s: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> list[list[float]]:
    return [[float(time_s[i]), float(values[i])] for i in _sampled(time_s.size)]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(values: np.ndarray[Any, Any]) -> float | None:
    return float(values.mean()) if values.size else None


def _percentile(values: np.ndarray[Any, Any], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values.size else None
