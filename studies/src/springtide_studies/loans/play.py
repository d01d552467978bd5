"""One run of the study of loans: a strategy, a size of the inference pool, the tide and the training jobs of the paper.

Assumptions where FaPES (section 7.1) gives no numbers. Jobs are those of the bench of FaPES, arriving at the rate at
which FIFO on the whole cluster waits as long as in the paper's table 1. A change of a job costs table 2's migration,
checkpoint and upload of which pass before a preempted job's devices are free; a replica starts as fast as a container.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from springtide.core.decision import Overheads, Policy
from springtide.core.resources import Node, Pool, Topology
from springtide.core.workload import DEFAULT_GRACE_S
from springtide.perf.communication.fabric import V100_SERVER
from springtide.scheduling.registry import make_policy
from springtide.simulator.fluid.figures import RunSetting, figures_of
from springtide.simulator.fluid.play import FluidRunResult, play
from springtide.simulator.fluid.rules import OverheadRule, Times
from springtide.workloads.cluster import cluster_nodes
from springtide_studies.fapes.jobs import MAX_WORKERS, FapesRequest, arrivals_of, draw_requests
from springtide_studies.fapes.play import MIGRATION_S, request_rule
from springtide_studies.fapes.truth import TopologySpeeds, curves_for
from springtide_studies.loans.journal import LoanJournal
from springtide_studies.loans.minimums import Minimums, minimums_for
from springtide_studies.workloads.generators import DAY_S, draw_gamma
from springtide_studies.workloads.tidal import TidalSetting, draw_tidal

JOBS_PER_S, VARIATION, DEVICES = 160.0 / (12.0 * 3600.0), 2.0, 128
# FaPES, table 2: checkpoint and upload; download and container.
SAVE_S, START_S = 1.580 + 0.402, 0.140 + 3.558
# A replica answers its requests before it stops.
TIMES = Times(service_start_s=START_S, service_stop_s=1.0, preempt_s=SAVE_S)


class LoanSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `n_r_max` servers are what all guaranteed minimums need at the highest tide, and inference's own."""

    policy: str
    n_r_max: int
    days: int
    seed: int
    cluster: str
    isolates_devices: bool = False


class LoanRun(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one run: jobs and minimums, the figures of the pools, and the cluster."""

    played: FluidRunResult
    minimums: Minimums
    journal: LoanJournal
    place: RunSetting


def play_loans(
    setting: LoanSetting,
    *,
    timer: Callable[[], float] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Play one run to the end of its last job and return its figures (see `loan_figures`).

    Raises InvalidRequest, or InvariantViolation on what may never be.
    """
    return loan_figures(run_loans(setting, timer=timer, on_progress=on_progress))


def run_loans(
    setting: LoanSetting,
    *,
    policy: Policy | None = None,
    tide: TidalSetting | None = None,
    timer: Callable[[], float] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoanRun:
    """Play one run; `policy` stands for the one that the setting names, `tide` for the one that it draws."""
    nodes = label_nodes(cluster_nodes(setting.cluster), setting.n_r_max, isolates_devices=setting.isolates_devices)
    requests = draw_jobs(setting, nodes)
    rule = request_rule(setting.policy)
    speeds = TopologySpeeds(Topology(nodes=tuple(nodes)), V100_SERVER, requests)
    curves = {} if rule == "adaptive" else curves_for(speeds, requests, MAX_WORKERS)
    change = OverheadRule(name="migration", pause=Overheads(change_s=MIGRATION_S))
    journal = LoanJournal(setting.days * DAY_S)
    per_server = len(nodes[0].devices)
    arrivals = arrivals_of(requests, rule, curves)
    minimums = minimums_for(arrivals, TIMES)
    began_s = 0.0 if timer is None else timer()
    played = play(
        policy or make_policy(setting.policy),
        arrivals,
        nodes,
        rule=change,
        speeds=speeds,
        reports_progress=rule == "adaptive",
        command=f"springtide simulate --study loaning --n-r-max {setting.n_r_max} --seed {setting.seed}",
        journal=journal,
        timer=timer,
        on_progress=on_progress,
        timed_events=draw_tidal(setting.seed, tide or tide_of(setting.n_r_max, setting.days, per_server)).timed_events,
        times=TIMES,
        until_s=setting.days * DAY_S,
        watcher=minimums,
    )
    journal.close()
    played.cpu_s = None if timer is None else timer() - began_s
    place = RunSetting(num_devices=len(nodes) * per_server, devices_per_node=per_server, rule=change)
    return LoanRun(played=played, minimums=minimums, journal=journal, place=place)


def tide_of(n_r_max: int, days: int, devices_per_server: int) -> TidalSetting:
    """The tide of so many days, and of one more for the jobs that are left."""
    return TidalSetting(num_servers=n_r_max, days=days + 1, devices_per_server=devices_per_server)


def label_nodes(nodes: Sequence[Node], n_r_max: int, *, isolates_devices: bool = False) -> list[Node]:
    """The servers of a cluster: the last `n_r_max` are inference's, side by side, all others training's."""
    split = len(nodes) - n_r_max
    pools: list[Pool] = ["training" if index < split else "inference" for index in range(len(nodes))]
    return [
        msgspec.structs.replace(node, pool=pool, home=pool, isolates_devices=isolates_devices)
        for node, pool in zip(nodes, pools, strict=True)
    ]


def draw_jobs(setting: LoanSetting, nodes: Sequence[Node]) -> tuple[FapesRequest, ...]:
    """The training jobs: as many a device of the cluster as in the bench, none larger than training's own part."""
    num_devices = sum(len(node.devices) for node in nodes)
    own = sum(len(node.devices) for node in nodes if node.owner == "training")
    moments = draw_gamma(
        setting.seed,
        rate_per_s=JOBS_PER_S * num_devices / DEVICES,
        duration_s=setting.days * DAY_S,
        variation=VARIATION,
    )
    requests = draw_requests(moments.tolist(), setting.seed)
    return tuple(msgspec.structs.replace(request, num_workers=min(request.num_workers, own)) for request in requests)


def loan_figures(run: LoanRun) -> dict[str, Any]:
    """The figures of `simulate`, and those of loans.

    `utilisation` counts devices held by jobs and by services until the last day is over, `training_utilisation` those
    held by jobs among those that training had. `queueing_mean_s` is all the time in which a job held nothing, also
    after a stop. `reclaims` are servers that came back from training, `reclaims_forced` those that jobs were made to
    leave (stopped: interrupting; made smaller: shrinking); the others they left when they ended. `reclaim_p95_s` runs
    from that moment to the last of the replicas for which a server was taken. `need_missed_fraction` is the part of
    what load and minimums needed that was not ready.
    """
    played, journal = run.played, run.journal
    areas, minimums = journal.areas, run.minimums
    told = minimums.summary()
    waits_s = np.array([journal.queued_s(job_id) for job_id in played.runs])
    return figures_of(played, run.place) | {
        "queueing_mean_s": float(waits_s.mean()) if waits_s.size else None,
        "queueing_p99_s": float(np.percentile(waits_s, 99)) if waits_s.size else None,
        "utilisation": (areas.by_jobs + areas.by_services) / areas.devices,
        "training_utilisation": areas.by_jobs / areas.of_training if areas.of_training else None,
        "serving_fraction": areas.by_services / areas.devices,
        "need_missed_fraction": areas.missing / areas.needed if areas.needed else 0.0,
        "minimums": told["minimums_demanded"],
        "minimums_broken": told["minimums_broken"],
        "minimum_wait_p95_s": told["minimum_wait_p95_s"],
        "minimum_wait_max_s": told["minimum_wait_max_s"],
        "reclaims": journal.num_returned,
        "reclaims_forced": told["reclaims"],
        "reclaims_interrupting": told["reclaims_interrupting"],
        "reclaims_shrinking": told["reclaims_shrinking"],
        "interruptions": told["jobs_interrupted"],
        "reclaim_p50_s": told["reclaim_p50_s"],
        "reclaim_p95_s": told["reclaim_p95_s"],
        "reclaim_max_s": told["reclaim_max_s"],
        "reclaim_bound_s": DEFAULT_GRACE_S + START_S,
        "reclaim_cost_device_s": told["reclaim_lost_device_s"],
        "loans": journal.num_loaned,
        "loaned_servers_mean": areas.loaned_servers / journal.until_s,
    }
