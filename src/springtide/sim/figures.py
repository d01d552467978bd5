"""Runs without faults, for their figures: how long jobs took, what met its deadline, how well devices were used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from springtide.control import loop
from springtide.control.controller import Controller
from springtide.control.journal import MemoryJournal
from springtide.control.records import JobRecord
from springtide.core.decision import Plan, Policy, Snapshot
from springtide.core.events import NodeJoined
from springtide.core.resources import make_node
from springtide.core.workload import JobState, TrainingJob
from springtide.policies.registry import make_policy
from springtide.sim.clock import VirtualClock
from springtide.sim.executor import SimExecutor
from springtide.sim.invariants import complain
from springtide.sim.machine import Machine
from springtide.sim.models import Delays, job_model
from springtide.sim.trace import read_trace
from springtide.sim.workload import Owners, Request, make_submission

# Long runs report their progress less often than real workers, which changes no decision but saves events.
_DELAYS = Delays(progress_s=60.0)


class _TimedPolicy:
    """Measures each decision with a timer that the caller brought."""

    def __init__(self, policy: Policy, timer: Callable[[], float]) -> None:
        self._policy = policy
        self._timer = timer
        self.decisions_s: list[float] = []

    def decide(self, snapshot: Snapshot) -> Plan:
        began_s = self._timer()
        plan = self._policy.decide(snapshot)
        self.decisions_s.append(self._timer() - began_s)
        return plan


def simulate(
    trace: str,
    num_nodes: int,
    devices_per_node: int,
    policies: Sequence[str],
    seed: int = 0,
    *,
    timer: Callable[[], float] | None = None,
) -> dict[str, Any]:
    """Run a trace under each policy and return the figures by policy. Raises InvalidRequest on a bad trace.

    `timer` (seconds) measures decisions and the whole run; without one those figures are None.
    """
    arrivals = read_trace(trace, num_nodes * devices_per_node, seed)
    return {
        "trace": trace,
        "cluster": f"{num_nodes}x{devices_per_node}",
        "seed": seed,
        "policies": {name: _run_policy(name, arrivals, num_nodes, devices_per_node, timer) for name in policies},
    }


def _run_policy(
    name: str,
    arrivals: Sequence[tuple[float, TrainingJob]],
    num_nodes: int,
    devices_per_node: int,
    timer: Callable[[], float] | None,
) -> dict[str, Any]:
    clock = VirtualClock()
    machine = Machine(clock, _DELAYS, complain)
    timed = None if timer is None else _TimedPolicy(make_policy(name), timer)
    began_s = 0.0 if timer is None else timer()
    controller = Controller(make_policy(name) if timed is None else timed)
    executor = SimExecutor(machine)
    owners = Owners(machine, [Request(at_s=at_s, event=make_submission(job)) for at_s, job in arrivals])
    owners.executor = executor
    for index in range(num_nodes):
        node = make_node(f"node-{index}", devices_per_node)
        machine.add_node(node)
        executor.post_node(NodeJoined(node=node))

    def is_done() -> bool:
        return executor.is_over or (not owners.num_open and controller.is_idle)

    loop.run(controller, executor, clock, MemoryJournal(), until=is_done)
    cpu_s = None if timer is None else timer() - began_s
    records = list(controller.state.jobs.values())
    figures = _figures(records, num_nodes * devices_per_node)
    return {**figures, **_decision_figures(None if timed is None else timed.decisions_s), "cpu_s": cpu_s}


def _figures(records: Sequence[JobRecord], num_devices: int) -> dict[str, Any]:
    done = [r for r in records if r.state is JobState.SUCCEEDED and r.ended_at_s is not None]
    with_deadline = [r for r in records if r.job.goal.deadline_s is not None]
    admitted = [r for r in records if r.state is not JobState.REJECTED]
    met = [r for r in with_deadline if _met(r)]
    times_s = np.array([(r.ended_at_s or 0.0) - r.submitted_at_s for r in done])
    waits_s = [r.started_at_s - r.submitted_at_s for r in records if r.started_at_s is not None]
    first_s = min((r.submitted_at_s for r in records), default=0.0)
    makespan_s = max((r.ended_at_s or 0.0 for r in records), default=0.0) - first_s
    device_s = sum(r.finished_service_s for r in records)
    # What the work would cost on one worker each, where no device waits for another: the useful device-seconds.
    useful_s = sum(_alone_s(r.job) for r in done)
    capacity_s = makespan_s * num_devices
    return {
        "jobs": len(records),
        "deadline_jobs": len(with_deadline),
        "deadlines_met": len(met),
        "deadline_satisfactory_ratio": _ratio(len(met), len(with_deadline)),
        "admitted": len(admitted),
        "admitted_and_broken": sum(1 for r in with_deadline if r.state is not JobState.REJECTED and not _met(r)),
        "jct_mean_s": _mean(times_s),
        "jct_p50_s": _percentile(times_s, 50),
        "jct_p95_s": _percentile(times_s, 95),
        "jct_p99_s": _percentile(times_s, 99),
        "queueing_mean_s": _mean(np.array(waits_s)),
        "makespan_s": makespan_s,
        "cluster_efficiency": _ratio(useful_s, capacity_s),
        "utilisation": _ratio(device_s, capacity_s),
        "resizes": sum(r.num_resizes for r in records),
        "gpu_hours": device_s / 3600.0,
    }


def _met(record: JobRecord) -> bool:
    deadline_s = record.job.goal.deadline_s
    ended_s = record.ended_at_s
    return (
        record.state is JobState.SUCCEEDED and deadline_s is not None and ended_s is not None and ended_s <= deadline_s
    )


def _alone_s(job: TrainingJob) -> float:
    model = job_model(job)
    return model.total_steps * model.step_s(1)


def _decision_figures(decisions_s: Sequence[float] | None) -> Mapping[str, float | None]:
    milliseconds = np.array(decisions_s or ()) * 1000.0
    return {
        "decision_ms_p50": _percentile(milliseconds, 50),
        "decision_ms_p99": _percentile(milliseconds, 99),
        "decision_ms_max": float(milliseconds.max()) if milliseconds.size else None,
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(values: np.ndarray[Any, Any]) -> float | None:
    return float(values.mean()) if values.size else None


def _percentile(values: np.ndarray[Any, Any], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values.size else None
