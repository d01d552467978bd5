"""The common form of traces of training jobs, from whatever format. All times are in seconds on one clock."""

from __future__ import annotations

import math

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.core.quantities import validate_name
from springtide.core.shares import Share

MAX_JOBS = 1_000_000
# Beyond 3,000 years a float no longer holds a tenth of a millisecond, and something is wrong with the unit.
MAX_TIME_S = 1e11
# Whole numbers up to here survive a trip through a float.
MAX_STEPS = 2**53
MAX_DEVICES = 100_000


class TraceJob(msgspec.Struct, frozen=True, kw_only=True):
    """One training job as recorded in a trace. Raises InvalidRequest where a value cannot be.

    `submit_s` and `deadline_s` are absolute moments of the trace's own clock. `num_steps` counts optimizer steps at
    `global_batch_size` samples each. An empty `model`, `num_steps` 0 and `global_batch_size` 0 mean that
    the trace does not have them. `num_devices` is what the owner requested, `duration_s` the run time on that many. A
    job without a deadline is best effort or, if `is_best_effort` is False, its deadline has not been drawn yet.

    Few formats have the last fields: bounds on workers, the length in samples, a speed (`samples_per_s_1` on one
    worker, of which `parallel_fraction` scales with workers), and the share of its device that each worker holds (None:
    the whole device, on which all speeds are measured).
    """

    job_id: str
    submit_s: float
    num_steps: int = 0
    model: str = ""
    global_batch_size: int = 0
    num_devices: int = 1
    duration_s: float | None = None
    deadline_s: float | None = None
    is_best_effort: bool = False
    owner: str = ""
    min_workers: int | None = None
    max_workers: int | None = None
    num_samples: int | None = None
    samples_per_s_1: float | None = None
    parallel_fraction: float | None = None
    share: Share | None = None

    def __post_init__(self) -> None:
        validate_name(self.job_id, "the job id")
        who = f"job {self.job_id}"
        check_time_s(self.submit_s, f"{who}: submit_s")
        if self.duration_s is not None:
            check_time_s(self.duration_s, f"{who}: duration_s")
        if self.deadline_s is not None:
            check_time_s(self.deadline_s, f"{who}: deadline_s")
            if self.deadline_s < self.submit_s:
                raise InvalidRequest(f"{who}: its deadline {self.deadline_s:g} lies before its submission")
            if self.is_best_effort:
                raise InvalidRequest(f"{who}: a best-effort job has no deadline; drop one of the two")
        if not 0 <= self.num_steps <= MAX_STEPS:
            raise InvalidRequest(f"{who}: num_steps {self.num_steps} must be from 0 (unknown) to {MAX_STEPS}")
        if not 0 <= self.global_batch_size <= MAX_STEPS:
            raise InvalidRequest(f"{who}: global_batch_size {self.global_batch_size} must be 0 (unknown) or more")
        if self.samples_per_s_1 is not None and not 0 < self.samples_per_s_1 < math.inf:
            raise InvalidRequest(f"{who}: samples_per_s_1 {self.samples_per_s_1!r} must be above 0 and finite")
        if self.parallel_fraction is not None and not 0 <= self.parallel_fraction <= 1:
            raise InvalidRequest(f"{who}: parallel_fraction {self.parallel_fraction!r} must be from 0 to 1")
        least, most = self.min_workers or 1, self.max_workers or MAX_DEVICES
        if not 1 <= self.num_devices <= MAX_DEVICES or not 1 <= least <= most <= MAX_DEVICES:
            raise InvalidRequest(f"{who}: num_devices and workers must be from 1 to {MAX_DEVICES}, the least first")

    @property
    def pair(self) -> tuple[str, int]:
        """Model and global batch size: the key into the scaling tables."""
        return self.model, self.global_batch_size

    @property
    def is_complete(self) -> bool:
        """Whether its length and its speed are known, the latter by its pair or by its own curve."""
        return self.num_steps > 0 and self.global_batch_size > 0 and (bool(self.model) or self.has_own_curve)

    @property
    def has_own_curve(self) -> bool:
        return self.samples_per_s_1 is not None and self.parallel_fraction is not None

    def own_steps_per_s(self, num_workers: int) -> float:
        """Optimizer steps a second on so many workers, for a job that `has_own_curve` (Amdahl's law)."""
        assert self.samples_per_s_1 is not None, "the trace gives no speed"
        assert self.parallel_fraction is not None, "the trace gives no speed"
        serial = 1.0 - self.parallel_fraction
        return self.samples_per_s_1 / (serial + self.parallel_fraction / num_workers) / self.global_batch_size


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of one file in order of submission, and what was left out of it or added to it.

    `skipped` counts the rows that were left out, by reason. `drawn` has a sentence for each field that was drawn, with
    its rule and seed. `pair_places` has (model, global batch size, file, line and column where the pair is first
    named), for errors about pairs that no scaling table has.
    """

    name: str
    jobs: tuple[TraceJob, ...]
    skipped: dict[str, int] = {}
    drawn: tuple[str, ...] = ()
    format: str = ""
    pair_places: tuple[tuple[str, int, str], ...] = ()

    def __post_init__(self) -> None:
        known: set[str] = set()
        last_s = 0.0
        for job in self.jobs:
            if job.job_id in known:
                raise InvalidRequest(f"trace {self.name}: two jobs are called {job.job_id!r}; give each its own id")
            if job.submit_s < last_s:
                raise InvalidRequest(f"trace {self.name}: job {job.job_id} is out of order; sort by submission")
            known.add(job.job_id)
            last_s = job.submit_s

    @property
    def pairs(self) -> tuple[tuple[str, int], ...]:
        """Every model and batch size that a job names, sorted."""
        return tuple(sorted({job.pair for job in self.jobs if job.model}))


def make_trace(
    name: str,
    jobs: list[TraceJob],
    *,
    skipped: dict[str, int] | None = None,
    drawn: tuple[str, ...] = (),
    format: str = "",
    pair_places: tuple[tuple[str, int, str], ...] = (),
) -> Trace:
    """Bring jobs into order of submission; jobs of one instant keep the order of the file."""
    ordered = tuple(sorted(jobs, key=lambda job: job.submit_s))
    return Trace(name=name, jobs=ordered, skipped=skipped or {}, drawn=drawn, format=format, pair_places=pair_places)


def check_time_s(value: float, what: str) -> None:
    """Raise InvalidRequest unless `value` is a moment or a span in seconds that a clock can hold."""
    if not math.isfinite(value) or not 0 <= value <= MAX_TIME_S:
        raise InvalidRequest(f"{what} {value!r} must be finite, from 0 to {MAX_TIME_S:g} seconds")
