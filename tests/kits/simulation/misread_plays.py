"""Plays in which jobs are slow just while they are measured.

Many by hand: `PYTHONPATH=tests python -m kits.simulation.misread_plays POLICY COUNT`.

The speeds are the truth throughout; only what is reported of them is wrong for a while.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from springtide.core.decision import Overheads, Policy
from springtide.core.events import ProgressReported
from springtide.core.ports import Journal
from springtide.core.resources import make_node
from springtide.core.workload import Entrypoint, Goal, TrainingJob, WorkloadId
from springtide.scheduling.registry import make_policy
from springtide.simulator.fluid.play import FluidRunResult, play
from springtide.simulator.fluid.rules import OverheadRule, ProfiledSpeeds, make_run
from springtide.simulator.fluid.runs import FluidRun

Curve = tuple[float, ...]
# The part of its true speed that a run reports at this moment.
Misread = Callable[[FluidRun], float]
# A worker takes six seconds to come, a switch a fifth of one.
RULE = OverheadRule(name="test", pause=Overheads(change_s=0.2), cold_start_s=6.0)
SLOW = 0.3


class Misreading(ProfiledSpeeds):
    """Nobody knows the curves but by reports, the first soon after each change, then every five seconds."""

    report_every_s = 5.0

    def __init__(self, curves: Mapping[str, Curve], misread: Misread) -> None:
        super().__init__(devices_per_node=8)
        self._curve_of, self._misread = curves, misread

    def open_run(self, job: TrainingJob, now_s: float, done_steps: float = 0.0) -> FluidRun:
        curve = self._curve_of[job.job_id]
        length = float(job.total_steps or 0)
        return make_run(job, now_s, length=length, single_steps_per_s=curve[1], done_steps=done_steps, curve=curve)

    def first_report_s(self, run: FluidRun) -> float:
        return 2.0

    def report(self, run: FluidRun) -> ProgressReported:
        told = super().report(run)
        assert told.samples_per_s is not None
        return msgspec.structs.replace(told, samples_per_s=told.samples_per_s * self._misread(run))


def amdahl(most: int, parallel: float) -> Curve:
    """Steps a second, one on one device."""
    return (0.0, *(1.0 / (1.0 - parallel + parallel / n) for n in range(1, most + 1)))


def make(name: str, steps: int, most: int, *, profile: Curve = (), deadline_s: float | None = None) -> TrainingJob:
    return TrainingJob(
        job_id=WorkloadId(name),
        name=name,
        entrypoint=Entrypoint(source_path="a.py"),
        max_workers=most,
        num_virtual_shards=64,
        total_steps=steps,
        global_batch_size=10,
        requested_workers=1,
        profile_steps_per_s={n: rate for n, rate in enumerate(profile) if rate},
        goal=Goal(deadline_s=deadline_s),
    )


def drawn(seed: int) -> tuple[list[tuple[float, TrainingJob]], dict[str, Curve]]:
    rng = np.random.default_rng(seed)
    arrivals: list[tuple[float, TrainingJob]] = []
    curves: dict[str, Curve] = {}
    at_s = 0.0
    for index in range(14):
        at_s += float(rng.exponential(150.0))
        most = int(rng.choice([1, 2, 4]))
        curve = amdahl(most, float(rng.uniform(0.7, 0.98)))
        if rng.random() < 0.2:
            curve = (0.0, *(1.0 / n**0.5 for n in range(1, most + 1)))
        steps = int(rng.uniform(100, 3000))
        promised = rng.random() < 0.4
        name = f"job-{index}"
        curves[name] = curve
        deadline_s = at_s + steps * float(rng.uniform(0.6, 2.0)) + 30.0 if rng.random() < 0.6 or promised else None
        arrivals.append((at_s, make(name, steps, most, profile=curve if promised else (), deadline_s=deadline_s)))
    return arrivals, curves


def slow_moments(seed: int) -> Misread:
    """Jobs without a profile report a part of their speed for 0, 8 or 60 s when they first come to a size.

    How long is drawn by job and size, so that every policy meets the same.
    """
    moments: dict[tuple[str, int], tuple[float, float]] = {}

    def misread(run: FluidRun) -> float:
        key = run.job.job_id, len(run.members)
        if key not in moments:
            rng = np.random.default_rng([seed, int(run.job.job_id.removeprefix("job-")), len(run.members)])
            moments[key] = run.formed_s, float(rng.choice([0.0, 8.0, 60.0]))
        formed_s, length_s = moments[key]
        is_slow = run.formed_s == formed_s and run.since_s < formed_s + length_s
        return SLOW if is_slow and not run.job.profile_steps_per_s else 1.0

    return misread


def play_drawn(
    policy: Policy, seed: int, misread: Misread, *, journal: Journal | None = None, keeps_promises: bool = True
) -> FluidRunResult:
    """One drawn play on two nodes of four devices. Raises where a promise is broken or a job never ends."""
    arrivals, curves = drawn(seed)
    return play(
        policy,
        arrivals,
        [make_node("n0", 4), make_node("n1", 4)],
        rule=RULE,
        speeds=Misreading(curves, misread),
        reports_progress=True,
        journal=journal,
        keeps_promises=keeps_promises,
    )


def main(name: str, count: int) -> None:
    """Print how long jobs without a profile took, with right reports and with wrong ones."""
    for what, moments in (("right", lambda seed: lambda run: 1.0), ("slow at first", slow_moments)):
        took_s, num_changes, num_promised = [], [], 0
        for seed in range(count):
            played = play_drawn(make_policy(name), seed, moments(seed), keeps_promises=name == "springtide")
            for run in played.runs.values():
                num_promised += run.admitted_s is not None
                if not run.job.profile_steps_per_s and run.started_s is not None and run.ended_s is not None:
                    took_s.append(run.ended_s - run.submitted_s)
                    num_changes.append(run.num_resizes)
        sys.stdout.write(
            f"{name}, {count} plays, reports {what}: {np.mean(took_s):.1f} s on average of {len(took_s)} jobs without "
            f"a profile, {np.mean(num_changes):.2f} changes each, {max(num_changes)} at most; {num_promised} promises\n"
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
