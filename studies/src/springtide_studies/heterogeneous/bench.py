"""`springtide bench heterogeneous`: jobs on devices of three models, beside Gavel's and Sia's rules."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide.core.decision import Policy
from springtide.core.workload import TrainingJob
from springtide.scheduling.policies.springtide.policy import Springtide
from springtide.simulator.fluid.play import FluidRunResult, play
from springtide.simulator.fluid.rules import ProfiledSpeeds, overhead_rule
from springtide.workloads.cluster import cluster_nodes
from springtide_studies.heterogeneous.jobs import Throughputs, draw_jobs, draw_throughputs, read_throughputs
from springtide_studies.heterogeneous.rivals import Gavel, SiaByModel, WithoutModels
from springtide_studies.options import seed_option, seeds_option
from springtide_studies.rows import machine_facts, machine_load, markdown_table, ratio

CLUSTER = "3x4:v100,3x4:p100,3x4:k80"
OURS, BASELINE = "springtide", "gavel"
# Each with whether its jobs are elastic: the rivals' have the number of devices that they ask for.
_POLICIES: Mapping[str, tuple[Callable[[], Policy], bool]] = {
    OURS: (Springtide, True),
    "springtide, fixed sizes": (Springtide, False),
    "springtide without models": (WithoutModels, True),
    BASELINE: (Gavel, False),
    "gavel makespan": (lambda: Gavel(objective="makespan"), False),
    "sia": (SiaByModel, False),
}
_FIGURES = ("jct_mean_s", "jct_p90_s", "makespan_s", "unfairness_mean", "unfairness_p90", "changes_mean")


def run_case(policy: Policy, jobs: Sequence[tuple[float, TrainingJob]], timer: Callable[[], float]) -> dict[str, float]:
    """Play these jobs under one policy."""
    begun_s, nodes = timer(), cluster_nodes(CLUSTER)
    found = play(
        policy,
        jobs,
        nodes,
        rule=overhead_rule("pollux", 36),
        speeds=ProfiledSpeeds(devices_per_node=len(nodes[0].devices)),
        # Without models it has to be told how fast jobs are.
        reports_progress=isinstance(policy, WithoutModels),
    )
    return _figures(found, sum(len(node.devices) for node in nodes)) | {"cpu_s": timer() - begun_s}


def _figures(found: FluidRunResult, num_devices: int) -> dict[str, float]:
    """Completion times; unfairness is the time a job takes over that on its part of the cluster, which is the mean of
    all models, among as many jobs as were there while it lived (finish-time fairness; Themis, NSDI'20)."""
    runs = [run for run in found.runs.values() if run.ended_s is not None]
    starts, ends = np.array([run.submitted_s for run in runs]), np.array([run.ended_s for run in runs])
    times = ends - starts
    overlap = np.clip(np.minimum(ends[:, None], ends) - np.maximum(starts[:, None], starts), 0.0, None)
    company = overlap.sum(axis=1) / times
    scales = np.array([run.job.requested_workers or 1 for run in runs])
    rates = np.array(
        [np.mean([speeds[n] for speeds in run.job.profiles.values()]) for run, n in zip(runs, scales, strict=True)]
    )
    part = np.minimum(1.0, num_devices / company / scales)
    unfairness = times * rates * part / np.array([run.length for run in runs])
    return {
        "jct_mean_s": float(times.mean()),
        "jct_p90_s": float(np.quantile(times, 0.9)),
        "makespan_s": float(ends.max() - starts.min()),
        "unfairness_mean": float(unfairness.mean()),
        "unfairness_p90": float(np.quantile(unfairness, 0.9)),
        "changes_mean": float(np.mean([run.num_restarts for run in runs])),
        "num_ended": float(len(runs)),
    }


def run_bench(
    tables: Throughputs,
    *,
    num_jobs: int,
    jobs_per_hour: float,
    seeds: Sequence[int],
    timer: Callable[[], float],
    tell: Tell = lambda line: None,
) -> Report:
    """Play arriving jobs, and jobs that are all there at once, from each seed under every policy."""
    load_before = machine_load()
    rows: list[dict[str, Any]] = []
    for case, rate in (("arriving", jobs_per_hour), ("all at once", 0.0)):
        for seed in seeds:
            policies: dict[str, dict[str, Any]] = {}
            for name, (make, is_elastic) in _POLICIES.items():
                jobs = draw_jobs(tables, num_jobs, seed, rate, is_elastic=is_elastic)
                policies[name] = run_case(make(), jobs, timer)
                tell(f"{case}, seed {seed}, {name}: {policies[name]['jct_mean_s']:,.0f} s on average")
            rows.append(_row(f"{case}, seed {seed}", policies))
        mine = rows[-len(seeds) :]
        if len(seeds) > 1:
            means = {
                name: {key: float(np.mean([row["policies"][name][key] for row in mine])) for key in _FIGURES}
                for name in _POLICIES
            }
            rows.append(_row(f"{case}, mean", means))
    return {
        "bench": "heterogeneous",
        "rows": rows,
        "passed": all(row["ratio"] <= 1.0 for row in rows if row["case"].endswith("mean")),
        "criterion": f"completion times of {OURS} no longer than those of {BASELINE}, on the mean of all seeds",
        "settings": {"cluster": CLUSTER, "jobs": num_jobs, "jobs_per_hour": jobs_per_hour, "seeds": list(seeds)},
        "machine": machine_facts(load_before),
    }


def _row(case: str, policies: dict[str, dict[str, Any]]) -> dict[str, Any]:
    ours, baseline = policies[OURS]["jct_mean_s"], policies[BASELINE]["jct_mean_s"]
    for figures in policies.values():
        figures["ratio"] = ratio(figures["jct_mean_s"], baseline)
    return {
        "case": case,
        "ours": ours,
        "baseline": baseline,
        "baseline_name": BASELINE,
        "ratio": ratio(ours, baseline),
        "unit": "s",
        "policies": policies,
    }


def markdown(report: Mapping[str, Any]) -> str:
    """The means of every policy, in a table for each kind of trace."""
    parts = []
    for row in report["rows"]:
        if row["case"].endswith("mean") or len(report["settings"]["seeds"]) == 1:
            lines = [
                [name, f"{figures['ratio']:.3f}", *(f"{figures[key]:,.2f}" for key in _FIGURES)]
                for name, figures in row["policies"].items()
            ]
            parts.append(markdown_table([row["case"], "ratio", *_FIGURES], lines))
    return "\n\n".join(parts)


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    first = options["seed"]
    tables = read_throughputs(Path(options["data"])) if options["data"] else draw_throughputs(first)
    return run_bench(
        tables,
        num_jobs=options["jobs"],
        jobs_per_hour=options["rate"],
        seeds=range(first, first + options["seeds"]),
        timer=time.process_time,
        tell=tell,
    )


BENCH = Bench(
    run=_run,
    options=[
        click.Option(["--data"], metavar="DIR", help="Gavel's folder of throughputs; without it a table is drawn."),
        click.Option(["--jobs"], type=click.IntRange(min=1), default=100, help="Jobs of a trace. [default: 100]"),
        click.Option(["--rate"], type=click.FloatRange(min=0.1), default=0.6, help="Jobs an hour. [default: 0.6]"),
        seeds_option(3),
        seed_option(),
    ],
    markdown=markdown,
)
