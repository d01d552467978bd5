"""FaPES's table 3: rounds of 10, 20 and 30 minutes on 1,000 servers, with servers loaned to training and without.

FaPES (SoCC'24), section 7.5. Inference owns 200 of the servers and needs them all at the highest tide. The paper does
not publish its load; `LOAD` says how it was set here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from springtide.core.events import CancelRequested, Event, LoadObserved, ServiceDeployed
from springtide.core.workload import WorkloadId
from springtide.perf.communication.fabric import V100_SERVER
from springtide.workloads.cluster import cluster_nodes
from springtide_studies.fapes.jobs import FapesRequest, draw_requests
from springtide_studies.fapes.play import FapesRun, play_requests, table_row
from springtide_studies.loans.play import DEVICES, JOBS_PER_S, TIMES, label_nodes, tide_of
from springtide_studies.rows import ratio
from springtide_studies.workloads.generators import draw_gamma
from springtide_studies.workloads.tidal import draw_tidal

CLUSTER, N_R_MAX = "1000x8@10x10x10", 200
# An hour of the night, in bursts as in Google's trace. By day FaPES lends nothing: its services grow to their maximum.
BEGIN_S, HOURS, VARIATION = 2.0 * 3600.0, 1.0, 4.0
# Times the arrivals for each GPU of table 1: such that without loans, in rounds of 10 minutes, jobs take as long as in
# the paper's table (39.9 minutes of 41.6); all else is what comes of it.
LOAD = 2.5
ROUNDS_S: tuple[float, ...] = (600.0, 1200.0, 1800.0)
STRATEGIES = ("dedicated", "two-way")
# FaPES, table 3: utilisation and average JCT in minutes.
PUBLISHED: Mapping[tuple[str, float], tuple[float, float]] = MappingProxyType(
    {
        ("two-way", 600.0): (0.93, 38.5),
        ("two-way", 1200.0): (0.81, 42.7),
        ("two-way", 1800.0): (0.62, 53.0),
        ("dedicated", 600.0): (0.82, 41.6),
        ("dedicated", 1200.0): (0.66, 59.3),
        ("dedicated", 1800.0): (0.51, 67.9),
    }
)


def draw_scale_jobs(seed: int, num_devices: int, hours: float, load: float) -> tuple[FapesRequest, ...]:
    """The training jobs of `hours`. Raises InvalidRequest for a negative seed."""
    rate_per_s = load * JOBS_PER_S * num_devices / DEVICES
    moments = draw_gamma(seed, rate_per_s=rate_per_s, duration_s=hours * 3600.0, variation=VARIATION)
    return draw_requests(moments.tolist(), seed)


def from_moment(timed_events: Sequence[tuple[float, Event]], begin_s: float) -> list[tuple[float, Event]]:
    """What happens from `begin_s` on, on a clock that starts there; before it, the last of each job left."""
    past: dict[WorkloadId, dict[type, Event]] = {}
    for _, event in (entry for entry in timed_events if entry[0] <= begin_s):
        match event:
            case ServiceDeployed(service=service):
                past.setdefault(service.service_id, {})[type(event)] = event
            case LoadObserved(service_id=service_id):
                past.setdefault(service_id, {})[type(event)] = event
            case CancelRequested(workload_id=workload_id):
                past.pop(workload_id, None)
            case _:
                raise AssertionError(f"a tide without {type(event).__name__} was meant")
    coming = [(at_s - begin_s, event) for at_s, event in timed_events if at_s > begin_s]
    return [(0.0, event) for events in past.values() for event in events.values()] + coming


def run_scale(
    fapes: Callable[[str], str],
    seed: int,
    *,
    timer: Callable[[], float],
    tell: Callable[[str], None],
    rounds_s: Sequence[float] = ROUNDS_S,
    strategies: Sequence[str] = STRATEGIES,
    cluster: str = CLUSTER,
    n_r_max: int = N_R_MAX,
    hours: float = HOURS,
    load: float = LOAD,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Play every strategy with every length of a round: the rows of the table, and the comparisons.

    `fapes` names the policy with further parameters. Starts are at rounds only, as in the paper.
    """
    nodes = label_nodes(cluster_nodes(cluster), n_r_max)
    requests = draw_scale_jobs(seed, sum(len(node.devices) for node in nodes), hours, load)
    num_days = int((BEGIN_S + hours * 3600.0) // 86_400.0) + 2
    services = from_moment(draw_tidal(seed, tide_of(n_r_max, num_days, len(nodes[0].devices))).timed_events, BEGIN_S)
    found: dict[tuple[str, float], FapesRun] = {}
    table: list[dict[str, Any]] = []
    for round_s in rounds_s:
        for strategy in strategies:
            policy = f"{strategy}/{fapes(f'round_s={round_s:g}:starts=no')}"
            outcome = play_requests(
                policy, requests, nodes, V100_SERVER, timer=timer, timed_events=services, times=TIMES
            )
            found[strategy, round_s] = outcome
            label = f"{strategy}, rounds of {round_s / 60:.0f} min"
            paper = PUBLISHED.get((strategy, round_s), (None, None))
            table.append(
                table_row("scale", label, outcome)
                | {"paper_utilisation": paper[0], "paper_jct_min": paper[1]}
                | {"minimums_broken": outcome.minimums_broken, "lent_mean": outcome.lent_mean}
            )
            slow_s = float(np.percentile(outcome.decisions_s, 99)) if len(outcome.decisions_s) else 0.0
            tell(
                f"{label}: {len(requests)} jobs, JCT {outcome.jct_s.mean() / 60:.1f} min (paper {paper[1]}), "
                f"utilisation {outcome.utilisation:.2f} (paper {paper[0]}), {outcome.lent_mean:.0f} servers lent, "
                f"{outcome.minimums_broken} minimums broken, decisions p99 {slow_s:.3f} s"
            )
    return table, _comparisons(found, rounds_s)


def _comparisons(found: Mapping[tuple[str, float], FapesRun], rounds_s: Sequence[float]) -> list[dict[str, Any]]:
    """With loans against without: better times, more use."""
    rows: list[dict[str, Any]] = []
    for round_s in rounds_s:
        ours, other = found.get(("two-way", round_s)), found.get(("dedicated", round_s))
        if ours is None or other is None:
            continue
        case = f"scale, rounds of {round_s / 60:.0f} min"
        times_min = float(ours.jct_s.mean()) / 60.0, float(other.jct_s.mean()) / 60.0
        for name, both, unit in (
            ("JCT", times_min, "min"),
            ("utilisation", (ours.utilisation, other.utilisation), "of all devices"),
        ):
            rows.append(
                {
                    "case": f"{case}: {name}",
                    "ours": both[0],
                    "baseline": both[1],
                    "baseline_name": "without loans",
                    "ratio": ratio(*both),
                    # The last is no condition: what is used depends on what services grow to.
                    "bound": 1.0 if name == "JCT" else None,
                    "unit": unit,
                }
            )
    return rows
