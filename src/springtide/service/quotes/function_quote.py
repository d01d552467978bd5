"""Quotes for jobs on functions: time and bill of the options on the menu, and whether they fit the goal."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from springtide.control.quotes.alternatives import typed_duration
from springtide.control.quotes.inquiry import InquiryResult, Options, arriving, changed_job
from springtide.core.decision import FunctionAllocation, Policy, Refusal, Snapshot
from springtide.core.function_search import FunctionSearch, batch_at, steps_of
from springtide.core.functions import Bill, FunctionMenu, FunctionOption, FunctionPlan
from springtide.core.quantities import format_duration
from springtide.core.status.quote import (
    UNKNOWN,
    Alternative,
    FunctionQuoteOption,
    OptionName,
    Quote,
    Range,
)
from springtide.core.status.search import SearchQuote
from springtide.core.workload import TrainingJob
from springtide.perf.functions.bill import bill_of, sizes_of, usage_of_start, usage_of_steps
from springtide.scheduling.functions.plan_text import money, words
from springtide.service.submission.function_menus import Menus

_BEST_EFFORT = {"deadline_s": None, "budget_usd": None}


def quote_on_functions(
    snapshot: Snapshot, policy: Policy, job: TrainingJob, menus: Menus, *, policy_name: str = ""
) -> Quote:
    """Predict what would happen if `job`, which has a menu, were submitted at `snapshot.now_s`; nothing is changed.

    Times and costs are those of the option that the policy chooses. If it refuses the job, they are those of the
    option that it would choose without deadline and budget.
    """
    assert job.menu is not None
    inquiry = _Inquiry(snapshot, policy)
    priced = PricedMenu(job, menus, snapshot.now_s)
    answer = inquiry.ask(job)
    shown = answer if answer.is_accepted else inquiry.ask(changed_job(job, _BEST_EFFORT, snapshot.now_s))
    chosen = priced.chosen(shown)
    finish_s, cost_usd = (UNKNOWN, UNKNOWN) if chosen is None else (priced.time_s(chosen), priced.cost_usd(chosen))
    wait_s = _wait_s(shown)
    finish_s = UNKNOWN if wait_s is None else _shifted(finish_s, wait_s)
    deadline_s = priced.deadline_s
    return Quote(
        verdict="accepted" if answer.is_accepted else "refused",
        reason=_reason(answer, priced, chosen),
        finish_s=finish_s,
        cost_usd=cost_usd,
        workers=None if chosen is None else chosen.plan.num_functions,
        alternatives=() if answer.is_accepted else tuple(_alternatives(inquiry, job, priced, answer)),
        evidence=tuple(_evidence(answer, priced)),
        is_promised=answer.is_promised,
        start_s=wait_s if answer.is_accepted else None,
        deadline_s=deadline_s,
        budget_usd=job.goal.budget_usd,
        speed_source=menus.profile.source or "profile",
        policy=policy_name,
        on=job.menu.service,
        bill=None if chosen is None or priced.num_steps is None else priced.bill(chosen),
        function_options=priced.table(chosen if answer.is_accepted else None),
        search=None if job.search is None or chosen is None else priced.search_quote(job.search, chosen),
    )


class _Inquiry:
    """Asks the policy about one more job, on a copy of the snapshot."""

    def __init__(self, snapshot: Snapshot, policy: Policy) -> None:
        self.snapshot = snapshot
        self._policy = policy

    def ask(self, job: TrainingJob) -> InquiryResult:
        view = arriving(job, self.snapshot.now_s)
        snapshot = replace(self.snapshot, jobs=(*self.snapshot.jobs, view))
        return InquiryResult(view=view, snapshot=snapshot, plan=self._policy.decide(snapshot))


class PricedMenu:
    """A job's menu with the time and the cost of each option, from now to the job's end."""

    def __init__(self, job: TrainingJob, menus: Menus, now_s: float) -> None:
        assert job.menu is not None
        self.job = job
        self.menu = job.menu if job.search is None else _searched_menu(job, menus, now_s)
        self._menus = menus
        self._now_s = now_s
        self.num_steps = job.total_steps
        self.deadline_s = None if job.goal.deadline_s is None else job.goal.deadline_s - now_s

    def for_job(self, job: TrainingJob) -> PricedMenu:
        """The same menu for a job with another length or goal."""
        return PricedMenu(job, self._menus, self._now_s)

    def time_s(self, option: FunctionOption) -> Range:
        """Seconds from now to the end; unknown if the job's length is."""
        if self.num_steps is None:
            return UNKNOWN
        return self._range(option.start_s, self.num_steps * option.step_s)

    def cost_usd(self, option: FunctionOption) -> Range:
        if self.num_steps is None:
            return UNKNOWN
        return self._range(option.start_usd, self.num_steps * option.step_usd)

    def _range(self, start: float, steps: float) -> Range:
        error = self.menu.error_fraction
        return Range(p10=start + steps * (1 - error), p90=start + steps * (1 + error))

    def _total(self, option: FunctionOption) -> tuple[float, float]:
        """Cost in dollars and time in seconds: of the whole run, or of one step if the length is unknown."""
        if self.num_steps is None:
            return option.step_usd, option.step_s
        return option.start_usd + self.num_steps * option.step_usd, option.start_s + self.num_steps * option.step_s

    def bill(self, option: FunctionOption) -> Bill:
        """The expected bill of the whole run, item by item."""
        plan, prices = option.plan, self._menus.service.prices
        sizes, num_steps = sizes_of(plan, self._menus.profile), max(1, self.num_steps or 0)
        steps = usage_of_steps(plan, option.step_s, sizes, self._menus.habits, num_steps=num_steps)
        return bill_of(usage_of_start(plan, option.start_s).plus(steps), prices)

    def chosen(self, answer: InquiryResult) -> FunctionOption | None:
        """The option that the policy would choose; the recommended one for a job that would have to wait."""
        allocation = answer.plan.allocations.get(answer.view.job.job_id)
        if not answer.is_accepted:
            return None
        if isinstance(allocation, FunctionAllocation):
            return self.of_plan(allocation.plan)
        return self.menu.options[self.menu.recommended]

    def of_plan(self, plan: FunctionPlan) -> FunctionOption | None:
        return next((option for option in self.menu.options if option.plan == plan), None)

    def table(self, chosen: FunctionOption | None) -> tuple[FunctionQuoteOption, ...]:
        """The cheapest, the chosen and the fastest option, each once."""
        options = self.menu.options
        named: list[tuple[OptionName, FunctionOption]] = [
            ("cheapest", min(options, key=lambda option: (self._total(option)[0], option.step_s))),
            *([("chosen", chosen)] if chosen is not None else []),  # type: ignore[list-item]
            ("fastest", min(options, key=lambda option: (self._total(option)[1], option.step_usd))),
        ]
        shown = [(name, option) for name, option in named if name == "chosen" or chosen is None or option is not chosen]
        if len(shown) == 2 and shown[0][1] is shown[1][1]:
            shown = shown[:1]
        return tuple(self._row(name, option) for name, option in shown)

    def _row(self, name: OptionName, option: FunctionOption) -> FunctionQuoteOption:
        return FunctionQuoteOption(
            name=name,
            plan=option.plan,
            step_s=option.step_s,
            finish_s=self.time_s(option),
            cost_usd=self.cost_usd(option),
            bill=self.bill(option) if self.num_steps is not None else Bill(),
            verdict=self.verdict(option),
        )

    def search_quote(self, search: FunctionSearch, chosen: FunctionOption) -> SearchQuote:
        """The most that the search may cost: trials of options that may turn out better than the chosen one."""
        from springtide.solvers.search.goal_search import MAX_TRIED, PROBE_STEPS

        worst = 1.0 + self.menu.error_fraction
        candidates = [option for option in self.menu.options if self._may_be_better(option, chosen)]
        return SearchQuote(
            num_configurations=search.space.max_workers * len(search.space.sizes),
            num_trials=MAX_TRIED - 1,
            trial_s=max(PROBE_STEPS * max(0.0, worst * option.step_s - chosen.step_s) for option in candidates),
            trial_usd=max(
                option.start_usd + PROBE_STEPS * max(0.0, worst * option.step_usd - chosen.step_usd)
                for option in candidates
            ),
            error_fraction=self.menu.error_fraction,
            num_earlier=len(search.earlier),
        )

    def _may_be_better(self, option: FunctionOption, chosen: FunctionOption) -> bool:
        """Whether an option may be better for the goal than the chosen one, given the error of the predictions."""
        if option is chosen:
            return True
        goal, least = self.job.goal, 1.0 - self.menu.error_fraction
        time_s, cost_usd = self.time_s(option).p10 or 0.0, self.cost_usd(option).p10 or 0.0
        is_late = self.deadline_s is not None and time_s > self.deadline_s
        is_dear = goal.budget_usd is not None and cost_usd > goal.budget_usd
        if is_late or is_dear:
            return False
        if goal.is_fastest or (goal.deadline_s is None and goal.budget_usd is not None):
            return least * option.step_s <= chosen.step_s
        if goal.deadline_s is not None:
            return least * option.step_usd <= chosen.step_usd
        return least**2 * option.step_s * option.step_usd <= chosen.step_s * chosen.step_usd

    def verdict(self, option: FunctionOption) -> str:
        """Whether an option fits deadline and budget, as text."""
        if self.num_steps is None:
            return "its length is not known"
        problems = []
        latest_s, dearest_usd = self.time_s(option).p90 or 0.0, self.cost_usd(option).p90 or 0.0
        if self.deadline_s is not None and latest_s > self.deadline_s:
            problems.append(f"may miss the deadline by {format_duration(latest_s - self.deadline_s)}")
        budget_usd = self.job.goal.budget_usd
        if budget_usd is not None and dearest_usd > budget_usd:
            problems.append(f"may cost {money(dearest_usd)}")
        if problems:
            return " and ".join(problems)
        return "fits" if self.deadline_s is not None or budget_usd is not None else "possible"


def _searched_menu(job: TrainingJob, menus: Menus, now_s: float) -> FunctionMenu:
    """The menu with which the search would begin, as the policy sees it at this moment."""
    from springtide.scheduling.functions.goal_search import search_step

    return search_step(arriving(job, now_s), menus.service, now_s, None).menu


def _wait_s(answer: InquiryResult) -> float | None:
    """Seconds until the job would start: 0 if it starts at once, None if the policy does not plan ahead."""
    if _is_allocated(answer):
        return 0.0
    planned = answer.plan.future.get(answer.view.job.job_id)
    return max(0.0, planned[0].start_s - answer.snapshot.now_s) if planned else None


def _shifted(finish_s: Range, wait_s: float) -> Range:
    if finish_s.p10 is None or finish_s.p90 is None:
        return finish_s
    return Range(p10=finish_s.p10 + wait_s, p90=finish_s.p90 + wait_s)


def _is_allocated(answer: InquiryResult) -> bool:
    return answer.view.job.job_id in answer.plan.allocations


def _reason(answer: InquiryResult, priced: PricedMenu, chosen: FunctionOption | None) -> str:
    if not answer.is_accepted:
        return answer.refusal
    if chosen is None:
        return answer.plan.reasons.get(answer.view.job.job_id, "it would be taken in")
    if not _is_allocated(answer):
        return answer.plan.reasons.get(answer.view.job.job_id, "it waits for its turn")
    finish_s = priced.time_s(chosen)
    if priced.job.stream:
        return (
            f"begins as {words(chosen.plan)} and trains until {priced.job.stream!r} is closed, "
            f"{money(1000 * chosen.step_usd / priced.job.global_batch_size)} for 1,000 samples; while fewer than a "
            "batch wait nothing runs"
        )
    if finish_s.p10 is None or finish_s.p90 is None:
        return (
            f"runs as {words(chosen.plan)}; how long it takes is not known: say how many samples an epoch has, "
            "--samples N"
        )
    return f"is expected to finish in {format_duration(finish_s.p10)} .. {format_duration(finish_s.p90)}"


def _evidence(answer: InquiryResult, priced: PricedMenu) -> Iterable[str]:
    menu, search = priced.menu, priced.job.search
    count = "1 way" if len(menu.options) == 1 else f"{len(menu.options)} ways"
    if search is None:
        yield f"{count} to run its {menu.num_layers} layers at {menu.service}, none slower and dearer than another"
    else:
        low, high = search.space.sizes[0].memory_mb, search.space.sizes[-1].memory_mb
        yield (
            f"each worker holds the whole model: 1..{search.space.max_workers} workers of {low}..{high} MB at "
            f"{menu.service}, {count} worth considering; the search goes on while it trains"
        )
    plan_reason = answer.plan.reasons.get(answer.view.job.job_id, "")
    if answer.is_accepted and plan_reason:
        yield plan_reason
    if priced.num_steps is not None:
        yield (
            f"{priced.num_steps} steps of {_batches(priced.job)} samples; predictions are off by up to "
            f"{100 * menu.error_fraction:.0f} %"
        )
    if search is not None and search.earlier:
        yield f"{_count(len(search.earlier), 'measurement')} of earlier runs of the same function count"


def _batches(job: TrainingJob) -> str:
    """The batch sizes as text: "64", or "64..256" where the batch changes with the epoch."""
    epochs = range(job.num_epochs)
    sizes = (
        {batch_at(job.batch_schedule, epoch, job.global_batch_size) for epoch in epochs}
        if job.batch_schedule
        else set()
    )
    low, high = min(sizes, default=job.global_batch_size), max(sizes, default=job.global_batch_size)
    return str(low) if low == high else f"{low}..{high}"


def _count(number: int, singular: str) -> str:
    return f"{number} {singular if number == 1 else singular + 's'}"


def _alternatives(
    inquiry: _Inquiry, job: TrainingJob, priced: PricedMenu, answer: InquiryResult
) -> Iterable[Alternative]:
    """Changes that the policy accepts when asked: those that it names, fewer epochs, and best effort."""
    refusal: Refusal = answer.plan.rejected[job.job_id]
    candidates: list[dict[str, float | int | None]] = []
    for change in refusal.alternatives:
        flag, _, value = change.partition(" ")
        if flag == "--budget":
            candidates.append({"budget_usd": float(value)})
        elif flag == "--deadline":
            candidates.append({"deadline_s": float(value.removesuffix("s"))})
    fewer = _fewer_epochs(inquiry, job)
    if fewer is not None:
        candidates.append({"num_epochs": fewer})
    candidates.append(dict(_BEST_EFFORT))
    for options in candidates:
        changed = _changed(job, options, inquiry.snapshot.now_s)
        would = inquiry.ask(changed)
        if not would.is_accepted:
            continue
        option, shorter = priced.chosen(would), priced.for_job(changed)
        yield Alternative(
            change=_as_flags(options),
            finish_s=UNKNOWN if option is None else shorter.time_s(option),
            cost_usd=UNKNOWN if option is None else shorter.cost_usd(option),
            options={**options},
        )


def _changed(job: TrainingJob, options: Options, now_s: float) -> TrainingJob:
    """The job with some options changed. With a batch schedule the number of steps is counted again."""
    changed = changed_job(job, options, now_s)
    if not job.batch_schedule or job.num_samples is None or changed.num_epochs == job.num_epochs:
        return changed
    total = steps_of(job.batch_schedule, job.num_samples, changed.num_epochs, job.global_batch_size)
    return replace(changed, total_steps=total)


def _fewer_epochs(inquiry: _Inquiry, job: TrainingJob) -> int | None:
    """The most epochs with which the job would be accepted, by bisection; None if even one epoch is too many."""

    def is_accepted(num_epochs: int) -> bool:
        return inquiry.ask(_changed(job, {"num_epochs": num_epochs}, inquiry.snapshot.now_s)).is_accepted

    low, high = 1, job.num_epochs
    if high <= 1 or not is_accepted(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_accepted(middle) else (low, middle)
    return low


def _as_flags(options: dict[str, float | int | None]) -> str:
    if len(options) > 1:
        return "--best-effort"
    if options.get("budget_usd") is not None:
        return f"--budget {options['budget_usd']:g}"
    if options.get("deadline_s") is not None:
        return f"--deadline {typed_duration(float(options['deadline_s'] or 0))}"
    return f"--epochs {options['num_epochs']}"
