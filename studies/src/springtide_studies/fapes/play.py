"""One policy plays the requests of the FaPES bench: completion and queueing times, goodput, and what deciding took."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.decision import Overheads, Plan, Policy, Snapshot
from springtide.core.events import Event
from springtide.core.resources import Node, Topology
from springtide.core.workload import WorkloadId
from springtide.perf.communication.fabric import Links
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.registry import make_policy
from springtide.simulator.fluid.play import FluidRunResult, play
from springtide.simulator.fluid.rules import OverheadRule, Times
from springtide_studies.fapes.jobs import MAX_WORKERS, FapesRequest, RequestRule, arrivals_of
from springtide_studies.fapes.truth import TopologySpeeds, curves_for
from springtide_studies.loans.minimums import Minimums, minimums_for

# FaPES, table 2: checkpoint, upload, download and container of a migrated job.
MIGRATION_S = 1.580 + 0.402 + 0.140 + 3.558
# Policies that keep the requested batch and workers; and those that choose both. All others choose only the workers.
_RIGID, _ADAPTIVE = ("fifo", "sjf"), ("fapes", "goodput", "pollux", "sia")
_STRATEGIES = ("dedicated", "one-way", "two-way", "tide")

Floats = NDArray[np.float64]


class FapesRun(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the jobs under one policy, arrays in order of arrival. Seconds; goodput in samples/s.

    `queued_s` is all the time in which a job held nothing, from its submission to its end. `goodput` counts a job's
    samples at its initial batch size over the time in which it held devices. `utilisation` is that of all devices up to
    the last arrival, by jobs and services. `decisions_s` is empty without a timer. `minimums_broken` are those of
    services, `lent_mean` the servers of inference that trained.
    """

    policy: str
    jct_s: Floats
    queued_s: Floats
    goodput: Floats
    num_restarts: float
    device_hours: float
    utilisation: float
    decisions_s: Floats
    minimums_broken: int = 0
    lent_mean: float = 0.0


class _Waiting:
    """Sums how long jobs hold no device."""

    def __init__(self, policy: Policy) -> None:
        self._decisions = DecisionCache(policy)
        self._at_s = 0.0
        self._waits: tuple[WorkloadId, ...] = ()
        self.waited_s: dict[WorkloadId, float] = {}

    def decide(self, snapshot: Snapshot) -> Plan:
        """The plan of the policy."""
        passed_s = snapshot.now_s - self._at_s
        if passed_s > 0.0:
            for job_id in self._waits:
                self.waited_s[job_id] = self.waited_s.get(job_id, 0.0) + passed_s
        self._at_s = snapshot.now_s
        held = snapshot.allocations
        self._waits = tuple(view.job.job_id for view in snapshot.jobs if view.job.job_id not in held)
        return self._decisions.decide(snapshot)


def training_of(policy: str) -> str:
    """The training policy of `STRATEGY/TRAINING`; of a name without a strategy all of it."""
    strategy, _, training = policy.partition("/")
    return training if strategy.partition(":")[0] in _STRATEGIES else policy


def request_rule(policy: str) -> RequestRule:
    """How much of a request a policy keeps to."""
    plain = training_of(policy).partition(":")[0]
    return "rigid" if plain in _RIGID else "adaptive" if plain in _ADAPTIVE else "fixed"


def play_requests(
    policy: str,
    requests: Sequence[FapesRequest],
    nodes: Sequence[Node],
    links: Links,
    *,
    change_s: float = MIGRATION_S,
    timer: Callable[[], float] | None = None,
    is_timed: bool = True,
    timed_events: Sequence[tuple[float, Event]] = (),
    times: Times | None = None,
) -> FapesRun:
    """Let a policy play the requests to their end. Every start, resize or move stands still for `change_s`.

    `timed_events` are what owners of services and the gateway say, `times` what starting and leaving takes. Raises
    InvalidRequest for a policy that is not known, InvariantViolation if the run breaks an invariant.
    """
    rule = request_rule(policy)
    speeds = TopologySpeeds(Topology(nodes=tuple(nodes)), links, requests)
    curves = {} if rule == "adaptive" else curves_for(speeds, requests, MAX_WORKERS)
    watched = _Waiting(make_policy(policy))
    arrivals = arrivals_of(requests, rule, curves)
    minimums = minimums_for(arrivals, times or Times())
    played = play(
        watched,
        arrivals,
        nodes,
        rule=OverheadRule(name="migration", pause=Overheads(change_s=change_s)),
        speeds=speeds,
        reports_progress=True,
        command=f"springtide bench fapes: {policy}",
        timer=timer if is_timed else None,
        timed_events=timed_events,
        times=times,
        watcher=minimums,
    )
    return _outcome(policy, played, minimums, requests, watched.waited_s, sum(len(node.devices) for node in nodes))


def _outcome(
    policy: str,
    played: FluidRunResult,
    minimums: Minimums,
    requests: Sequence[FapesRequest],
    waited_s: dict[WorkloadId, float],
    num_devices: int,
) -> FapesRun:
    runs = [played.runs[WorkloadId(request.job_id)] for request in requests]
    jct_s = np.array([(run.ended_s or np.inf) - run.submitted_s for run in runs])
    queued_s = np.array([waited_s.get(run.job.job_id, 0.0) for run in runs])
    # What it was told to do in, in initial steps, is the same for every policy.
    samples = np.array([request.num_samples for request in requests])
    until_s = max(request.at_s for request in requests)
    busy_s = sum(played.timeline.occupied_s(until_s))
    loans = minimums.summary()
    return FapesRun(
        policy=policy,
        jct_s=jct_s,
        queued_s=queued_s,
        goodput=samples / np.maximum(jct_s - queued_s, 1e-9),
        num_restarts=float(np.mean([run.num_restarts for run in runs])),
        device_hours=sum(run.device_s for run in runs) / 3600.0,
        utilisation=busy_s / (until_s * num_devices) if until_s > 0.0 else 0.0,
        decisions_s=np.array(played.decisions_s),
        minimums_broken=loans["minimums_broken"],
        lent_mean=loans["lent_mean"],
    )


def pooled(outcomes: Sequence[FapesRun]) -> FapesRun:
    """Several seeds of one policy as one outcome: jobs side by side, means of the rest."""
    return FapesRun(
        policy=outcomes[0].policy,
        jct_s=np.concatenate([outcome.jct_s for outcome in outcomes]),
        queued_s=np.concatenate([outcome.queued_s for outcome in outcomes]),
        goodput=np.concatenate([outcome.goodput for outcome in outcomes]),
        num_restarts=float(np.mean([outcome.num_restarts for outcome in outcomes])),
        device_hours=float(np.mean([outcome.device_hours for outcome in outcomes])),
        utilisation=float(np.mean([outcome.utilisation for outcome in outcomes])),
        decisions_s=np.concatenate([outcome.decisions_s for outcome in outcomes]),
        minimums_broken=sum(outcome.minimums_broken for outcome in outcomes),
        lent_mean=float(np.mean([outcome.lent_mean for outcome in outcomes])),
    )


def table_row(part: str, label: str, outcome: FapesRun) -> dict[str, float | str | None]:
    """An outcome as a row: average, least, largest and 95th percentile of each figure, as in the paper's table 1."""
    row: dict[str, float | str | None] = {"part": part, "policy": label, "num_jobs": len(outcome.jct_s)}
    for name, values, unit in (
        ("jct_ks", outcome.jct_s, 1000.0),
        ("queue_ks", outcome.queued_s, 1000.0),
        ("goodput", outcome.goodput, 1.0),
    ):
        row[f"{name}_avg"] = float(values.mean()) / unit
        row[f"{name}_min"] = float(values.min()) / unit
        row[f"{name}_max"] = float(values.max()) / unit
        row[f"{name}_p95"] = float(np.percentile(values, 95)) / unit
    row["restarts"] = outcome.num_restarts
    row["utilisation"] = outcome.utilisation
    row["decision_p90_ms"] = (
        float(np.percentile(outcome.decisions_s, 90)) * 1000.0 if len(outcome.decisions_s) else None
    )
    return row
