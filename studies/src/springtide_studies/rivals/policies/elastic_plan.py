"""ElasticFlow's decision on numbers: which deadlines are promised, and each job's devices until the next decision.

Admission (Algorithm 1), then the spare devices (Algorithm 2), as `solvers` computes them, with the rules in which the
paper, the published artifact and EDF with elastic scaling differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from springtide.core.decision import PlannedRun, Schedule
from springtide.core.workload import WorkloadId
from springtide_studies.rivals.policies.elastic_jobs import LiveJobs
from springtide_studies.rivals.solvers.marginal import clipped_slot_costs, share_out, slot_costs
from springtide_studies.rivals.solvers.minimum_share import FreeDevices, MinimumShares, forward_filling, minimum_shares

# Time is planned in slots of this length, and Algorithm 2 fills the next one: a slot of the paper's experiments (60 s;
# §6 and the artifact). A slot has one size, so a share begins up to a slot before the last moment.
SLOT_S = 60.0
# How many new ends are tried for broken promises in one decision, three for each promise; further ones have to wait.
MAX_TRIALS = 12

# Row of a job -> why a rule of the operator rejects it; None if none does.
Review = Callable[[int], str | None]


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Where the paper, the artifact and the variants differ. The defaults are the paper's.

    `admits` False: every deadline is claimed, none promised. `in_batches`: newcomers of one decision are admitted
    together or not at all. `late_jobs_claim`: a job that can no longer be in time keeps its turn and takes all it can
    use, and no job is admitted until it has ended; otherwise it comes after all others' shares. `reserves_overhead`:
    of every deadline the time of one change is kept. `is_reversed`: spare devices go where they bring least.
    """

    admits: bool = True
    in_batches: bool = False
    late_jobs_claim: bool = False
    reserves_overhead: bool = False
    is_reversed: bool = False


class ElasticOutcome(msgspec.Struct, kw_only=True):
    """The decision: `counts` by row, which jobs were admitted (to finish by when) or refused (why), and the next
    moment.

    `plan` is the order of the rows that hold a claim and their shares.
    """

    counts: list[int]
    admitted: dict[int, float]
    refused: dict[int, str]
    until_s: float | None
    claims: list[int]
    shares: MinimumShares


def decide_elastic(
    live: LiveJobs, num_devices: int, num_promised: int, rules: Rules, reserves_s: Sequence[float], review: Review
) -> ElasticOutcome:
    """Decide for one instant.

    `num_devices` may be given out now, `num_promised` of them count for shares. `reserves_s` is what one change costs
    each row at its largest size.
    """
    planner = _Planner(live, num_promised, rules, reserves_s)
    planner.find_late_jobs()
    admitted, refused = planner.admit(review) if rules.admits else ({}, {})
    counts = planner.counts_now()
    planner.give_to_late(counts, num_devices)
    without = list(counts)
    planner.grow(counts, num_devices, set(refused))
    # Workers that are left after a loss, too few to start with, go on: the others grow by what they leave.
    kept = {
        index: held
        for index, (row, held) in enumerate(zip(live.rows, live.held, strict=True))
        if row.view.job.elastic and 0 < held < row.sizes[0] and not counts[index]
    }
    if kept and sum(without) + sum(kept.values()) <= num_devices:
        for index, held in kept.items():
            without[index] = held
        counts = without
        planner.grow(counts, num_devices, {*refused, *kept})
    until_s = planner.next_moment(counts)
    return ElasticOutcome(
        counts=counts,
        admitted=admitted,
        refused=refused,
        until_s=until_s,
        claims=planner.claims,
        shares=planner.shares,
    )


class _Planner:
    def __init__(self, live: LiveJobs, num_devices: int, rules: Rules, reserves_s: Sequence[float]) -> None:
        self.live = live
        self.now_s = live.now_s
        self.num_devices = num_devices
        self.rules = rules
        self.ends_s = live.deadlines_s - np.asarray(reserves_s) if rules.reserves_overhead else live.deadlines_s
        self.late: list[int] = []
        self.num_trials = 0
        self.claims: list[int] = []
        self.asking: list[int] = []
        for index, row in enumerate(live.rows):
            if row.deadline_s == math.inf:
                continue
            if not rules.admits or row.view.promise.admitted_at_s is not None:
                self.claims.append(index)
            elif row.is_hard:
                self.asking.append(index)
        self.claims = live.by_deadline(self.claims)
        self.shares = self._fill(self.claims)

    def _fill(self, claims: list[int], *, stops_at_misfit: bool = False) -> MinimumShares:
        return minimum_shares(
            self.live.demands(claims, self.ends_s),
            self.now_s,
            self.num_devices,
            slot_s=SLOT_S,
            stops_at_misfit=stops_at_misfit,
            late_jobs_claim=self.rules.late_jobs_claim and not stops_at_misfit,
        )

    def find_late_jobs(self) -> None:
        """Find the jobs whose promises cannot be kept any more, and decide which claims they get instead."""
        if self.shares.fits.all():
            return
        # Progress is reported in whole steps, and the reserve may be used: a job that fits without both is in time.
        late = [self.claims[row] for row in np.flatnonzero(~self.shares.fits)]
        self.ends_s = self.ends_s.copy()
        for index in late:
            self.ends_s[index] = self.live.deadlines_s[index]
            self.live.work[index] = max(self.live.work[index] - 1.0, self.live.rates[index, 0])
        self.claims = sorted(self.claims, key=lambda index: (self.ends_s[index], index))
        self.shares = self._fill(self.claims)
        self.late = [self.claims[row] for row in np.flatnonzero(~self.shares.fits)]
        if self.late and not self.rules.late_jobs_claim:
            lost = set(self.late)
            self.claims = [index for index in self.claims if index not in lost]
            # Fill again without the late jobs, which have no claim now.
            self.shares = self._fill(self.claims)
            for index in self.late:
                self._claim_earliest_end(index)

    def _claim_earliest_end(self, index: int) -> None:
        """Keep the delay of a broken promise short: the job claims the earliest end that breaks no other promise.

        New jobs must respect the claim; since it fits, it does not block admissions by itself. If progressive filling
        finds no such end, the job has no claim and takes what is left.
        """
        live = self.live
        row, work = live.rows[index], float(live.work[index])
        least_s = work / row.rates[-1]
        after_s = forward_filling(self.shares.free, work, row.sizes, row.rates).switch_s
        for end_s in (self.now_s + least_s, after_s, after_s + least_s):
            if self.num_trials >= MAX_TRIALS:
                return
            self.num_trials += 1
            if end_s == math.inf:
                continue
            # A thousandth of a second more, so that rounding does not lose the work of the last instant.
            self.ends_s[index] = end_s + 0.001
            claims = sorted([*self.claims, index], key=lambda each: (self.ends_s[each], each))
            shares = self._fill(claims, stops_at_misfit=True)
            if shares.fits.all():
                self.claims, self.shares = claims, shares
                return

    def admit(self, review: Review) -> tuple[dict[int, float], dict[int, str]]:
        """Algorithm 1, lines 1-9, for every newcomer in order of arrival; one that does not fit changes nothing."""
        admitted: dict[int, float] = {}
        refused: dict[int, str] = {}
        batches = [self.asking] if self.rules.in_batches and self.asking else [[index] for index in self.asking]
        for batch in batches:
            trial = sorted([*self.claims, *batch], key=lambda index: (self.ends_s[index], index))
            shares = self._fill(trial, stops_at_misfit=True)
            if not shares.fits.all():
                refused |= {index: self._why_not(index, is_batch=len(batch) > 1) for index in batch}
                continue
            for index in batch:
                objection = review(index)
                if objection is not None:
                    refused[index] = objection
                else:
                    admitted[index] = float(self.ends_s[index])
            self.claims = [index for index in trial if index not in refused]
            self.shares = shares if len(self.claims) == len(trial) else self._fill(self.claims)
        # A job that has run already, while its length was not known, goes on without a promise.
        has_run = [index for index in refused if self.live.rows[index].view.started_at_s is not None]
        return admitted, {index: why for index, why in refused.items() if index not in has_run}

    def _why_not(self, index: int, *, is_batch: bool) -> str:
        live, row = self.live, self.live.rows[index]
        time_s = live.deadlines_s[index] - self.now_s
        needed_s = live.work[index] / max(row.rates)
        if needed_s > time_s:
            left = f"its deadline is in {time_s:.0f} s" if time_s > 0 else "its deadline has passed"
            return f"it needs {needed_s:.0f} s even on {row.sizes[-1]} devices, {left}"
        if self.late and self.rules.late_jobs_claim:
            return f"'{live.rows[self.late[0]].view.job.name}' is late, and no job is admitted before it has ended"
        if is_batch:
            return "of the jobs that came with it not all can be promised their deadlines, so none is"
        return "its share of the devices would break a deadline that was promised to another job, or its own"

    def counts_now(self) -> list[int]:
        """The shares of this moment."""
        counts = [0] * len(self.live.rows)
        for index, count in zip(self.claims, self.shares.counts_now(self.now_s), strict=True):
            counts[index] = count
        return counts

    def give_to_late(self, counts: list[int], num_devices: int) -> None:
        """Late jobs without a claim take all devices they can use from what is left."""
        claims = set(self.claims)
        free = num_devices - sum(counts)
        for index in self.late:
            if index in claims:
                continue
            fitting = [size for size in self.live.rows[index].sizes if size <= free]
            if fitting:
                counts[index] = fitting[-1]
                free -= fitting[-1]

    def grow(self, counts: list[int], num_devices: int, refused: set[int]) -> None:
        """Algorithm 2 for those in time, then soft deadlines, then best effort: the order only breaks ties."""
        live, rules = self.live, self.rules
        free = num_devices - sum(counts)
        if free <= 0:
            return
        taken = {*self.claims, *self.late}
        others = [index for index in range(len(live.rows)) if index not in taken and index not in refused]
        in_time = [index for index, fits in zip(self.claims, self.shares.fits.tolist(), strict=True) if fits]
        order = [*in_time, *live.by_deadline(others)]
        if not order:
            return
        ends_s = self.ends_s.copy()
        ends_s[others] = np.inf
        levels = [_level_of(counts[index], live.rows[index].sizes) for index in order]
        all_costs = slot_costs(live.demands(order, ends_s), self.now_s, SLOT_S).tolist()
        clipped = {self.claims[row]: row for row in self.shares.clipped}
        for place, index in enumerate(order):
            if index in clipped and levels[place] < len(live.rows[index].sizes):
                all_costs[place] = self._clipped_costs(index, clipped[index])
        sizes = [live.rows[index].sizes for index in order]
        held = [_level_of(live.held[index], row_sizes) for index, row_sizes in zip(order, sizes, strict=True)]
        after = share_out(
            levels,
            sizes,
            free,
            lambda row, level: all_costs[row][level],
            held=held,
            is_reversed=rules.is_reversed,
        )
        for index, row_sizes, before, level in zip(order, sizes, levels, after, strict=True):
            if level > before:
                counts[index] = row_sizes[level - 1]

    def _clipped_costs(self, index: int, row: int) -> list[float]:
        """The costs of a job to which others leave few devices: it can use its own claim and what is free besides."""
        live = self.live
        share, free = self.shares.clipped[row], self.shares.free
        held = share.counts[np.searchsorted(share.times_s, free.times_s, side="right") - 1]
        own = np.where(free.times_s < self.ends_s[index], held, 0)
        costs = clipped_slot_costs(
            FreeDevices(free.times_s, free.counts + own),
            float(live.work[index]),
            float(self.ends_s[index]),
            live.rows[index].sizes,
            live.rows[index].rates,
            SLOT_S,
        )
        listed: list[float] = costs.tolist()
        return listed

    def next_moment(self, counts: Sequence[int]) -> float | None:
        """When the first job needs more devices by its share than it has now."""
        shares, now_s = self.shares, self.now_s
        moments: list[float] = []
        if self.claims:
            mine = np.array([counts[index] for index in self.claims])
            waits = shares.fits & (mine < shares.high) & (shares.switch_s > now_s)
            if shares.clipped:
                waits[list(shares.clipped)] = False
            if waits.any():
                moments.append(float(shares.switch_s[waits].min()))
        for row, share in shares.clipped.items():
            more = (share.counts > counts[self.claims[row]]) & (share.times_s > now_s)
            if more.any():
                moments.append(float(share.times_s[int(np.argmax(more))]))
        return min(moments, default=None)


def _level_of(count: int, sizes: Sequence[int]) -> int:
    """How many of the sizes are at most `count`."""
    return sum(size <= count for size in sizes)


class ElasticFuture(Mapping[WorkloadId, Schedule]):
    """The schedules of a decision, computed when they are read."""

    def __init__(self, live: LiveJobs, outcome: ElasticOutcome) -> None:
        self._live, self._outcome = live, outcome
        self._index = {row.job_id: index for index, row in enumerate(live.rows)}

    def __iter__(self) -> Iterator[WorkloadId]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, job_id: WorkloadId) -> Schedule:
        """The devices that the job has now, then those that its share needs, to the end of its work."""
        index = self._index[job_id]
        live, outcome = self._live, self._outcome
        count, now_s, work = outcome.counts[index], live.now_s, float(live.work[index])
        if index in outcome.claims:
            row = outcome.claims.index(index)
            shares = outcome.shares
            later = [(now_s, int(shares.low[row])), (float(shares.switch_s[row]), int(shares.high[row]))]
            if row in shares.clipped:
                share = shares.clipped[row]
                later = list(zip(share.times_s.tolist(), share.counts.tolist(), strict=True))
            steps = [(now_s, count), *((at_s, n) for at_s, n in later if at_s > now_s and n > count)]
        else:
            steps = [(now_s, count)]
        runs: list[PlannedRun] = []
        for (start_s, size), end_s in zip(steps, [*(at_s for at_s, _ in steps[1:]), math.inf], strict=True):
            rate = live.rows[index].rate(size)
            if size and rate > 0 and work > 0:
                done_s = min(end_s, start_s + work / rate)
                runs.append(PlannedRun(start_s=start_s, end_s=done_s, num_devices=size))
                work -= rate * (done_s - start_s)
        return tuple(runs)
