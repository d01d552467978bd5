"""FaPES's first two phases: which running jobs are planned anew, and in what order jobs are planned (5.1 and 5.2)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from springtide.scheduling.policies.fapes.performance import SpeedTable


class Running(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A running job as the filter sees it.

    `achievement` is its planned speed divided by its best speed on the empty cluster, `left_s` the seconds to its end
    as it runs now; `may_change` is False for a job whose number of workers is fixed.
    """

    outlook: SpeedTable
    num_held: int
    achievement: float
    left_s: float
    may_change: bool


def select_running(
    running: Sequence[Running],
    waiting: Sequence[SpeedTable],
    num_idle: int,
    *,
    round_s: float,
    change_s: float,
) -> list[int]:
    """The running jobs (by index) whose devices are recycled, in increasing order of their performance achievement.

    Remaining-time awareness: a job that ends within the next round is not selected. Dynamic selection: jobs are added
    one after the other while an even share of the recycled devices gives all jobs to be planned a better average
    achievement than they have now; a waiting job has none. Of these numbers of jobs, the one with the greatest gain in
    sum is taken; if none is better, no job is selected (FaPES, section 5.1). The gain must also pay for the change,
    `change_s` of a round.
    """
    able = [index for index, job in enumerate(running) if job.may_change and job.left_s > round_s]
    able.sort(key=lambda index: (running[index].achievement, index))
    if not able:
        return []
    recycled = num_idle + np.cumsum([running[index].num_held for index in able])
    num_jobs = len(waiting) + np.arange(1, len(able) + 1)
    shares = recycled // num_jobs
    grid, column = np.unique(shares, return_inverse=True)
    of_waiting = np.sum([np.zeros(len(grid)), *[achievements(outlook, grid) for outlook in waiting]], axis=0)
    of_running = np.cumsum([achievements(running[index].outlook, grid) for index in able], axis=0)
    rows = np.arange(len(able))
    expected = (of_waiting[column] + of_running[rows, column]) / num_jobs
    present = np.cumsum([running[index].achievement for index in able]) / num_jobs
    gains = np.where(expected > present * (1.0 + change_s / round_s) + 1e-9, (expected - present) * num_jobs, 0.0)
    best = int(gains.argmax())
    return able[: best + 1] if gains[best] > 0.0 else []


def achievements(outlook: SpeedTable, shares: np.typing.NDArray[np.int64]) -> np.typing.NDArray[np.float64]:
    """The fraction of its best speed that a job has on each number of devices, compactly placed; 0 if it cannot run."""
    if not len(outlook.sizes) or outlook.best_rate <= 0.0:
        return np.zeros(len(shares))
    best = np.maximum.accumulate(outlook.compact_rates) / outlook.best_rate
    index = np.searchsorted(outlook.sizes, shares, side="right") - 1
    found: np.typing.NDArray[np.float64] = np.where(index >= 0, best[np.maximum(index, 0)], 0.0)
    return found


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A job of the cohort for the order of planning; `position`, by arrival, breaks ties.

    `waited_s` is how long it has held no devices (0 for a running job), `is_new` whether it has never run.
    """

    position: int
    waited_s: float
    is_new: bool
    achievement: float = 0.0


def in_priority(cohort: Sequence[Candidate], *, pop_up_s: float) -> list[Candidate]:
    """The cohort in the order in which it is planned (FaPES, section 5.2).

    A job that has waited for `pop_up_s` comes first, whatever it is; then new arrivals, the longest waiting first; then
    jobs that ran before and wait, likewise; then running jobs, those with the higher performance achievement first.
    """

    def rank(candidate: Candidate) -> tuple[int, float, int]:
        """The job with the smaller rank is planned earlier."""
        if candidate.waited_s >= pop_up_s:
            group = 0
        elif candidate.is_new:
            group = 1
        else:
            group = 2 if candidate.waited_s > 0.0 else 3
        within = -candidate.achievement if group == 3 else -candidate.waited_s
        return group, within, candidate.position

    return sorted(cohort, key=rank)
