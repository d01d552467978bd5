"""`simulate`: what each policy would do with a trace on a cluster, as one answer of plain values."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from springtide.core.decision import Policy
from springtide.core.errors import InvalidRequest
from springtide.core.ports import Journal
from springtide.core.resources import Node, make_node
from springtide.policies.registry import make_policy
from springtide.sim.fluid_faults import NodeFaults
from springtide.sim.fluid_figures import Setting, figures_of
from springtide.sim.fluid_play import play
from springtide.sim.fluid_rules import Speeds, overhead_rule
from springtide.sim.trace import TraceJobs, read_jobs
from springtide.workloads.cluster import parse_cluster
from springtide.workloads.profiles import Profiles
from springtide.workloads.trace import Trace

Progress = Callable[[str, int, int], None]
"""Told (policy, jobs ended, jobs in all) now and then."""


def simulate(
    trace: str | Trace,
    cluster: str | tuple[int, int],
    policies: Sequence[str] | Mapping[str, Policy],
    *,
    overhead: str = "elasticflow",
    seed: int = 0,
    limit: int | None = None,
    profiles: str | Path | Profiles | None = None,
    error_fraction: float = 0.0,
    mtbf_hours: float | None = None,
    repair_hours: float = 1.0,
    feels_placement: bool = True,
    strict: bool = True,
    timer: Callable[[], float] | None = None,
    on_progress: Progress | None = None,
    journal: Callable[[str], Journal] | None = None,
    with_series: bool = False,
    with_rows: bool = False,
) -> dict[str, Any]:
    """Play a trace under each policy, one after the other, and return the figures by policy.

    `policies` are names of the registry, or policies by any name. `error_fraction` is the spread of true speeds around
    the profiles, `mtbf_hours` the mean time between failures of a node. With `strict` a promise that is broken though
    everything was as predicted raises InvariantViolation; without it is counted. `timer` (CPU seconds) measures
    decisions and runs; without one those figures are None. `journal` makes the journal of a policy's run. Raises
    InvalidRequest on a bad trace or setting.
    """
    num_nodes, devices_per_node = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    num_devices = num_nodes * devices_per_node
    rule = overhead_rule(overhead, num_devices)
    makers = _makers(policies)
    jobs = read_jobs(trace, num_devices, seed=seed, limit=limit, profiles=profiles)
    nodes = [make_node(f"node-{index:03d}", devices_per_node, kind="gpu") for index in range(num_nodes)]
    setting = Setting(
        num_devices=num_devices,
        devices_per_node=devices_per_node,
        rule=rule,
        has_error=error_fraction > 0.0,
        feels_placement=feels_placement,
    )
    is_as_predicted = error_fraction == 0.0 and mtbf_hours is None
    answer = _header(trace, (num_nodes, devices_per_node), overhead, seed, jobs)
    if not is_as_predicted:
        answer |= {"error_fraction": error_fraction, "mtbf_hours": mtbf_hours, "repair_hours": repair_hours}
    for name, make in makers.items():
        speeds = Speeds(
            devices_per_node=devices_per_node, error_fraction=error_fraction, seed=seed, feels_placement=feels_placement
        )
        began_s = 0.0 if timer is None else timer()
        played = play(
            make(),
            jobs.arrivals,
            nodes,
            rule=rule,
            speeds=speeds,
            faults=_faults(nodes, seed, mtbf_hours, repair_hours),
            reports_progress=not is_as_predicted,
            keeps_promises=strict and is_as_predicted,
            told=_command(answer, name, limit, profiles, error_fraction, mtbf_hours),
            journal=None if journal is None else journal(name),
            timer=timer,
            on_progress=None if on_progress is None else _telling(on_progress, name),
        )
        played.cpu_s = None if timer is None else timer() - began_s
        answer["policies"][name] = figures_of(played, setting, with_series=with_series, with_rows=with_rows)
    return answer


def _makers(policies: Sequence[str] | Mapping[str, Policy]) -> dict[str, Callable[[], Policy]]:
    """How to make each policy. Raises InvalidRequest on an unknown or repeated name, before anything runs."""
    if isinstance(policies, Mapping):
        return {name: (lambda policy=policy: policy) for name, policy in policies.items()}  # type: ignore[misc]
    if not policies:
        raise InvalidRequest("no policy is named; `springtide policies` lists them")
    for name in policies:
        make_policy(name)
    return {name: (lambda name=name: make_policy(name)) for name in policies}  # type: ignore[misc]


def _faults(nodes: Sequence[Node], seed: int, mtbf_hours: float | None, repair_hours: float) -> NodeFaults | None:
    if mtbf_hours is None:
        return None
    return NodeFaults([node.node_id for node in nodes], seed=seed, mtbf_hours=mtbf_hours, repair_hours=repair_hours)


def _telling(on_progress: Progress, name: str) -> Callable[[int, int], None]:
    return lambda num_ended, num_jobs: on_progress(name, num_ended, num_jobs)


def _header(trace: str | Trace, cluster: tuple[int, int], overhead: str, seed: int, jobs: TraceJobs) -> dict[str, Any]:
    num_nodes, devices_per_node = cluster
    return {
        "trace": trace if isinstance(trace, str) else trace.name,
        "cluster": f"{num_nodes}x{devices_per_node}",
        "seed": seed,
        "overhead": overhead,
        "profiles": jobs.profiles or None,
        "num_jobs": len(jobs.arrivals),
        "num_devices": num_nodes * devices_per_node,
        "skipped": sum(jobs.skipped.values()),
        "skipped_by_reason": jobs.skipped,
        "drawn": list(jobs.drawn),
        "policies": {},
    }


def _command(
    answer: Mapping[str, Any],
    policy: str,
    limit: int | None,
    profiles: str | Path | Profiles | None,
    error_fraction: float,
    mtbf_hours: float | None,
) -> str:
    """The command that plays the same run again."""
    words = ["springtide", "simulate", "--trace", str(answer["trace"]), "--cluster", str(answer["cluster"])]
    words += ["--policy", policy, "--overhead", str(answer["overhead"]), "--seed", str(answer["seed"])]
    words += [] if limit is None else ["--jobs", str(limit)]
    words += ["--profiles", str(profiles)] if isinstance(profiles, str | Path) else []
    words += [] if error_fraction == 0.0 else ["--error", str(error_fraction)]
    words += [] if mtbf_hours is None else ["--mtbf", str(mtbf_hours)]
    return shlex.join(words)
