"""Traces of jobs with deadlines, played under a policy."""

from __future__ import annotations

import numpy as np

from kits.job_parts import with_fields
from springtide.core.workload import JobState
from springtide.simulator.simulate import simulate
from springtide.workloads.trace import Trace, TraceJob


def promised(view, *, held=0, at_s=0.0):
    """The same job after admission, running if it holds devices."""
    state = JobState.RUNNING if held else JobState.PENDING
    return with_fields(
        view,
        state=state,
        admitted_at_s=at_s,
        promised_finish_s=view.job.goal.deadline_s,
        progress_at_s=at_s,
        num_replicas=held,
        started_at_s=at_s if held else None,
    )


def trace_of(seed: int, num_jobs: int = 25) -> Trace:
    """Jobs that arrive in bursts on few devices, so that a good part of them has to be refused."""
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    jobs, at_s = [], 0.0
    for number in range(num_jobs):
        at_s += float(rng.exponential(150.0)) if rng.random() < 0.7 else 0.0
        rate = float(np.exp(rng.uniform(-1.0, 3.0)))
        work_s = float(rng.uniform(100.0, 4000.0))
        has_deadline = rng.random() < 0.85
        jobs.append(
            TraceJob(
                job_id=f"job-{number}",
                submit_s=at_s,
                num_steps=max(1, int(work_s * rate)),
                global_batch_size=1,
                samples_per_s_1=rate,
                parallel_fraction=float(rng.uniform(0.5, 1.0)),
                max_workers=int(rng.choice([1, 4, 8])),
                deadline_s=at_s + work_s * float(rng.uniform(0.3, 2.0)) if has_deadline else None,
                is_best_effort=not has_deadline,
            )
        )
    return Trace(name=f"burst-{seed}", jobs=tuple(jobs))


def play(trace, policy, **options):
    answer = simulate(trace, "2x4", {"mine": policy}, with_rows=True, **options)
    return answer["policies"]["mine"]
