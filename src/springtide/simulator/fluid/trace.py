"""The jobs of a trace as they arrive on the platform: `generated:N`, or a file that `workloads` reads."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from springtide.core.errors import InvalidRequest
from springtide.core.workload import MAX_VIRTUAL_SHARDS, Entrypoint, Goal, TrainingJob, WorkloadId
from springtide.workloads.drawing import check_complete, draw_missing
from springtide.workloads.profiles import Profiles, choose_profiles
from springtide.workloads.readers import read_trace
from springtide.workloads.trace import Trace, TraceJob, make_trace

MAX_GENERATED_JOBS = 100_000
_FEWEST_VIRTUAL_SHARDS = 64
# Published schedulers leave periodic checkpoints out; one every ten minutes bounds what a fault costs.
_CHECKPOINT_INTERVAL_S = 600.0
# Faults of nodes must not use up a job's restarts.
_MAX_RESTARTS = 1_000_000
_SOURCE = Entrypoint(source_path="trace", object_name="fit")

Arrivals = list[tuple[float, TrainingJob]]


class TraceJobs(msgspec.Struct, frozen=True, kw_only=True):
    """Training jobs with the moments of their submission, in order, on a clock that starts at the first of them.

    `profiles` names the folder of scaling tables, "" if the trace brings its own speeds. `skipped` counts the rows that
    were left out by reason, `drawn` lists the fields that were drawn at random.
    """

    name: str
    arrivals: Arrivals
    profiles: str = ""
    skipped: dict[str, int] = {}
    drawn: tuple[str, ...] = ()


def read_jobs(
    trace: str | Trace,
    num_devices: int,
    *,
    seed: int = 0,
    limit: int | None = None,
    profiles: str | Path | Profiles | None = None,
    format: str = "auto",
    draws: bool = False,
) -> TraceJobs:
    """The first `limit` jobs of a trace on a cluster of `num_devices`. `profiles`: tables, or the folder of them.

    With `draws`, fields that the file lacks are drawn from these tables and the seed. Raises InvalidRequest naming
    what is wrong, with line and column where it is in the file.
    """
    path: Path | None = None
    if isinstance(trace, str):
        kind, separator, rest = trace.partition(":")
        if kind == "generated" and separator:
            trace = generate(_count(trace, rest, limit), num_devices, seed)
        else:
            path = Path(trace)
            trace = read_trace(path, format=format, limit=limit)
    tables: Profiles | None = None
    if trace.pairs or draws:
        if path is None and profiles is None:
            raise InvalidRequest(
                f"trace {trace.name} is no file that tables could lie near; name some with --profiles DIR"
            )
        tables = choose_profiles(trace, path or "", profiles)
        trace = draw_missing(trace, tables, seed) if draws else trace
    check_complete(trace)
    jobs = trace.jobs if limit is None else trace.jobs[:limit]
    if not jobs:
        raise InvalidRequest(f"trace {trace.name} holds no job; give one with at least one row below the header")
    first_s = jobs[0].submit_s
    return TraceJobs(
        name=trace.name,
        arrivals=[(job.submit_s - first_s, _training_job(job, first_s, tables, num_devices)) for job in jobs],
        profiles="" if tables is None else tables.name,
        skipped=trace.skipped,
        drawn=trace.drawn,
    )


def _count(trace: str, text: str, limit: int | None) -> int:
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MAX_GENERATED_JOBS:
        raise InvalidRequest(f"trace {trace!r} needs a number of jobs from 1 to {MAX_GENERATED_JOBS}: generated:200")
    return int(text) if limit is None else min(limit, int(text))


def _training_job(job: TraceJob, first_s: float, tables: Profiles | None, num_devices: int) -> TrainingJob:
    if job.has_own_curve:
        counts = range(1, min(job.max_workers or num_devices, num_devices, MAX_VIRTUAL_SHARDS) + 1)
        profile = {count: job.own_steps_per_s(count) for count in counts}
    else:
        assert tables is not None
        profile = tables.steps_per_s(job.model, job.global_batch_size)
    least = max(min(profile), job.min_workers or 1)
    most = min(max(profile), job.max_workers or max(profile), num_devices, MAX_VIRTUAL_SHARDS)
    if least > most:
        who = f"job {job.job_id}"
        raise InvalidRequest(f"{who} needs at least {least} devices, this cluster has {num_devices}; give a larger one")
    return TrainingJob(
        job_id=WorkloadId(job.job_id),
        name=job.job_id,
        entrypoint=_SOURCE,
        global_batch_size=job.global_batch_size or 1,
        min_workers=least,
        max_workers=most,
        num_virtual_shards=max(_FEWEST_VIRTUAL_SHARDS, 1 << (most - 1).bit_length()),
        goal=Goal(deadline_s=None if job.deadline_s is None else job.deadline_s - first_s, waits=True),
        max_restarts=_MAX_RESTARTS,
        checkpoint_interval_s=_CHECKPOINT_INTERVAL_S,
        params={"model": job.model} if job.model else {},
        owner=job.owner,
        total_steps=job.num_steps,
        profile_steps_per_s=profile,
        requested_workers=min(max(job.num_devices, least), num_devices),
        share=job.share,
    )


def generate(num_jobs: int, num_devices: int, seed: int) -> Trace:
    """Poisson arrivals that load the cluster by four fifths, log-uniform lengths, half of the jobs with a deadline."""
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    lengths_s = np.exp(rng.uniform(np.log(60.0), np.log(3600.0), num_jobs))
    gap_s = float(lengths_s.mean()) / (0.8 * num_devices)
    moments_s = np.cumsum(rng.exponential(gap_s, num_jobs))
    jobs = []
    for index, (at_s, length_s) in enumerate(zip(moments_s.tolist(), lengths_s.tolist(), strict=True)):
        samples_per_s = float(np.exp(rng.uniform(np.log(50.0), np.log(2000.0))))
        most = min(num_devices, int(2 ** rng.integers(0, 4)))
        parallel = float(rng.uniform(0.8, 0.99))
        batch_size = int(rng.choice([64, 128, 256]))
        deadline_s = at_s + length_s * float(rng.uniform(0.8, 3.0)) if rng.random() < 0.5 else None
        jobs.append(
            TraceJob(
                job_id=f"job-{index:05d}",
                submit_s=at_s,
                num_steps=max(1, round(samples_per_s * length_s / batch_size)),
                global_batch_size=batch_size,
                num_devices=most,
                duration_s=length_s * (1 - parallel + parallel / most),
                deadline_s=deadline_s,
                is_best_effort=deadline_s is None,
                min_workers=1,
                max_workers=most,
                samples_per_s_1=samples_per_s,
                parallel_fraction=parallel,
            )
        )
    return make_trace(f"generated:{num_jobs}", jobs, drawn=(f"every job, with seed {seed}",))
