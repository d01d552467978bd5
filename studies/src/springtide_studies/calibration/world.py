"""A world in which declared speeds are wrong and nodes fail: jobs are quoted by the product, then played to their end.

Each job meets an idle platform of four nodes. What it turns out to be is drawn here; whether it is promised, how it is
replanned once its speed shows, and what is learnt from it is the product's: the same quote, policy, controller and
transitions as on a live platform.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from springtide.control.controller import Controller
from springtide.control.journal.memory import MemoryJournal
from springtide.control.quotes.confidence import SpeedRisk
from springtide.control.quotes.quote import quote
from springtide.core.events import NodeJoined
from springtide.core.job_parts import JobOutcome
from springtide.core.workload import Entrypoint, Goal, JobState, SpeedBelief, TrainingJob, WorkloadId
from springtide.perf.calibration import SpeedErrors
from springtide.scheduling.registry import make_policy
from springtide.simulator.fluid.faults import NodeFaults
from springtide.simulator.fluid.play import play
from springtide.simulator.fluid.rules import ProfiledSpeeds, overhead_rule
from springtide.workloads.cluster import cluster_nodes

NUM_NODES, DEVICES_PER_NODE = 4, 4
# Families come and go: of so many at a time, drawn by Zipf, all are new ones so often in a run.
NUM_FAMILIES, GENERATIONS = 60, 4
# Of the logarithm of the time: families differ so much from what they declare, runs of one so much from each other.
_FAMILY_SPREAD, _RUN_SPREAD, _RUN_FREEDOM = 0.35, 0.07, 5
_SLOW_FRACTION, _SLOW = 0.03, (1.2, 2.0)
_MTBF_HOURS = 100.0
# From this part of the jobs on every speed is lower.
DRIFT_FROM, DRIFT = 0.7, 0.15
# So many later jobs are quoted before a job has ended, on average.
_IN_FLIGHT = 20.0
ASKED = (None, None, None, None, 0.5, 0.8, 0.9, 0.95, 0.99, 0.99)


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A promise: the `index` of its job, what was asked and said, whether it was kept; how often the family had run."""

    index: int
    asked: float | None
    said: float
    is_kept: bool
    num_earlier: int
    num_failures: int


def promises(num_jobs: int, seed: int, tell: Callable[[int], None]) -> Iterator[Promise]:
    """Quote and play so many jobs; what became of each that was promised."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, 27]))
    weights = 1.0 / np.arange(1, NUM_FAMILIES + 1)
    weights /= weights.sum()
    levels = rng.normal(0.0, _FAMILY_SPREAD, (GENERATIONS, NUM_FAMILIES))
    policy, errors, seen = make_policy("springtide"), SpeedErrors(), dict[str, int]()
    rule = overhead_rule("measured", NUM_NODES * DEVICES_PER_NODE)
    nodes = cluster_nodes(f"{NUM_NODES}x{DEVICES_PER_NODE}")
    platform = Controller(policy, overheads=rule.announced)
    platform.step(0.0, [NodeJoined(node=node) for node in nodes])
    snapshot = platform.snapshot(0.0)
    ending: list[tuple[float, JobOutcome]] = []
    for index in range(num_jobs):
        tell(index)
        for at, outcome in [entry for entry in ending if entry[0] <= index]:
            errors.learn(outcome)
            seen[outcome.family] = seen.get(outcome.family, 0) + 1
            ending.remove((at, outcome))
        family, generation = int(rng.choice(NUM_FAMILIES, p=weights)), index * GENERATIONS // num_jobs
        error = float(levels[generation, family]) + _RUN_SPREAD * float(rng.standard_t(_RUN_FREEDOM))
        error += math.log(rng.uniform(*_SLOW)) if rng.random() < _SLOW_FRACTION else 0.0
        error += math.log1p(DRIFT) if index >= DRIFT_FROM * num_jobs else 0.0
        job, asked = _draw_job(f"{family}.{generation}", rng), ASKED[int(rng.integers(len(ASKED)))]
        risk, faults_seed, gap = SpeedRisk(errors), int(rng.integers(2**31)), float(rng.exponential(_IN_FLIGHT))
        job = job if asked is None else risk.at_level(job, asked)
        answer = quote(snapshot, policy, job, risk=risk)
        if not answer.is_promised or answer.probability is None:
            continue
        # Speeds of the profile are slower than what is expected where a confidence was asked for.
        journal, factor = MemoryJournal(), math.exp(-error) * (job.belief or SpeedBelief()).factor(0)
        faults = NodeFaults([node.node_id for node in nodes], seed=faults_seed, mtbf_hours=_MTBF_HOURS)
        played = play(
            policy,
            [(0.0, job)],
            nodes,
            rule=rule,
            speeds=ProfiledSpeeds(devices_per_node=DEVICES_PER_NODE, factor=factor),
            faults=faults,
            reports_progress=True,
            keeps_promises=False,
            journal=journal,
        )
        run, after = played.runs[job.job_id], Controller(policy, overheads=rule.announced)
        for _, step in journal.read():
            after.restore(step)
        ending += [(index + gap, outcome) for outcome in after.state.outcomes]
        yield Promise(
            index=index,
            asked=asked,
            said=answer.probability,
            is_kept=run.state is JobState.SUCCEEDED and (run.ended_s or 0.0) <= (job.goal.deadline_s or 0.0),
            num_earlier=seen.get(job.family, 0),
            num_failures=run.num_losses,
        )


def _draw_job(family: str, rng: np.random.Generator) -> TrainingJob:
    """A job of ten minutes to four hours on one device, with a deadline of 0.95 to 2.5 times its declared shortest."""
    alone_s, most = float(np.exp(rng.uniform(np.log(600.0), np.log(14400.0)))), int(2 ** rng.integers(0, 4))
    parallel, steps = float(rng.uniform(0.85, 0.99)), 20_000
    rates = {n: steps / alone_s / (1 - parallel + parallel / n) for n in (1, 2, 4, 8) if n <= most}
    job = TrainingJob(
        job_id=WorkloadId("job"),
        name="job",
        entrypoint=Entrypoint(source_path="job.py", object_name="fit"),
        max_workers=most,
        num_virtual_shards=max(4, most),
        total_steps=steps,
        profile_steps_per_s=rates,
        belief=SpeedBelief(is_declared=True),
        family=family,
        max_restarts=100,
    )
    deadline_s = 15.0 + steps / rates[most] * float(np.exp(rng.uniform(math.log(0.95), math.log(2.5))))
    return replace(job, goal=Goal(deadline_s=deadline_s))
