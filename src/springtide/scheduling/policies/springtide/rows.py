"""What the policy `springtide` knows of each job: sizes worth having, speeds, and what it may promise. Read once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from springtide.core.decision import JobView
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

# Measured speeds that differ by less than this are the same: noise is no reason to decide anew.
SPEED_STEP_FRACTION = 0.1
# What a job reports of a new size counts as measured from this long after the change: one moment decides nothing.
SETTLE_S = 20.0
# A job of unknown length is weighed against others as if it had an hour on its smallest size to go.
UNKNOWN_RUN_S = 3600.0


class PromiseRow:
    """One job as the policy sees it.

    `rates[n]` is steps/s on n devices by its profile (without one: by what was measured), `scale` what was measured
    over what was profiled, `sizes` the numbers of devices it is given. `can_promise`: profile and length were known
    when it came, so its hard deadline is promised or it is refused. `is_pursued`: it has a hard deadline, but its
    speed was learnt only while it ran. `reach` are the numbers of devices it may be tried on whatever was measured
    there: none for a job with a profile or a promise. `is_settled`: it has reported for a while at its present size.
    `speed_bucket` is its speed on its smallest size, in steps of a tenth; None where it is not known.
    """

    __slots__ = (
        "can_promise",
        "deadline_s",
        "is_known",
        "is_pursued",
        "is_settled",
        "job_id",
        "rates",
        "reach",
        "scale",
        "sizes",
        "speed_bucket",
        "view",
    )

    def __init__(self, view: JobView) -> None:
        job, curve = view.job, curve_of(view)
        self.view = view
        self.job_id: WorkloadId = job.job_id
        most = min(view.bounds.max_workers, job.num_virtual_shards)
        rates = interpolate(job.profile_steps_per_s, most) if curve.source == "profile" else curve.steps_per_s
        self.scale = 1.0
        if curve.source == "profile" and curve.sizes:
            self.scale = curve.rate(curve.sizes[0]) / rates[curve.sizes[0]]
        if not job.elastic:
            # Its processes cannot change their number.
            self.sizes: tuple[int, ...] = (min(view.num_replicas or most, most),)
        else:
            self.sizes = _granted(curve.sizes) or (min(view.bounds.min_workers, most_workers(view)),)
        # A plan made before its owner lowered the bound, or a change half done, may hold more than it may have now.
        longest = max(self.sizes[-1], job.num_virtual_shards, job.max_workers, view.num_replicas)
        missing = longest + 1 - len(rates)
        self.rates: tuple[float, ...] = rates + rates[-1:] * missing if missing > 0 else rates
        has_speed = self.rates[self.sizes[0]] > 0.0
        if not has_speed:
            self.rates = (0.0, *(1.0 for _ in range(longest)))
            self.sizes = self.sizes[:1]
        self.is_known = has_speed and curve.source != "guess" and view.total_steps is not None
        deadline_s = job.goal.deadline_s
        self.deadline_s = math.inf if deadline_s is None else deadline_s
        is_hard = self.is_known and job.goal.is_hard
        self.can_promise = is_hard and curve.source == "profile"
        self.is_pursued = is_hard and not self.can_promise
        is_tried = job.elastic and curve.source == "measured" and view.promise.admitted_at_s is None
        self.reach: tuple[int, ...] = (
            _granted(range(view.bounds.min_workers, most_workers(view) + 1)) if is_tried and has_speed else ()
        )
        self.is_settled = (
            view.changes.resized_at_s is not None
            and view.progress.progress_at_s >= view.changes.resized_at_s + SETTLE_S
        )
        self.speed_bucket = (
            round(math.log(self.rates[self.sizes[0]] * self.scale) / SPEED_STEP_FRACTION) if has_speed else None
        )

    def steps_left(self, now_s: float, num_held: int) -> float:
        """Steps left by what was reported, and by what the devices held have done since then."""
        view = self.view
        if view.total_steps is None:
            return UNKNOWN_RUN_S * self.rates[self.sizes[0]]
        left = float(view.total_steps - view.progress.step)
        if 0 < num_held < len(self.rates) and view.state is JobState.RUNNING:
            left -= max(0.0, now_s - view.progress.progress_at_s) * self.rates[num_held] * self.scale
        return max(left, 1.0)


def _granted(sizes: Sequence[int]) -> tuple[int, ...]:
    """Of the sizes worth having, the powers of two, whose aligned blocks can always be made to fit, and both ends.

    On a small cluster the smallest that a job accepts may be the only one that fits.
    """
    return tuple(n for n in sizes if n in (sizes[0], sizes[-1]) or n & (n - 1) == 0)


def _edited_goal(row: PromiseRow) -> object:
    """The goal is the one that the job came with until its owner changes it."""
    goal, num_edits = row.view.job.goal, row.view.bounds.num_edits
    return (num_edits, goal.deadline_s, goal.is_hard) if num_edits else None


READS = Reads(
    jobs=(
        of_rows(BOUNDS),
        of_rows(LENGTH),
        of_rows(RESTARTS),
        Projection("speed", CURVE_FIELDS, attrgetter("speed_bucket")),
        of_rows(of_fields("back-off", "restarts.runnable_at_s")),
        Projection("sizes", CURVE_FIELDS, lambda row: row.sizes if row.view.job.elastic else None),
        Projection(
            "trials",
            ("job", "promise.admitted_at_s", "changes.resized_at_s", "progress.progress_at_s"),
            lambda row: (row.view.changes.resized_at_s, row.is_settled) if row.reach else None,
        ),
        Projection("goal", ("job", "bounds.num_edits"), _edited_goal),
    ),
    services=SERVICES,
    nodes=NODES,
    job_id="job_id",
    also=("state", "progress.step", "submitted_at_s"),
)
