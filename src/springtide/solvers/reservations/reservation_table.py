"""The reservation table: a schedule for every job, all of them together within the capacity, and how jobs get in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from springtide.solvers.reservations.capacity import Steps, at, compared, constant, largest, raised, trimmed
from springtide.solvers.reservations.fit import Costs, FitTask, PlannedStretch, Runs, fit, work_done
from springtide.solvers.reservations.free_profile import FreeProfile

# A deadline or a capacity is kept if it is missed by no more than floating point can tell.
TOLERANCE_S = 1e-6


class Entry:
    """One job in the reservation table.

    `work` steps were left at `since_s`; `was` is the schedule from then on, as it is being carried out, and `runs`
    the one under construction. `left`, `held` and `residual_s` say where the job stands at the table's moment (steps
    left, devices held until now, overhead still to pay for them). `is_promised`: its deadline must hold.
    `is_late`: it cannot hold any more, the job ends as soon as possible and stands in no other job's way.
    `is_fixed`: it goes on as it is and is never planned anew.
    """

    __slots__ = (
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
        "was",
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
        self.was: Runs = ()

    @property
    def end_s(self) -> float:
        return self.runs[-1].end_s if self.runs else math.inf

    @property
    def fastest_s(self) -> float:
        """How long the rest takes on the fastest size, without overhead."""
        return self.left / self.rates[self.sizes[-1]]

    def size_at(self, now_s: float) -> int:
        """How many devices it is to hold from `now_s` on."""
        for run in self.runs:
            if run.start_s > now_s:
                break
            if now_s < run.end_s:
                return run.num_devices
        return 0

    def stand(self, now_s: float, num_held: int | None = None) -> None:
        """Work out where the job stands at `now_s` from the schedule that was carried out until then.

        `num_held` devices are held: that shows whether a change planned for this very moment has been made.
        """
        if not self.was:
            return
        self.left = max(0.0, self.work - work_done(self.was, self.rates, now_s))
        self.held, self.residual_s = num_held or 0, 0.0
        for run in self.was:
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
    """All schedules and the free profile they leave, at one moment. Every change keeps every promise, or is not made.

    `steps` says how many devices there are for them at every moment to come. `effort` bounds how much may still be
    tried in this decision: the number of profile intervals looked at.
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
        """The most devices there are for the schedules at any moment to come."""
        return largest(self.steps)

    def begin(self, now_s: float, costs: Costs, effort: int, held: Mapping[str, int] | None = None) -> None:
        """Go to `now_s`: work out where every job stands there. `held` counts the devices of jobs that hold some."""
        self.now_s, self.costs, self.effort = now_s, costs, effort
        self.profile.forget_before(now_s)
        for entry in self.entries.values():
            entry.stand(now_s, None if held is None else held.get(entry.key, 0))

    def commit(self) -> None:
        """What is in the table is being carried out from now on."""
        for entry in self.entries.values():
            if entry.runs is not entry.was:
                entry.work, entry.since_s, entry.was = entry.left, self.now_s, entry.runs

    def load(self, entry: Entry) -> None:
        """Put a job with its schedule into the table, unchecked."""
        self.entries[entry.key] = entry
        _take(self.profile, entry.runs)

    def drop(self, key: str) -> None:
        """Take a job out."""
        entry = self.entries.pop(key)
        _take(self.profile, entry.runs, -1)

    def change_runs(self, entry: Entry, runs: Runs) -> None:
        """Replace the schedule of a job in the table, unchecked."""
        _take(self.profile, entry.runs, -1)
        entry.runs = runs
        _take(self.profile, runs)

    def can_alone(self, entry: Entry) -> bool:
        """Whether the job could make its deadline if it had all devices it can use from now on."""
        return self.latest_start_s(entry) >= self.now_s

    def latest_start_s(self, entry: Entry) -> float:
        """The last moment at which the job, alone and at its best size, can still begin."""
        costs, rates = self.costs, entry.rates
        return entry.deadline_s - min(costs.later[n] + entry.left / rates[n] for n in entry.sizes)

    def admit(self, entry: Entry, *, repairs: bool = True, is_certain: bool = False) -> bool:
        """Find room for a new job: beside all others, else by changing their schedules. Returns whether it is in.

        No other job is replanned for one that could not make its deadline even alone, unless it `is_certain` that it
        can.
        """
        runs = self._fit(self.profile, entry)
        if runs:
            entry.runs = runs
            self.load(entry)
            return True
        return repairs and (is_certain or self.can_alone(entry)) and self._repair(entry)

    def has_room(self, capacity: int | Steps, now_s: float) -> bool:
        """Whether all schedules fit as they are if there are so many devices from `now_s` on."""
        least = self.profile.least
        return all(
            after >= before or least(from_s, until_s) >= before - after
            for from_s, until_s, before, after in compared(self.steps, _steps_of(capacity, now_s), now_s)
        )

    def set_capacity(self, capacity: int | Steps) -> bool:
        """Change the number of devices, for good or step by step. If the schedules do not fit any more some are made
        anew, or all; returns whether every promise still holds. Otherwise nothing is changed."""
        before = trimmed(self.steps, self.now_s)
        after = _steps_of(capacity, self.now_s)
        self._shift(before, after)
        if before == after or min(self.profile.free) >= 0 or self._give_way():
            return True
        self._shift(after, before)
        return False

    def force_capacity(self, capacity: int | Steps) -> None:
        """Change the number of devices unconditionally: a job that cannot keep its deadline then is late."""
        if self.set_capacity(capacity):
            return
        everyone = sorted(self.entries.values(), key=self._urgency)
        self.steps = _steps_of(capacity, self.now_s)
        self.profile = FreeProfile(self.steps, self.now_s)
        self.entries = {}
        for entry in everyone:
            entry.runs = ()
        for entry in everyone:
            self.put(entry)

    def lift_capacity(self, capacity: Steps, num_there: int) -> None:
        """Change the number of devices where the schedules do not fit into it, but devices for them are there.

        The schedules go on counting on what they use, up to `num_there`; beyond that none counts on it. A job that
        does not fit into what is there either is late.
        """
        there = trimmed(raised(capacity, constant(num_there), self.now_s), self.now_s)
        if not self.has_room(there, self.now_s):
            self.force_capacity(there)
        moments = sorted({*self.profile.times, *(from_s for from_s, _ in self.steps if from_s > self.now_s)})
        used = tuple([(from_s, at(self.steps, from_s) - self.profile.at(from_s)) for from_s in moments])
        self._shift(trimmed(self.steps, self.now_s), trimmed(raised(capacity, used, self.now_s), self.now_s))

    def _shift(self, before: Steps, after: Steps) -> None:
        self.steps = after
        for from_s, until_s, there, to_be in compared(before, after, self.now_s):
            self.profile.take(from_s, until_s, there - to_be)

    def _give_way(self) -> bool:
        """Plan anew until no device is missing any more: of the jobs that run while some are, first late ones, then
        those that hold most beyond their need; in the end all. If that does not help nothing is changed."""
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

    def put(self, entry: Entry) -> None:
        """Take in a job that is promised already: by its deadline if that can be, else late but as soon as it can."""
        if not entry.is_late and self.admit(entry):
            return
        entry.is_late = True
        runs = self._fit(self.profile, entry)
        entry.runs = runs
        self.load(entry)

    def fit_one(self, entry: Entry) -> Runs:
        """The schedule the entry would get beside all others; empty if there is none. Nothing is changed."""
        return self._fit(self.profile, entry)

    def plan_anew(self, entry: Entry) -> bool:
        """Find another schedule for a job in the table, as for a new one; returns whether there is one. If not, nothing
        is changed."""
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
        # Starting now is looked up, everything else is searched for size by size.
        is_simple = len(runs) == 1 and runs[0].start_s == self.now_s
        self.effort -= 8 + len(profile.times) * (1 if is_simple else 2 + len(sizes))
        return runs

    def _urgency(self, entry: Entry) -> tuple[bool, float, str]:
        """The order of planning: jobs that are late come last, then the nearest latest possible start comes first."""
        return entry.is_late, entry.deadline_s - entry.fastest_s, entry.key

    def _repair(self, new: Entry) -> bool:
        """Make room by planning others anew: first those that hold most beyond their need, then all."""
        deadline_s = new.deadline_s
        able = [entry for entry in self.entries.values() if entry is not new and not entry.is_fixed]
        givers = [entry for entry in able if entry.runs and entry.runs[0].start_s < deadline_s]
        surplus = {entry.key: self.surplus(entry) for entry in givers}
        givers.sort(key=lambda entry: (-surplus[entry.key], entry.deadline_s, entry.key))
        count = 1
        while count < len(givers) and self.effort > 0:
            if self._replan([*givers[:count], new]):
                return True
            count *= 2
        return self.effort > 0 and self._replan([*able, new])

    def surplus(self, entry: Entry) -> int:
        """Devices held beyond the fewest that make the deadline."""
        left_s = entry.deadline_s - self.now_s
        later, rates, left = self.costs.later, entry.rates, entry.left
        need = next((n for n in entry.sizes if later[n] + left / rates[n] <= left_s), entry.sizes[-1])
        return max((run.num_devices for run in entry.runs), default=0) - need

    def _replan(self, group: Sequence[Entry]) -> bool:
        """Plan all of `group` anew beside the others: the most urgent first; a job that does not fit then comes
        earlier.

        Adopted only if every job fits that has to. This is list scheduling with repair of the order ("squeaky wheel").
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


def verify(book: ReservationTable, *, slack_s: float = TOLERANCE_S) -> list[str]:
    """What is wrong with the table, in sentences; empty if all its promises hold.

    Worked out from the schedules alone: no device too many at any moment, every job's work done by its schedule, no
    gap in time, and every promise that is not given up ends by its deadline.
    """
    faults: list[str] = []
    changes: dict[float, int] = {}
    for entry in book.entries.values():
        previous_s = -math.inf
        for start_s, end_s, n, _ in entry.runs:
            if start_s < previous_s or end_s < start_s or n < 1:
                faults.append(f"{entry.key}: its runs overlap or are empty: {entry.runs}")
            previous_s = end_s
            if end_s > book.now_s:
                begin_s = max(start_s, book.now_s)
                changes[begin_s] = changes.get(begin_s, 0) + n
                changes[end_s] = changes.get(end_s, 0) - n
        if not entry.runs and not entry.is_late:
            faults.append(f"{entry.key}: it has no schedule")
        done = work_done(entry.runs, entry.rates, math.inf)
        missing = (entry.work if entry.runs is entry.was else entry.left) - done
        if entry.runs and missing > TOLERANCE_S * max(1.0, entry.work) + 1e-3 * entry.rates[entry.sizes[0]]:
            faults.append(f"{entry.key}: {missing:g} steps are left at the end of its schedule")
        if not entry.is_late and entry.end_s > entry.deadline_s + slack_s:
            faults.append(f"{entry.key}: ends {entry.end_s - entry.deadline_s:g} s after its deadline")
    for moment_s in [from_s for from_s, _ in book.steps if from_s > book.now_s]:
        changes.setdefault(moment_s, 0)
    used = 0
    for moment_s in sorted(changes):
        used += changes[moment_s]
        if used > max(0, at(book.steps, moment_s)):
            faults.append(f"{used} of {at(book.steps, moment_s)} devices are in use at {moment_s:g} s")
            break
    return faults


def _steps_of(capacity: int | Steps, now_s: float) -> Steps:
    return constant(capacity) if isinstance(capacity, int) else trimmed(capacity, now_s)


def _take(profile: FreeProfile, runs: Iterable[PlannedStretch], sign: int = 1) -> None:
    for start_s, end_s, n, _ in runs:
        profile.take(start_s, end_s, sign * n)
