"""The goal of one job on functions against its menu: what each entry means for its deadline and its budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from springtide.core.decision import JobView, Refusal
from springtide.core.functions import FunctionMenu, FunctionOption, FunctionPlan
from springtide.scheduling.functions.plan_text import above, money

# A running job moves to a faster entry only for a gain of at least this fraction, which pays for the restart.
LEAST_GAIN_FRACTION = 0.1


class Ask:
    """The goal of one job, and what each entry of its menu would mean for it."""

    def __init__(
        self,
        view: JobView,
        menu: FunctionMenu,
        now_s: float,
        running: FunctionPlan | None = None,
        *,
        is_corrected: bool = False,
        by_own_pace: bool = False,
    ) -> None:
        self._view = view
        self._menu = menu
        self._now_s = now_s
        self._left = None if view.total_steps is None else max(0, view.total_steps - view.progress.step)
        self._pace = 1.0 if is_corrected else pace_of(view, menu, running)
        # Plans that it has run as are compared by their measured times; otherwise it would return to slow ones again.
        self._own = _paces(view, menu) if by_own_pace else {}
        self.refusal = Refusal(reason="")

    @property
    def options(self) -> tuple[FunctionOption, ...]:
        """The entries of its menu, cheapest first."""
        return self._menu.options

    def entry(self, plan: FunctionPlan) -> FunctionOption | None:
        """The entry with this plan."""
        return entry_of(self._menu, plan)

    def time_s(self, option: FunctionOption, *, is_upper: bool = True) -> float:
        """Seconds that it takes from now on; infinite if its length is not known."""
        if self._left is None:
            return math.inf
        slack = 1.0 + (self._menu.error_fraction if is_upper else 0.0)
        return option.start_s + self._left * option.step_s * self._pace_as(option) * slack

    def finish_s(self, option: FunctionOption) -> float:
        """The latest end if it starts as this entry now."""
        return self._now_s + self.time_s(option)

    def cost_usd(self, option: FunctionOption) -> float:
        """The most it costs from its submission to its end; what was spent so far if its length is not known."""
        if self._left is None:
            return self._view.spent_usd
        slack = 1.0 + self._menu.error_fraction
        return self._view.spent_usd + option.start_usd + self._left * option.step_usd * self._pace_as(option) * slack

    def _pace_as(self, option: FunctionOption) -> float:
        return self._own.get(option.plan, self._pace)

    def latest_start_s(self, options: Sequence[FunctionOption]) -> float:
        """Until when it may wait and still meet its deadline within its budget; in the past if no entry does."""
        goal = self._view.job.goal
        within = [o for o in options if goal.budget_usd is None or self.cost_usd(o) <= goal.budget_usd]
        if goal.deadline_s is None or not within:
            return -math.inf
        return goal.deadline_s - min(self.time_s(option) for option in within)

    def left_s(self, option: FunctionOption) -> float:
        """The most seconds that it takes from now on if it runs as this entry already."""
        return self.time_s(option) - option.start_s

    def choose(
        self, options: Sequence[FunctionOption], starts_s: Mapping[FunctionPlan, float]
    ) -> tuple[FunctionOption, str] | None:
        """The entry for its goal and the reason, if each may start as `starts_s` says; None, and `refusal`, if no entry
        meets the goal."""
        goal = self._view.job.goal
        if not options:
            need = min(option.plan.num_functions for option in self._menu.options)
            self.refusal = Refusal(
                reason=f"its smallest plan needs {need} functions at a time, more than the service runs",
                alternatives=("--concurrency",),
            )
            return None
        if self._left is None:
            return self._recommended(options), "its length is not known, so no goal can be judged"
        affordable = [o for o in options if goal.budget_usd is None or self.cost_usd(o) <= goal.budget_usd]
        if not affordable:
            need_usd = min(self.cost_usd(option) for option in options)
            self.refusal = Refusal(
                reason=f"its cheapest way on functions costs up to {money(need_usd)}, more than its budget of "
                f"{money(goal.budget_usd or 0.0)}",
                alternatives=(f"--budget {above(need_usd)}",),
            )
            return None
        ends_s = {option.plan: starts_s[option.plan] + self.time_s(option) for option in options}

        def _soonest(among: Sequence[FunctionOption]) -> tuple[FunctionOption, str]:
            within = f" within {money(goal.budget_usd)}" if goal.budget_usd is not None else ""
            return min(among, key=lambda option: (ends_s[option.plan], self.cost_usd(option))), f"the fastest{within}"

        if goal.deadline_s is None:
            if goal.budget_usd is None and not goal.is_fastest:
                return self._recommended(affordable), f"the recommended of {len(self._menu.options)} ways"
            return _soonest(affordable)
        punctual = [option for option in affordable if ends_s[option.plan] <= goal.deadline_s]
        if punctual and goal.is_fastest:
            return _soonest(punctual)
        if punctual:
            return min(punctual, key=self.cost_usd), "the cheapest that makes its deadline"
        soonest = min(affordable, key=lambda option: ends_s[option.plan])
        if goal.is_soft:
            return soonest, "late: the fastest misses its deadline, too"
        self.refusal = self._too_late(goal.deadline_s, soonest, options, starts_s)
        return None

    def _too_late(
        self,
        deadline_s: float,
        soonest: FunctionOption,
        options: Sequence[FunctionOption],
        starts_s: Mapping[FunctionPlan, float],
    ) -> Refusal:
        """Why no entry meets the deadline, and what could be changed."""
        waits_s = starts_s[soonest.plan] - self._now_s
        takes_s = math.ceil(waits_s + self.time_s(soonest)) if math.isfinite(waits_s) else None
        changes = ["--best-effort"]
        if takes_s is not None:
            changes.insert(0, f"--deadline {takes_s}s")
        dearer = [o for o in options if starts_s[o.plan] + self.time_s(o) <= deadline_s]
        if dearer:
            changes.insert(0, f"--budget {above(min(self.cost_usd(o) for o in dearer))}")
        queue = f", {math.ceil(waits_s)} s of it in line for functions" if 1.0 <= waits_s < math.inf else ""
        found = (
            "no way fits beside the jobs that run" if takes_s is None else f"the fastest way takes up to {takes_s} s"
        )
        return Refusal(
            reason=f"cannot finish in time on functions: {found}{queue}, and "
            f"{max(0, math.floor(deadline_s - self._now_s))} s are left",
            alternatives=tuple(changes),
        )

    def is_behind(self, now: FunctionOption) -> bool:
        """Whether it misses its deadline by going on as it is."""
        deadline_s = self._view.job.goal.deadline_s
        if deadline_s is None or self._left is None:
            return False
        return self._now_s + self._left * now.step_s * self._pace > deadline_s

    def faster(self, now: FunctionOption, options: Sequence[FunctionOption]) -> tuple[FunctionOption, str] | None:
        """The entry to move to, of those that fit; None if none ends early enough."""
        goal = self._view.job.goal
        if self._left is None or goal.deadline_s is None:
            return None
        stays_s = self._left * now.step_s * self._pace
        within = [o for o in options if goal.budget_usd is None or self.cost_usd(o) <= goal.budget_usd]
        sooner = [o for o in within if self.time_s(o, is_upper=False) < (1.0 - LEAST_GAIN_FRACTION) * stays_s]
        if not sooner:
            return None
        punctual = [o for o in sooner if self.finish_s(o) <= goal.deadline_s]
        if punctual:
            return min(punctual, key=self.cost_usd), "it has fallen behind its deadline; the cheapest that makes it"
        return min(sooner, key=self.time_s), "it has fallen behind its deadline; the fastest"

    def unlike(
        self, now: FunctionOption, options: Sequence[FunctionOption], starts_s: Mapping[FunctionPlan, float]
    ) -> tuple[FunctionOption, str] | None:
        """The entry to move to after the owner has changed the goal; None to go on as now.

        `now` costs no start. Another entry must take a tenth less of what the goal limits, or of what it minimises.
        """
        goal = self._view.job.goal
        if self._left is None or (goal.deadline_s is None and goal.budget_usd is None):
            return None
        chosen = self.choose(options, starts_s)
        if chosen is None or chosen[0].plan == now.plan:
            return None
        option, why = chosen
        is_late = goal.deadline_s is not None and self._now_s + self.time_s(now) > goal.deadline_s
        is_dear = goal.budget_usd is not None and self.cost_usd(now) > goal.budget_usd
        is_about_time = goal.deadline_s is None or goal.is_fastest
        if is_late or (is_about_time and not is_dear):
            was, would = self.time_s(now), self.time_s(option)
        else:
            was, would = self.cost_usd(now) - self._view.spent_usd, self.cost_usd(option) - self._view.spent_usd
        return None if would > (1.0 - LEAST_GAIN_FRACTION) * was else (option, f"its owner changed its goal; {why}")

    def _recommended(self, options: Sequence[FunctionOption]) -> FunctionOption:
        """The recommended entry, or the fastest of those that fit and cost no more."""
        wanted = self._menu.options[self._menu.recommended]
        if wanted in options:
            return wanted
        cheaper = [option for option in options if option.step_usd <= wanted.step_usd] or list(options)
        return min(cheaper, key=lambda option: option.step_s)


def entry_of(menu: FunctionMenu, plan: FunctionPlan) -> FunctionOption | None:
    """The entry with this plan."""
    return next((option for option in menu.options if option.plan == plan), None)


def pace_of(view: JobView, menu: FunctionMenu, running: FunctionPlan | None = None) -> float:
    """How many times as long steps take as predicted, as measured so far; 1 without measurements.

    Measurements are stored by the number of functions; `running` tells which entry with that number was measured.
    """
    ratios = _paces(view, menu)
    if running in ratios:
        return ratios[running]
    return min(ratios.values(), default=1.0)


def _paces(view: JobView, menu: FunctionMenu) -> dict[FunctionPlan, float]:
    """How many times as long as predicted steps took, for each plan that was measured."""
    ratios: dict[FunctionPlan, float] = {}
    for option in menu.options:
        samples_per_s = view.learnt.throughput_samples_per_s.get(option.plan.num_functions)
        if samples_per_s:
            ratios[option.plan] = view.global_batch_size / samples_per_s / option.step_s
    return ratios
