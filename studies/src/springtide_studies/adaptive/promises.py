"""`springtide bench promised-batches`: deadlines of jobs whose batch may change, and what others get beside them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide.core.errors import InvalidRequest
from springtide.core.workload import Goal, JobState
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.registry import make_policy
from springtide.simulator.fluid.play import FluidRunResult, play
from springtide.simulator.fluid.rules import overhead_rule
from springtide.simulator.fluid.trace import Arrivals
from springtide.workloads.formats.pollux import read
from springtide_studies.adaptive.jobs import goodput_arrivals
from springtide_studies.adaptive.play import make_nodes
from springtide_studies.adaptive.speeds import GoodputSpeeds
from springtide_studies.adaptive.truth import DEVICES_PER_NODE, MAX_NODES, AppTruth, compact_placement, make_truths
from springtide_studies.options import names_of, policies_option, seed_option
from springtide_studies.rows import machine_facts, machine_load, ratio
from springtide_studies.workloads.pollux_tables import read_applications

OURS, BASELINE = "springtide", "goodput:round_s=60"
# A deadline counts from the time on so many devices at one batch for the whole run.
_NUM_DEVICES = 4
# Applications that run on one device or for half of the trace: their deadlines say little.
_WITHOUT_DEADLINES = frozenset({"ncf", "imagenet"})
# The part of the jobs with a deadline, and between which factors of that time it lies.
_CASES = ((0.3, 1.5, 4.0), (0.5, 1.0, 2.0), (0.6, 0.75, 1.3))


def with_deadlines(
    arrivals: Arrivals, truths: Mapping[str, AppTruth], part: float, low: float, high: float, seed: int
) -> Arrivals:
    """The jobs, a drawn part of them with hard deadlines: `low` to `high` times their time on four devices at the best
    batch that is kept to the end, and a minute more for the start."""
    rng = random.Random(f"{seed} {part} {low} {high}")
    needs_s = {
        name: min(truth.time_alone_s(compact_placement(_NUM_DEVICES), [size]) for size in truth.batch_grid())
        for name, truth in truths.items()
    }
    found: Arrivals = []
    for at_s, job in arrivals:
        if job.family not in _WITHOUT_DEADLINES and rng.random() < part:
            deadline_s = at_s + rng.uniform(low, high) * needs_s[job.family] + 60.0
            job = msgspec.structs.replace(job, goal=Goal(deadline_s=deadline_s))
        found.append((at_s, job))
    return found


def figures_of(played: FluidRunResult) -> dict[str, Any]:
    """How many deadlines were met, promised and broken, and the mean completion time of the jobs without one."""
    runs = list(played.runs.values())
    due = [run for run in runs if run.job.goal.deadline_s is not None]
    ended = [run for run in due if run.state is JobState.SUCCEEDED]
    late = [run for run in ended if (run.ended_s or 0.0) > (run.job.goal.deadline_s or 0.0)]
    others = [(run.ended_s or 0.0) - run.submitted_s for run in runs if run.job.goal.deadline_s is None]
    return {
        "deadlines": len(due),
        "met": len(ended) - len(late),
        "late": len(late),
        "refused": sum(run.state is JobState.REJECTED for run in due),
        "promised": sum(run.admitted_s is not None for run in due),
        "broken": sum(run.admitted_s is not None for run in late),
        "best_effort_jct_s": float(np.mean(others)) if others else None,
    }


def run_bench(
    data: Path,
    workloads: Sequence[str],
    policies: Sequence[str],
    seed: int,
    timer: Callable[[], float],
    tell: Callable[[str], None],
) -> Report:
    """Play each workload with each part and tightness of deadlines under each policy. Raises InvalidRequest."""
    load_before = machine_load()
    truths = make_truths(read_applications(data / "profiles"))
    folder = data / "workloads-osdi21" / "workloads"
    rows: list[dict[str, Any]] = []
    for name in workloads or sorted(path.stem.partition("-")[2] for path in folder.glob("workload-*.csv")):
        arrivals = goodput_arrivals(read(folder / f"workload-{name}.csv"), truths)
        for part, low, high in _CASES:
            asked = with_deadlines(arrivals, truths, part, low, high, seed)
            found: dict[str, dict[str, Any]] = {}
            for policy in policies:
                begun_s = timer()
                played = play(
                    DecisionCache(make_policy(policy)),
                    asked,
                    make_nodes(),
                    rule=overhead_rule("pollux", MAX_NODES * DEVICES_PER_NODE),
                    speeds=GoodputSpeeds(truths, whole_seconds=True),
                    reports_progress=True,
                )
                found[policy] = figures_of(played) | {"cpu_s": timer() - begun_s}
                tell(f"workload {name}, {part:.0%} with {low:g} to {high:g}: {policy} {found[policy]}")
            ours, baseline = (found.get(policy, {}).get("best_effort_jct_s") for policy in (OURS, BASELINE))
            rows.append(
                {
                    "case": f"workload {name}, {part:.0%} of the jobs with {low:g} to {high:g} of their time",
                    "ours": ours,
                    "baseline": baseline,
                    "baseline_name": BASELINE,
                    "ratio": ratio(ours, baseline),
                    "unit": "s",
                    "policies": found,
                }
            )
    broken = sum(row["policies"].get(OURS, {}).get("broken", 0) for row in rows)
    return {
        "bench": "promised-batches",
        "rows": rows,
        "passed": broken == 0,
        "criterion": f"no promise of {OURS} broken (here {broken}); times are those of jobs without a deadline",
        "settings": {"seed": seed, "policies": list(policies)},
        "machine": machine_facts(load_before),
    }


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    data = Path(options["data"] or "")
    if not options["data"] or not (data / "profiles").is_dir():
        raise InvalidRequest("name the folder that holds profiles/ and workloads-osdi21/ with --data DIR")
    policies = names_of(options["policies"]) or [OURS, BASELINE]
    return run_bench(data, names_of(options["workloads"]), policies, options["seed"], time.process_time, tell)


BENCH = Bench(
    run=_run,
    options=[
        click.Option(["--data"], metavar="DIR", help="The folder with profiles/ and workloads-osdi21/."),
        policies_option(),
        click.Option(["--workloads"], metavar="N,N", help="These of the folder instead of all."),
        seed_option(),
    ],
)
