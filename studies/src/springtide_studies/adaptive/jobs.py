"""A Pollux workload as jobs that arrive: with a batch size that policies choose, or as their owners tuned them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from springtide.core.errors import InvalidRequest
from springtide.core.workload import AdaptiveBatch, Entrypoint, TrainingJob, WorkloadId
from springtide.simulator.fluid.trace import Arrivals
from springtide.workloads.trace import Trace, TraceJob
from springtide_studies.adaptive.speeds import lengths
from springtide_studies.adaptive.truth import MAX_WORKERS, AppTruth, compact_placement

# `adaptive`: policies choose workers and batch. `tuned`: the batch size is the request's, and policies get the speeds
# at it.
BatchRule = Literal["adaptive", "tuned"]
_MAX_RESTARTS = 1_000_000
_CHECKPOINT_INTERVAL_S = 600.0
_SOURCE = Entrypoint(source_path="trace", object_name="fit")


def goodput_arrivals(
    trace: Trace,
    truths: Mapping[str, AppTruth],
    *,
    batch: BatchRule = "adaptive",
    knows_length: bool = True,
    max_workers: int = MAX_WORKERS,
) -> Arrivals:
    """The jobs of a workload at the moments of its file: the rounds of the published runs count from its clock.

    Raises InvalidRequest for an application without tables.
    """
    arrivals: Arrivals = []
    profiles: dict[tuple[str, int], dict[int, float]] = {}
    for row in trace.jobs:
        truth = truths.get(row.model)
        if truth is None:
            raise InvalidRequest(
                f"job {row.job_id}: there are no tables of {row.model!r}; there are {', '.join(sorted(truths))}"
            )
        arrivals.append((row.submit_s, _job(row, truth, batch, knows_length, max_workers, profiles)))
    return arrivals


def find_measurements_near(trace: Path) -> Path:
    """The folder of applications near a workload: `profiles` beside one of its parents. Raises InvalidRequest."""
    for parent in trace.absolute().parents[:4]:
        if any((parent / "profiles").glob("*/placements.csv")):
            return parent / "profiles"
    raise InvalidRequest(f"no measurements lie near {trace}; name their folder with --profiles DIR")


def _job(
    row: TraceJob,
    truth: AppTruth,
    rule: BatchRule,
    knows_length: bool,
    max_workers: int,
    profiles: dict[tuple[str, int], dict[int, float]],
) -> TrainingJob:
    app = truth.app
    fixed = row.global_batch_size if rule == "tuned" else app.fixed_batch_size
    initial = app.initial_batch_size if fixed is None else fixed
    largest = app.max_batch_size if fixed is None else fixed
    if not app.initial_batch_size <= initial <= app.max_batch_size:
        raise InvalidRequest(
            f"job {row.job_id}: a batch of {initial}; {app.name} was trained with {app.initial_batch_size} to "
            f"{app.max_batch_size}"
        )
    most = min(max_workers, largest // app.min_local_size)
    if app.fixed_batch_size is not None:
        # The published policies run this application on one device alone.
        most = 1
    profile: dict[int, float] = {}
    if rule == "tuned":
        key = (app.name, initial)
        profile = profiles[key] if key in profiles else profiles.setdefault(key, _profile(truth, initial, most))
    length = lengths(truth, initial)[0][-1]
    return TrainingJob(
        job_id=WorkloadId(row.job_id),
        name=row.job_id,
        entrypoint=_SOURCE,
        global_batch_size=initial,
        num_epochs=app.num_epochs,
        min_workers=1,
        max_workers=most,
        num_virtual_shards=MAX_WORKERS,
        max_restarts=_MAX_RESTARTS,
        checkpoint_interval_s=_CHECKPOINT_INTERVAL_S,
        params={"model": app.name, "tuned_batch_size": str(row.global_batch_size)},
        total_steps=math.ceil(length) if knows_length else None,
        profile_steps_per_s=profile,
        requested_workers=min(row.num_devices, most),
        batch=AdaptiveBatch(
            min_size=initial,
            max_size=largest,
            min_local_size=app.min_local_size,
            max_local_size=app.max_local_size,
        ),
        length_unit="progress",
        family=app.name,
    )


def _profile(truth: AppTruth, batch_size: int, max_workers: int) -> dict[int, float]:
    """Workers to steps a second at one batch size, packed on the fewest nodes."""
    return {
        count: 1.0 / truth.total_step_s(compact_placement(count), truth.split(batch_size, count))
        for count in range(1, max_workers + 1)
    }
