"""One row for each job with what the policy `springtide` reads of it: sizes worth having, speeds, what to promise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter

from springtide.core.decision import JobView, Snapshot
from springtide.core.resources import DeviceId
from springtide.core.workload import JobState, WorkloadId
from springtide.perf.curve import curve_of, interpolate
from springtide.scheduling.decisions.fingerprint import (
    BOUNDS,
    CURVE_FIELDS,
    LENGTH,
    NODES,
    RESTARTS,
    SERVICES,
    Projection,
    Reads,
    of_fields,
    of_rows,
)
from springtide.scheduling.placement.allocation_ledger import most_workers

# Measured speeds that differ by less than this fraction count as equal: noise is no reason to decide anew.
SPEED_STEP_FRACTION = 0.1
# A speed at a new size counts as measured so long after the change, since the first reports may be wrong.
SETTLE_S = 20.0
# A promise counts on this part of the speed that other jobs of the family had.
SURE_FRACTION = 0.93
# A job of unknown length is assumed to need so long on its smallest size.
UNKNOWN_RUN_S = 3600.0


class PromiseRow:
    """One job as the policy sees it.

    `rates[n]` is steps/s on n devices by the profile, or as measured if there is none. `scale` is the measured speed
    over the profiled one. `sizes` are the numbers of devices that the job is given.

    `can_promise`: profile and length were known when the job came, so its hard deadline is promised or it is refused;
    or it is promised already. `attempts_deadline`: it has a hard deadline, but its speed was measured only while it
    ran, so that it is planned to meet the deadline without a promise. `is_first_run`: its deadline is not promised,
    and may be once its speed is measured for long enough (first_runs.py).

    `trial_sizes` are the sizes it may be tried on although it was slow there; a job with a profile has none.
    `is_settled`: its speed at its present size counts as measured. `speed_bucket` is its speed on its smallest size, on
    a logarithmic scale in steps of a tenth; None if unknown. `curve_sizes` are the sizes by the job's own curve, also
    after `plan_on` has replaced them.
    """

    __slots__ = (
        "attempts_deadline",
        "can_promise",
        "curve_sizes",
        "deadline_s",
        "is_first_run",
        "is_known",
        "is_lone",
        "is_settled",
        "job_id",
        "rates",
        "scale",
        "sizes",
        "speed_bucket",
        "trial_sizes",
        "view",
    )

    def __init__(self, view: JobView) -> None:
        self.view = view
        self.plan_on_own()

    def plan_on_own(self) -> None:
        """Plan on its own curve, whatever it was planned on before."""
        view = self.view
        job, curve = view.job, curve_of(view)
        self.job_id: WorkloadId = job.job_id
        most = min(view.bounds.max_workers, job.num_virtual_shards)
        self.is_lone = job.elastic and most <= job.devices_each
        rates = interpolate(job.profile_steps_per_s, most) if curve.source == "profile" else curve.steps_per_s
        self.scale = 1.0
        if curve.source == "profile" and curve.sizes:
            self.scale = curve.rate(curve.sizes[0]) / rates[curve.sizes[0]]
            rates = _no_faster_than_measured(view, rates, self.scale)
        if not job.elastic:
            # It cannot change the number of its workers while it runs.
            self.sizes: tuple[int, ...] = (min(view.num_replicas or most, most),)
        else:
            self.sizes = _granted(curve.sizes, job.devices_each) or (min(view.bounds.min_workers, most_workers(view)),)
        # An older plan, or a change that is under way, may give it more devices than its bounds allow now.
        longest = max(self.sizes[-1], job.num_virtual_shards, job.max_workers, view.num_replicas)
        missing = longest + 1 - len(rates)
        self.rates: tuple[float, ...] = rates + rates[-1:] * missing if missing > 0 else rates
        has_speed = self.rates[self.sizes[0]] > 0.0
        if not has_speed:
            self.rates = (0.0, *(1.0 for _ in range(longest)))
            self.sizes = self.sizes[:1]
        self.curve_sizes = self.sizes
        self.is_known = has_speed and curve.source != "guess" and view.total_steps is not None
        deadline_s = job.goal.deadline_s
        self.deadline_s = math.inf if deadline_s is None else deadline_s
        is_hard = self.is_known and job.goal.is_hard
        is_promised = view.promise.admitted_at_s is not None
        self.can_promise = is_hard and (curve.source == "profile" or is_promised)
        self.attempts_deadline = is_hard and not self.can_promise
        is_measured = job.goal.is_hard and curve.source == "measured" and self.total is not None
        self.is_first_run = is_measured and not is_promised
        # The sizes of a job that may change its batch are tried by what its family has measured (batches.py).
        is_tried = job.elastic and job.batch is None and curve.source == "measured"
        self.trial_sizes: tuple[int, ...] = (
            _granted(range(view.bounds.min_workers, most_workers(view) + 1, job.devices_each), job.devices_each)
            if is_tried and has_speed
            else ()
        )
        self.is_settled = (
            view.changes.resized_at_s is not None
            and view.progress.progress_at_s >= view.changes.resized_at_s + SETTLE_S
        )
        self.speed_bucket = (
            round(math.log(self.rates[self.sizes[0]] * self.scale) / SPEED_STEP_FRACTION) if has_speed else None
        )

    @property
    def done(self) -> float:
        """Steps done; if its batch may change, in steps of the initial one."""
        view = self.view
        return float(view.progress.step) if view.job.batch is None else view.equivalent_steps

    @property
    def total(self) -> float | None:
        """All its steps, counted like `done`; None if unknown."""
        view = self.view
        found = view.total_steps if view.job.batch is None else view.total_equivalent_steps
        return None if found is None else float(found)

    def plan_on(self, steps_per_s: Mapping[int, float]) -> None:
        """Plan on these speeds (steps of the initial batch a second by number of devices) in place of its own curve, as
        far as they are within its bounds.

        A job that had no profile when it started was not promised anything, and is not from now on.
        """
        view, longest = self.view, len(self.rates) - 1
        rates = interpolate(steps_per_s, longest)
        fastest = 0.0
        useful: list[int] = []
        for size in sorted(steps_per_s):
            if (
                size % view.job.devices_each == 0
                and view.bounds.min_workers <= size <= most_workers(view)
                and rates[size] > fastest
            ):
                useful.append(size)
                fastest = rates[size]
        if not useful:
            return
        each = view.job.devices_each
        self.sizes, self.rates, self.scale = (
            _granted(useful, each),
            rates + rates[-1:] * (longest + 1 - len(rates)),
            1.0,
        )
        is_hard = self.total is not None and view.job.goal.is_hard
        self.is_known = self.total is not None
        is_new = view.started_at_s is None or view.promise.admitted_at_s is not None
        self.can_promise = is_hard and (self.can_promise or is_new)
        self.attempts_deadline = is_hard and not self.can_promise

    def steps_left(self, now_s: float, num_held: int) -> float:
        """Steps left: by the last report, less what `num_held` devices should have done since then."""
        view, total = self.view, self.total
        if total is None:
            return UNKNOWN_RUN_S * self.rates[self.sizes[0]]
        left = total - self.done
        if 0 < num_held < len(self.rates) and view.state is JobState.RUNNING:
            left -= max(0.0, now_s - view.progress.progress_at_s) * self.rates[num_held] * self.scale
        return max(left, 1.0)


def _no_faster_than_measured(view: JobView, rates: tuple[float, ...], scale: float) -> tuple[float, ...]:
    """The rates of a profile which times `scale` are not above what was measured: a size may be slower than others say
    of it, on scattered devices say. They do not fall with the size."""
    lower = list(rates)
    for n, samples_per_s in sorted(view.learnt.throughput_samples_per_s.items()):
        if 1 <= n < len(lower) and samples_per_s > 0:
            measured = samples_per_s / view.job.global_batch_size / scale
            lower[n] = max(lower[n - 1], min(lower[n], measured))
    return tuple(lower)


def num_held(snapshot: Snapshot, row: PromiseRow) -> int:
    """How many devices the job holds now."""
    allocation = snapshot.allocations.get(row.job_id)
    return allocation.num_devices if allocation is not None else 0


def kept_devices(held: Sequence[DeviceId], decided: Sequence[DeviceId] | None) -> Sequence[DeviceId]:
    """What a workload holds once the change that is under way is done: while it moves it holds the old devices and the
    new ones, which are those `decided` by the last plan."""
    return decided if decided and len(decided) < len(held) else held


def _granted(sizes: Sequence[int], each: int) -> tuple[int, ...]:
    """Of the sizes worth having, the smallest, the largest, and the powers of two.

    Aligned blocks of powers of two can always be made to fit; on a small cluster the smallest size may be the only one
    that does. Where a worker holds several devices, the largest is left out: nodes would have to be left in such parts.
    """
    kept = (sizes[0], sizes[-1] if each == 1 else sizes[0]) if sizes else ()
    return tuple(n for n in sizes if n in kept or n & (n - 1) == 0)


def _edited_goal(row: PromiseRow) -> object:
    """The goal, if the owner has changed it since the submission."""
    goal, num_edits = row.view.job.goal, row.view.bounds.num_edits
    return (num_edits, goal.deadline_s, goal.is_hard) if num_edits else None


def _measured(row: PromiseRow) -> object:
    """Whether the speed of a job without a profile is measured at its present size; if its batch may change, whether
    any step of it is, and its gradient noise, since either may be the first of its family."""
    if row.trial_sizes:
        return row.view.changes.resized_at_s, row.is_settled
    learnt, is_settled = row.view.learnt, row.is_first_run and row.is_settled
    if row.view.job.batch is None:
        return is_settled or None
    return (bool(learnt.step_times), learnt.noise is not None, *[True] * is_settled)


READS = Reads(
    jobs=(
        of_rows(BOUNDS),
        of_rows(LENGTH),
        of_rows(RESTARTS),
        Projection("speed", CURVE_FIELDS, attrgetter("speed_bucket")),
        of_rows(of_fields("back-off", "restarts.starts_at_s")),
        Projection("sizes", CURVE_FIELDS, lambda row: row.curve_sizes if row.view.job.elastic else None),
        Projection(
            "trials",
            (
                "job",
                "promise.admitted_at_s",
                "changes.resized_at_s",
                "progress.progress_at_s",
                "learnt.step_times",
                "learnt.noise",
            ),
            _measured,
        ),
        Projection("goal", ("job", "bounds.num_edits"), _edited_goal),
    ),
    services=SERVICES,
    nodes=NODES,
    job_id="job_id",
    also=(
        "state",
        "progress.step",
        "submitted_at_s",
        "global_batch_size",
        "equivalent_steps",
        "total_equivalent_steps",
        "started_at_s",
        "restarts.losses_at_s",
        "restarts.grows_at_s",
    ),
)
