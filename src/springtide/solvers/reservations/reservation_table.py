"""The reservation table: a schedule for every job, all together within the capacity; admission, and spare devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from springtide.solvers.reservations.fit import Costs, FitTask, PlannedStretch, Runs, fill, fit, start_now, work_done
from springtide.solvers.reservations.profile import (
    FreeProfile,
    Steps,
    compare,
    constant,
    devices_at,
    largest,
    pointwise_max,
    trimmed,
)

# A deadline counts as kept if it is missed by no more than this, since times are rounded.
TOLERANCE_S = 1e-6
# A change has to save at least this many times its cost; otherwise the job keeps its size.
MIN_GAIN = 1.0
# How many intervals of time may be looked at for growth on devices that are free only for a while.
FILL_EFFORT = 20_000


class Entry:
    """One job in the reservation table.

    `work` steps were left at `since_s`. `committed` is the schedule from then on that is being carried out, `runs` the
    one of the decision under way. `left` (steps), `held` (devices until now) and `residual_s` (overhead still to pay
    for these) are the state of the job at the table's `now_s`.

    `is_promised`: its deadline must be kept. `is_late`: its deadline cannot be kept any more; the job is planned to end
    as soon as possible, and no other job is planned anew for it. `is_fixed`: it is never planned anew.
    """

    __slots__ = (
        "committed",
        "deadline_s",
        "held",
        "is_fixed",
        "is_late",
        "is_promised",
        "key",
        "left",
        "rates",
        "ready_s",
        "residual_s",
        "runs",
        "since_s",
        "sizes",
        "work",
    )

    def __init__(
        self,
        key: str,
        work: float,
        deadline_s: float,
        rates: Sequence[float],
        sizes: Sequence[int],
        *,
        ready_s: float = 0.0,
        since_s: float = 0.0,
        held: int = 0,
        is_promised: bool = True,
    ) -> None:
        self.key = key
        self.work = self.left = work
        self.since_s = since_s
        self.deadline_s = deadline_s
        self.rates = rates
        self.sizes = sizes
        self.ready_s = ready_s
        self.held = held
        self.residual_s = 0.0
        self.is_promised = is_promised
        self.is_late = self.is_fixed = False
        self.runs: Runs = ()
        self.committed: Runs = ()

    @property
    def end_s(self) -> float:
        return self.runs[-1].end_s if self.runs else math.inf

    @property
    def fastest_s(self) -> float:
        """How long the steps left take on the fastest size, without overhead."""
        return self.left / self.rates[self.sizes[-1]]

    def size_at(self, now_s: float) -> int:
        """How many devices it holds right after `now_s` by its schedule."""
        for run in self.runs:
            if run.start_s > now_s:
                break
            if now_s < run.end_s:
                return run.num_devices
        return 0

    def advance_to(self, now_s: float, num_held: int | None = None) -> None:
        """Update `left`, `held` and `residual_s` to `now_s` by the schedule that was carried out until then.

        `num_held` devices are held now: this tells whether a change planned for this very moment has been made.
        """
        if not self.committed:
            return
        self.left = max(0.0, self.work - work_done(self.committed, self.rates, now_s))
        self.held, self.residual_s = num_held or 0, 0.0
        for run in self.committed:
            if run.start_s <= now_s <= run.end_s and num_held in (None, run.num_devices):
                self.held = run.num_devices
                self.residual_s = max(0.0, run.start_s + run.overhead_s - now_s)
                if now_s < run.end_s:
                    break

    def task(self) -> FitTask:
        """What is left to fit."""
        deadline_s = math.inf if self.is_late else self.deadline_s
        return FitTask(self.left, deadline_s, self.ready_s, self.rates, self.sizes, self.held, self.residual_s)


class ReservationTable:
    """All schedules and the free devices they leave, at one moment. A change that would break a promise is not made.

    `steps` is the capacity at every moment to come. `effort` bounds the search that is left in this decision, as a
    number of profile intervals to look at; `tries` is the number of orders in which jobs are planned anew.
    """

    def __init__(self, capacity: int | Steps, now_s: float, costs: Costs) -> None:
        self.now_s = now_s
        self.steps = _steps_of(capacity, now_s)
        self.costs = costs
        self.profile = FreeProfile(self.steps, now_s)
        self.entries: dict[str, Entry] = {}
        self.effort = 0
        self.tries = 8

    @property
    def capacity(self) -> int:
        """The largest number of devices at any moment to come."""
        return largest(self.steps)

    def begin(self, now_s: float, costs: Costs, effort: int, held: Mapping[str, int] | None = None) -> None:
        """Begin a decision at `now_s`. `held` counts the devices of the jobs that hold some."""
        self.now_s, self.costs, self.effort = now_s, costs, effort
        self.profile.forget_before(now_s)
        for entry in self.entries.values():
            entry.advance_to(now_s, None if held is None else held.get(entry.key, 0))

    def commit(self) -> None:
        """End a decision: the schedules in the table are the ones that are carried out from now on."""
        for entry in self.entries.values():
            if entry.runs is not entry.committed:
                entry.work, entry.since_s, entry.committed = entry.left, self.now_s, entry.runs

    def load(self, entry: Entry) -> None:
        """Put a job with its schedule into the table, unchecked."""
        self.entries[entry.key] = entry
        _take(self.profile, entry.runs)

    def load_all(self, entries: Iterable[Entry]) -> None:
        """Put jobs with their schedules into the table, unchecked."""
        more = {entry.key: entry for entry in entries}
        self.entries |= more
        self.profile.take_all([run[:3] for entry in more.values() for run in entry.runs])

    def drop(self, key: str) -> None:
        """Take a job out."""
        entry = self.entries.pop(key)
        _take(self.profile, entry.runs, -1)

    def change_runs(self, entry: Entry, runs: Runs) -> None:
        """Replace the schedule of a job in the table, unchecked."""
        _take(self.profile, entry.runs, -1)
        entry.runs = runs
        _take(self.profile, runs)

    def is_feasible_alone(self, entry: Entry) -> bool:
        """Whether the job could make its deadline if it had all devices it can use from now on."""
        return self.latest_start_s(entry) >= self.now_s

    def latest_start_s(self, entry: Entry) -> float:
        """The last moment at which the job, alone and at its best size, can still begin."""
        costs, rates = self.costs, entry.rates
        return entry.deadline_s - min(costs.later[n] + entry.left / rates[n] for n in entry.sizes)

    def admit(self, entry: Entry, *, repairs: bool = True, is_certain: bool = False) -> bool:
        """Find room for a new job, if necessary (and `repairs`) by planning others anew; returns whether it is in.

        No other job is planned anew for one that could not make its deadline even alone, unless `is_certain` says that
        it can.
        """
        runs = self._fit(self.profile, entry)
        if runs:
            entry.runs = runs
            self.load(entry)
            return True
        return repairs and (is_certain or self.is_feasible_alone(entry)) and self._repair(entry)

    def has_room(self, capacity: int | Steps, now_s: float) -> bool:
        """Whether all schedules fit as they are if there are so many devices from `now_s` on."""
        least = self.profile.least
        return all(
            after >= before or least(from_s, until_s) >= before - after
            for from_s, until_s, before, after in compare(self.steps, _steps_of(capacity, now_s), now_s)
        )

    def set_capacity(self, capacity: int | Steps) -> bool:
        """Change the number of devices, for good or step by step, and plan anew the jobs that do not fit any more.
        Returns whether every promise can be kept; if not, nothing is changed."""
        before = trimmed(self.steps, self.now_s)
        after = _steps_of(capacity, self.now_s)
        self._shift(before, after)
        if before == after or min(self.profile.free) >= 0 or self._replan_overcommitted():
            return True
        self._shift(after, before)
        return False

    def force_capacity(self, capacity: int | Steps) -> tuple[str, ...]:
        """Change the number of devices unconditionally; jobs that cannot keep their deadlines then are late, promised
        ones last. Returns the promised jobs that became late by this."""
        if self.set_capacity(capacity) or self._set_without_pursued(capacity):
            return ()
        entries = sorted(
            self.entries.values(), key=lambda entry: (not entry.is_promised or entry.is_late, self._urgency(entry))
        )
        in_time = [entry for entry in entries if entry.is_promised and not entry.is_late]
        self.steps = _steps_of(capacity, self.now_s)
        self.profile = FreeProfile(self.steps, self.now_s)
        self.entries = {}
        for entry in entries:
            entry.runs = ()
        for entry in entries:
            self.put(entry)
        return tuple([entry.key for entry in in_time if entry.is_late])

    def _set_without_pursued(self, capacity: int | Steps) -> bool:
        """Change the number of devices for promised jobs alone, which keep their schedules as far as they fit, and plan
        the others anew around them. Returns whether every promise can be kept; if not, nothing is changed."""
        order = tuple(self.entries)
        pursued = self.take_out_pursued()
        is_set = bool(pursued) and self.set_capacity(capacity)
        self.put_back(pursued, as_before=not is_set)
        if not is_set:
            self.entries = {key: self.entries[key] for key in order}
        return is_set

    def yield_capacity(self, capacity: int | Steps) -> bool:
        """Change the number of devices as `set_capacity` does, but for this, jobs without a promise may become late.
        Returns whether every promise can be kept, and none that is late stops for good; if not, nothing is changed."""
        if self.set_capacity(capacity):
            return True
        if all(entry.is_promised for entry in self.entries.values()):
            return False
        before = self.steps, self.profile, self.entries
        states = [(entry, entry.runs, entry.is_late) for entry in self.entries.values()]
        is_kept = not self.force_capacity(capacity)
        if is_kept and not any(entry.is_promised and runs and not entry.runs for entry, runs, _ in states):
            return True
        self.steps, self.profile, self.entries = before
        for entry, runs, is_late in states:
            entry.runs, entry.is_late = runs, is_late
        return False

    def lift_capacity(self, capacity: Steps, num_present: int) -> tuple[str, ...]:
        """Set a capacity that the schedules do not fit into although enough devices, `num_present`, are present.

        The schedules keep the devices that they use, up to `num_present`; no schedule gets more than `capacity` beyond
        that. A job that does not fit into `num_present` devices is late. Returns the promised jobs that became late.
        """
        present = trimmed(pointwise_max(capacity, constant(num_present), self.now_s), self.now_s)
        given_up = () if self.has_room(present, self.now_s) else self.force_capacity(present)
        lifted = trimmed(pointwise_max(capacity, self._used(), self.now_s), self.now_s)
        self._shift(trimmed(self.steps, self.now_s), lifted)
        return given_up

    def _used(self) -> Steps:
        """How many devices the schedules use from now on."""
        moments = sorted({*self.profile.times, *(from_s for from_s, _ in self.steps if from_s > self.now_s)})
        return tuple([(from_s, devices_at(self.steps, from_s) - self.profile.at(from_s)) for from_s in moments])

    def exceeded_at_s(self, num_devices: int) -> float:
        """The first moment at which the schedules use more than `num_devices`; infinite if they never do."""
        return next((moment_s for moment_s, used in self._used() if used > num_devices), math.inf)

    def limit_until(self, num_devices: int, until_s: float) -> None:
        """Allow no more than `num_devices` before `until_s`. No schedule may use more than that now."""
        after = [(0.0, min(num_devices, devices_at(self.steps, self.now_s)))]
        for from_s, count in self.steps:
            if from_s > self.now_s:
                after.append((from_s, min(num_devices, count) if from_s < until_s else count))
        if until_s < math.inf:
            after.append((until_s, devices_at(self.steps, until_s)))
        self._shift(trimmed(self.steps, self.now_s), trimmed(sorted(dict(after).items()), self.now_s))

    def _shift(self, before: Steps, after: Steps) -> None:
        self.steps = after
        for from_s, until_s, before_count, after_count in compare(before, after, self.now_s):
            self.profile.take(from_s, until_s, before_count - after_count)

    def _replan_overcommitted(self) -> bool:
        """Plan jobs anew until no device is missing at any moment: of the jobs that run while devices are missing, late
        ones first, then those with the largest surplus; in the end all jobs. If that fails, nothing is changed."""
        times, free = self.profile.times, self.profile.free
        short = [(times[i], times[i + 1] if i + 1 < len(times) else math.inf) for i, n in enumerate(free) if n < 0]
        able = [entry for entry in self.entries.values() if not entry.is_fixed]
        inside = [
            entry
            for entry in able
            if any(run.start_s < until_s and run.end_s > from_s for run in entry.runs for from_s, until_s in short)
        ]
        surplus = {entry.key: self.surplus(entry) for entry in inside}
        inside.sort(key=lambda entry: (not entry.is_late, -surplus[entry.key], -entry.deadline_s, entry.key))
        count = 1
        while count < len(inside) and self.effort > 0:
            if self._replan(inside[:count]):
                return True
            count *= 2
        return self._replan(inside) or self._replan(able)

    def admit_over_pursued(self, new: Entry) -> bool:
        """Find room for a promise where jobs without one are in the way: these are planned around it, late if need be.
        Returns whether it is in; if not, nothing is changed."""
        if not self.is_feasible_alone(new):
            return False
        pursued = self.take_out_pursued()
        is_in = bool(pursued) and self.admit(new)
        self.put_back(pursued, as_before=not is_in)
        return is_in

    def take_out_pursued(self) -> list[tuple[Entry, Runs]]:
        """Take out the jobs without a promise, to be put back; returns them with their schedules."""
        pursued = [entry for entry in self.entries.values() if not (entry.is_promised or entry.is_fixed)]
        taken = [(entry, entry.runs) for entry in pursued]
        for entry in pursued:
            self.drop(entry.key)
            entry.runs = ()
        return taken

    def put_back(self, taken: Sequence[tuple[Entry, Runs]], *, as_before: bool, repairs: bool = True) -> None:
        """Put these jobs back with their schedules, or planned anew around what has been put in since; others are
        planned anew for them only with `repairs`."""
        if as_before:
            for entry, runs in taken:
                entry.runs = runs
                self.load(entry)
            return
        for entry, _ in sorted(taken, key=lambda item: self._urgency(item[0])):
            self.put(entry, repairs=repairs)

    def put(self, entry: Entry, *, repairs: bool = True) -> None:
        """Add a job that is promised already: by its deadline if possible, else as a late job."""
        is_in = not entry.is_late and self.admit(entry, repairs=repairs)
        if is_in or (not entry.is_late and entry.is_promised and self.admit_over_pursued(entry)):
            return
        entry.is_late = True
        runs = self._fit(self.profile, entry)
        entry.runs = runs
        self.load(entry)

    def fit_one(self, entry: Entry) -> Runs:
        """The schedule that the entry would get beside all others; empty if there is none. The table is unchanged."""
        return self._fit(self.profile, entry)

    def plan_anew(self, entry: Entry) -> bool:
        """Give a job in the table another schedule, as if it were new; returns whether there is one. If not, nothing is
        changed."""
        before = entry.runs
        self.change_runs(entry, ())
        runs = self._fit(self.profile, entry)
        if runs or not self._repair(entry):
            self.change_runs(entry, runs or before)
        return entry.runs is not before

    # --- changing what is planned -----------------------------------------------------------------------------------

    def _fit(self, profile: FreeProfile, entry: Entry) -> Runs:
        sizes = entry.sizes
        most = self.capacity
        task = entry.task()
        if sizes[-1] > most:
            sizes = [n for n in sizes if n <= most]
            if not sizes:
                return ()
            task = task._replace(sizes=sizes)
        runs = fit(profile, task, self.now_s, self.costs)
        # A constant run from now on costs one look at the profile; everything else is searched size by size.
        is_simple = len(runs) == 1 and runs[0].start_s == self.now_s
        self.effort -= 8 + len(profile.times) * (1 if is_simple else 2 + len(sizes))
        return runs

    def _urgency(self, entry: Entry) -> tuple[bool, float, str]:
        """The key for the order of planning: the earliest latest possible start first, late jobs last."""
        return entry.is_late, entry.deadline_s - entry.fastest_s, entry.key

    def _repair(self, new: Entry) -> bool:
        """Make room for a new job by planning others anew: those with the largest surplus first, in the end all."""
        deadline_s = new.deadline_s
        able = [entry for entry in self.entries.values() if entry is not new and not entry.is_fixed]
        donors = [entry for entry in able if entry.runs and entry.runs[0].start_s < deadline_s]
        surplus = {entry.key: self.surplus(entry) for entry in donors}
        donors.sort(key=lambda entry: (-surplus[entry.key], entry.deadline_s, entry.key))
        count = 1
        while count < len(donors) and self.effort > 0:
            if self._replan([*donors[:count], new]):
                return True
            count *= 2
        return self.effort > 0 and self._replan([*able, new])

    def surplus(self, entry: Entry) -> int:
        """Devices planned beyond the fewest that make the deadline."""
        left_s = entry.deadline_s - self.now_s
        later, rates, left = self.costs.later, entry.rates, entry.left
        need = next((n for n in entry.sizes if later[n] + left / rates[n] <= left_s), entry.sizes[-1])
        return max((run.num_devices for run in entry.runs), default=0) - need

    def _replan(self, group: Sequence[Entry]) -> bool:
        """Plan all of `group` anew beside the other jobs, the most urgent first; returns whether all of them fit.

        A job that does not fit moves forward in the order, and all are planned again: list scheduling with repair of
        the order ("squeaky wheel"). If not all jobs fit in any order that is tried, nothing is changed.
        """
        base = self.profile.copy()
        for entry in group:
            _take(base, entry.runs, -1)
        if min(base.free) < 0:
            return False
        order = sorted(group, key=self._urgency)
        for _ in range(self.tries):
            if self.effort <= 0:
                return False
            profile = base.copy()
            plans: list[Runs] = []
            failed = -1
            for index, entry in enumerate(order):
                runs = self._fit(profile, entry)
                if not runs:
                    failed = index
                    break
                _take(profile, runs)
                plans.append(runs)
            if failed < 0:
                for entry, runs in zip(order, plans, strict=True):
                    entry.runs = runs
                    self.entries.setdefault(entry.key, entry)
                self.profile = profile
                return True
            if failed == 0:
                return False
            order.insert(0 if failed < 2 else failed // 2, order.pop(failed))
        return False

    # --- spare devices ---------------------------------------------------------------------------------------------

    def least_size(self, entry: Entry) -> int:
        """The fewest devices from now on that keep the job in time by a constant run beside all others; at most what
        it holds. The table is unchanged."""
        now_s, costs = self.now_s, self.costs
        size = entry.size_at(now_s)
        if entry.is_fixed or entry.is_late or size <= entry.sizes[0]:
            return size
        runs = entry.runs
        if len(runs) > 1:
            self.change_runs(entry, ())
            found = self._constant_run(entry, [n for n in entry.sizes if n < size])
            self.change_runs(entry, runs)
            return found[0].num_devices if found else size
        for n in entry.sizes:
            if n >= size:
                break
            overhead_s = entry.residual_s if n == entry.held else costs.now(n)
            end_s = costs.end_s(n, now_s, now_s + overhead_s + entry.left / entry.rates[n])
            if end_s <= entry.deadline_s and (end_s <= runs[0].end_s or self.profile.least(runs[0].end_s, end_s) >= n):
                return n
        return size

    def shrink(self, entry: Entry, count: int) -> bool:
        """Let the job hold only `count` devices from now on to its end, if it stays in time; returns whether it does.
        No other job is planned anew."""
        before = entry.runs
        self.change_runs(entry, ())
        runs = self._constant_run(entry, [count])
        self.change_runs(entry, runs or before)
        return bool(runs)

    def _constant_run(self, entry: Entry, sizes: Sequence[int]) -> Runs:
        self.effort -= 8 + len(sizes)
        return start_now(self.profile, entry.task()._replace(sizes=sizes), self.now_s, entry.deadline_s, self.costs)

    def enlarge(self, entry: Entry, count: int, min_effort: int) -> bool:
        """Let the job hold `count` devices from now on, to its end or as long as they are free, if it ends earlier by
        that; returns whether it does. No work is planned later than before, so every promise is kept.

        Once the effort left is down to `min_effort`, only a constant size is tried, and only where that is cheap.
        """
        now_s = self.now_s
        overhead_s = entry.residual_s if count == entry.held else self.costs.now(count)
        end_s = self.costs.end_s(count, now_s, now_s + overhead_s + entry.left / entry.rates[count])
        before = entry.runs
        self.effort -= 4
        in_time = end_s < before[-1].end_s and (end_s <= entry.deadline_s or entry.is_late)
        first = before[0]
        if first.start_s <= now_s and first.end_s >= end_s:
            # It holds its present devices all that time: only the additional ones have to be free.
            is_free = in_time and self.profile.least(now_s, end_s) >= count - first.num_devices
            if not is_free and self.effort <= min_effort:
                return False
        elif self.effort <= min_effort and not in_time:
            return False
        self.change_runs(entry, ())
        runs: Runs = ()
        if in_time and self.profile.least(now_s, end_s) >= count:
            runs = (PlannedStretch(now_s, end_s, count, overhead_s),)
        elif self.effort > min_effort:
            limit_s = before[-1].end_s - MIN_GAIN * self.costs.later[count]
            sizes = [n for n in entry.sizes if n <= count]
            self.effort -= len(self.profile.times)
            filled = fill(self.profile, entry.task(), now_s, limit_s, self.costs, sizes)
            if filled and filled[0].start_s <= now_s and filled[0].num_devices > _size_at(before, now_s):
                runs = filled
        self.change_runs(entry, runs or before)
        return bool(runs)


def _steps_of(capacity: int | Steps, now_s: float) -> Steps:
    return constant(capacity) if isinstance(capacity, int) else trimmed(capacity, now_s)


def _take(profile: FreeProfile, runs: Iterable[PlannedStretch], sign: int = 1) -> None:
    for start_s, end_s, n, _ in runs:
        profile.take(start_s, end_s, sign * n)


def _size_at(runs: Runs, now_s: float) -> int:
    return next((run.num_devices for run in runs if run.start_s <= now_s < run.end_s), 0)
