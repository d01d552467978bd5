"""The quote: whether a job would be accepted now, when it would finish and at what cost, and alternatives. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from springtide.control.parts import price_fraction, share_of, time_fraction_at_limit
from springtide.control.quotes.alternatives import find_alternatives
from springtide.control.quotes.budget import cost_usd, money
from springtide.control.quotes.confidence import SpeedRisk
from springtide.control.quotes.inquiry import (
    Inquiry,
    InquiryResult,
    changed_job,
    from_now,
    known_curve,
    longest_run,
    slowed,
    times,
    unbounded_curve,
)
from springtide.control.quotes.quote_pools import PoolContext, counted_on, is_counting_on_loans, loans_counted
from springtide.core.decision import PlannedRun, Policy, Schedule, Snapshot
from springtide.core.quantities import format_duration
from springtide.core.status.quote import Alternative, OptionName, Quote, QuoteOption, Range
from springtide.core.workload import TrainingJob
from springtide.perf.curve import SpeedCurve

# A job's speed on a number of workers is believed after so long (docs/policies/springtide.md).
MEASURED_AFTER_S = 20.0
# Beyond this probability nothing more is looked for, and how often the interval is halved before that.
_SURE = 0.9995
_BISECTIONS = 7
# The fraction of the devices' time from which on communication is mentioned in a verdict.
_NOTABLE_COMMUNICATION = 0.2
_BEST_EFFORT = {"deadline_s": None, "budget_usd": None}


class SpeedRange(msgspec.Struct, frozen=True, kw_only=True):
    """Between which factors of its planned time a run's time lies in four runs of five.

    The default is for a given profile: ten per cent either way. `fast_on` replaces `fast` for some numbers of workers.
    `source` names what the speed is based on, `measured_on` numbers of workers; empty: each speed was given.
    """

    fast: float = 0.9
    slow: float = 1.1
    fast_on: Mapping[int, float] = {}
    source: str = "profile"
    measured_on: frozenset[int] = frozenset()

    def around(self, value: float, num_workers: int) -> Range:
        """The range of a value that is proportional to the time of a run on `num_workers`."""
        return Range(p10=self.fast_on.get(num_workers, self.fast) * value, p90=self.slow * value)


def quote(
    snapshot: Snapshot,
    policy: Policy,
    job: TrainingJob,
    *,
    spread: SpeedRange | None = None,
    risk: SpeedRisk | None = None,
    usd_per_device_hour: float = 0.0,
    policy_name: str = "",
) -> Quote:
    """Return whether `job` would be accepted if it were submitted at `snapshot.now_s`, and what else would be accepted.

    Nothing is changed: the policy decides on a copy of the snapshot to which the job is added. `risk` tells how
    probable it is that the job keeps its deadline.
    """
    builder = _QuoteBuilder(Inquiry(snapshot, policy, usd_per_device_hour), job, spread or SpeedRange(), risk)
    return replace(builder.quote(), policy=policy_name)


class _QuoteBuilder:
    def __init__(self, inquiry: Inquiry, job: TrainingJob, spread: SpeedRange, risk: SpeedRisk | None) -> None:
        self._inquiry = inquiry
        self._job = job
        self._spread, self._risk = spread, None if job.belief is None else risk
        self._now_s, self._each = inquiry.snapshot.now_s, job.devices_each
        self._answer = inquiry.ask(job)
        self._curve = known_curve(self._answer.view)
        self._condition = self._answer.plan.conditions.get(job.job_id)
        self._pools = PoolContext(inquiry.snapshot, self._answer.plan)
        self._counts_on = counted_on(self._pools, self._answer.plan, self._until_s())

    def _until_s(self) -> float:
        """Until when the capacity that promises count on matters: the planned end, or else the deadline."""
        planned = self._answer.plan.future.get(self._job.job_id)
        if planned:
            return planned[-1].end_s
        return math.inf if self._job.goal.deadline_s is None else self._job.goal.deadline_s

    def quote(self) -> Quote:
        answer, inquiry = self._answer, self._inquiry
        schedule = inquiry.schedule(answer)
        share = self._minimum_share()
        alternatives: tuple[Alternative, ...] = ()
        if not answer.is_accepted:
            # The figures of a refused job are those that it would have without its deadline and budget.
            schedule = inquiry.schedule(inquiry.ask(changed_job(self._job, _BEST_EFFORT, self._now_s)))
            alternatives = find_alternatives(inquiry, self._job, answer, share, self._ranges, self._risk)
        finish_s, cost = self._ranges(schedule, self._job)
        probability = self._probability(schedule) if answer.is_accepted and schedule else None
        reason = self._acceptance(schedule) if answer.is_accepted else self._refusal(share)
        if probability is not None:
            reason += f"; the deadline is kept with a probability of {probability_text(probability)}"
        planned = from_now(schedule, self._now_s) if schedule else ()
        deadline_s = self._job.goal.deadline_s
        return Quote(
            verdict="accepted" if answer.is_accepted else "refused",
            reason=reason,
            finish_s=finish_s,
            cost_usd=cost,
            workers=longest_run(schedule) if schedule else None,
            minimum_share=share,
            alternatives=alternatives,
            evidence=tuple(self._evidence(answer)),
            options=self._options(schedule if answer.is_accepted else None),
            schedule=times(planned, self._each) if answer.is_accepted else (),
            is_promised=answer.is_promised,
            promised_if=self._condition,
            probability=probability,
            confidence=self._job.confidence,
            start_s=planned[0].start_s if planned else None,
            deadline_s=None if deadline_s is None else deadline_s - self._now_s,
            budget_usd=self._job.goal.budget_usd,
            speed_source="unknown" if self._curve is None else self._spread.source,
            price_usd_per_device_hour=inquiry.usd_per_device_hour,
            counts_on=self._counts_on,
        )

    # --- figures ----------------------------------------------------------------------------------------------------

    def _ranges(self, schedule: Schedule | None, job: TrainingJob) -> tuple[Range, Range]:
        """In how many seconds the job, changed or not, ends, and what it costs."""
        if not schedule:
            return Range(), Range(p10=0.0, p90=0.0) if self._is_free else Range()
        cost = cost_usd(schedule, self._inquiry.usd_per_device_hour * self._each) * price_fraction(job)
        count, best = longest_run(schedule), time_fraction_at_limit(job)
        finish_s, cost_range = schedule[-1].end_s - self._now_s, self._around(cost, count, job)
        if best == 1.0:
            return self._around(finish_s, count, job), cost_range
        # The schedule assumes the request of its share. With idle neighbours it runs at its limit, but waits as long.
        waits_s = max(0.0, next((run.start_s for run in schedule if run.num_devices), self._now_s) - self._now_s)
        slow, fast = self._around(finish_s, count, job), self._around((finish_s - waits_s) * best, count, job)
        assert fast.p10 is not None
        assert cost_range.p10 is not None
        return Range(p10=waits_s + fast.p10, p90=slow.p90), Range(p10=cost_range.p10 * best, p90=cost_range.p90)

    def _around(self, value: float, num_workers: int, job: TrainingJob) -> Range:
        """The range of a value that is proportional to the job's time."""
        factors = None if self._risk is None else self._risk.range(job, num_workers)
        if factors is None:
            return self._spread.around(value, num_workers)
        return Range(p10=factors[0] * value, p90=factors[1] * value)

    def _probability(self, schedule: Schedule) -> float | None:
        """How probable it is that the job, which is accepted with this schedule, keeps its deadline.

        Its speed shows as soon as it runs. So a promised job that turns out slower counts as in time if the policy
        would still promise the deadline then, on what is free now.
        """
        deadline_s, job = self._job.goal.deadline_s, self._job
        if self._risk is None or job.belief is None or deadline_s is None:
            return None
        count, overheads = longest_run(schedule), self._inquiry.snapshot.overheads
        risk, planned = self._risk.of(job, count), job.belief.factor(count)
        run_s = sum(run.end_s - run.start_s for run in schedule if run.num_devices)
        waits_s = schedule[-1].end_s - self._now_s - run_s
        left_s, most = deadline_s - self._now_s - waits_s, math.exp(risk.error.quantile(_SURE)) / planned
        # Until it is measured it trains at half the speed or more of what it then gets.
        late_s = MEASURED_AFTER_S / 2.0 + overheads.cost_s(count)
        low = high = max(1.0, left_s / run_s)
        if self._answer.is_promised and low < most:
            hurried = replace(job, goal=replace(job.goal, deadline_s=deadline_s - late_s, waits=False))
            high = most
            if not self._inquiry.ask(slowed(hurried, high)).is_promised:
                for _ in range(_BISECTIONS):
                    middle = (low + high) / 2
                    if self._inquiry.ask(slowed(hurried, middle)).is_promised:
                        low = middle
                    else:
                        high = middle
                high = low
        return risk.kept(run_s / planned, left_s, count, high * planned if self._answer.is_promised else 0.0)

    @property
    def _is_free(self) -> bool:
        return self._inquiry.usd_per_device_hour == 0

    def _time_s(self, num_workers: int, curve: SpeedCurve) -> float:
        """How long the whole job takes on `num_workers` from now on."""
        steps = self._answer.view.total_steps or 0
        return self._inquiry.snapshot.overheads.cost_s(num_workers * self._each) + steps / curve.rate(num_workers)

    def _minimum_share(self) -> int | None:
        deadline_s, curve = self._job.goal.deadline_s, unbounded_curve(self._answer.view)
        if deadline_s is None or curve is None:
            return None
        fitting = (n for n in curve.sizes if self._time_s(n, curve) <= deadline_s - self._now_s)
        return next(fitting, None)

    # --- sentences --------------------------------------------------------------------------------------------------

    def _acceptance(self, schedule: Schedule | None) -> str:
        goal, most = self._job.goal, self._pools.num_workers(self._each)
        if self._job.min_workers > most:
            return (
                f"it would be taken in and wait: it asks for {self._workers(self._job.min_workers)}, this pool has "
                f"{self._room()}"
            )
        if self._curve is None:
            unknown = "its length is" if self._answer.view.total_steps is None else "its speed is"
            text = f"{unknown} not known yet"
            if self._condition is not None:
                text += f"; {self._condition.text()}"
            elif goal.deadline_s is not None:
                text += ", so its deadline is pursued and not promised"
            if self._job.is_script:
                return f"{text}: have it call springtide.report(step, total) after each step, and run it once"
            return f"{text}: run it once, or measure it with `springtide quote FILE --profile`"
        if goal.waits and not self._answer.is_promised and self._is_refused_without_waiting():
            return (
                f"its deadline in {format_duration((goal.deadline_s or 0.0) - self._now_s)} cannot be promised now: it "
                "would stay in line until it can be, or until it cannot be met any more"
            )
        if schedule is None:
            held = self._answer.plan.reasons.get(self._job.job_id, "")
            # The policy's reason for a job without devices says what it waits for.
            return (
                f"it would be taken in: {held}"
                if held
                else "it would be taken in and wait; when it starts is not known"
            )
        finish, _ = self._ranges(schedule, self._job)
        assert finish.p10 is not None
        assert finish.p90 is not None
        expected = f"it is expected to finish in {format_duration(finish.p10)} .. {format_duration(finish.p90)}"
        expected += self._on_parts()
        if goal.deadline_s is None:
            return expected
        deadline_s = goal.deadline_s - self._now_s
        if self._answer.is_promised:
            margin_s = deadline_s - (schedule[-1].end_s - self._now_s)
            text = f"its deadline in {format_duration(deadline_s)} is promised"
            loans = self._loans(schedule)
            if finish.p90 > deadline_s:
                late = format_duration(finish.p90 - deadline_s)
                return f"{text}; at the slow end of its speed it would be {late} late{loans}"
            return f"{text}, with {format_duration(margin_s)} to spare as planned{loans}"
        kind = "soft deadline" if goal.is_soft else "deadline"
        if finish.p90 <= deadline_s:
            return f"{expected}, before its {kind}; nothing is promised"
        late = format_duration(finish.p90 - deadline_s)
        return f"{expected}, which may miss its {kind} by {late}; nothing is promised"

    def _on_parts(self) -> str:
        """What the two ends of the range mean for a job on shares of devices."""
        share = share_of(self._job)
        if share is None or share.limit == share.request:
            return ""
        return (
            f" (with {share.limit:g} of a device while others there rest .. with {share.request:g} while they do not)"
        )

    def _loans(self, schedule: Schedule) -> str:
        """Which loans the promise counts on, as text."""
        if not is_counting_on_loans(self._pools, self._answer.plan, schedule):
            return ""
        loans = loans_counted(self._pools, self._counts_on)
        return "" if loans is None else f"; counts {loans.text()}"

    def _is_refused_without_waiting(self) -> bool:
        without_waiting = replace(self._job, goal=replace(self._job.goal, waits=False))
        return not self._inquiry.ask(without_waiting).is_accepted

    def _refusal(self, share: int | None) -> str:
        goal, policy_reason = self._job.goal, self._answer.refusal
        within = changed_job(self._job, {"budget_usd": None}, self._now_s)
        is_about_money = goal.budget_usd is not None and self._inquiry.ask(within).is_accepted
        if self._curve is None or goal.deadline_s is None or is_about_money:
            return policy_reason
        left_s = goal.deadline_s - self._now_s
        text = f"cannot finish within {format_duration(left_s)}" if left_s > 0 else "its deadline has passed"
        total, most = self._pools.num_devices, self._pools.num_workers(self._each)
        if self._job.min_workers > most:
            return f"{text}: it asks for at least {self._workers(self._job.min_workers)}; this pool has {self._room()}"
        if share is None:
            curve = unbounded_curve(self._answer.view) or self._curve
            fastest = curve.sizes[-1]
            need = "needs" if fastest == 1 else "need"
            return f"{text}: even {self._workers(fastest)} {need} {format_duration(self._time_s(fastest, curve))}"
        needs = f"{text}: needs >= {self._workers(share)} from now"
        if share > most:
            return f"{needs}; this pool has {self._room()}{self._holders(' (', ')')}"
        if share > self._answer.view.bounds.max_workers:
            return f"{needs}; it allows {self._answer.view.bounds.max_workers}"
        text = f"{needs}; {self._pools.num_free()} of {total} are free{self._holders(' (', ')')}"
        loans = loans_counted(self._pools, self._counts_on)
        return text if loans is None or not loans.until else f"{text}, counting {loans.text()}"

    def _workers(self, count: int) -> str:
        text = "1 worker" if count == 1 else f"{count} workers"
        return text if self._each == 1 else f"{text} of {self._each} devices"

    def _room(self) -> str:
        """What the pool has for workers of the job's size."""
        if self._each == 1:
            return str(self._pools.num_devices)
        return f"room for {self._pools.num_workers(self._each)}"

    def _evidence(self, answer: InquiryResult) -> list[str]:
        snapshot, lines = self._inquiry.snapshot, []
        if self._curve is not None:
            # How many samples a step of a script has is not known.
            batch, unit = (1, "steps") if self._job.has_own_batch else (self._job.global_batch_size, "samples")
            sizes = self._curve.doubling_sizes or self._curve.sizes
            speeds = ", ".join(f"{self._curve.rate(n) * batch:.4g} on {n}" for n in sizes[:6])
            share = share_of(self._job)
            part = "" if share is None else f" with {share.request:g} of each device"
            known = self._spread.measured_on
            guessed = ", ".join(str(n) for n in sizes[:6] if known and n not in known)
            guess = f"; on {guessed} it was never measured, and is predicted from the others" if guessed else ""
            lines.append(f"speed ({self._spread.source}): {speeds} {unit}/s by number of workers{part}{guess}")
            lines.append(f"{answer.view.total_steps} steps{'' if self._job.has_own_batch else f' of {batch} samples'}")
        total = self._pools.num_devices
        lines.append(f"{self._pools.num_free()} of {total} devices free now{self._holders(': ', '')}")
        if answer.refusal and not answer.is_accepted:
            lines.append(f"the policy says: {answer.refusal}")
        policy_reason = answer.plan.reasons.get(self._job.job_id, "")
        if share_of(self._job) is not None and answer.is_accepted and policy_reason:
            lines.append(f"the policy says: {policy_reason}")
        others = [view for view in snapshot.jobs if known_curve(view) is None]
        if others:
            lines.append(
                f"how long {len(others)} running or waiting jobs take is not known: the quote assumes that they stay"
            )
        return lines

    def _holders(self, before: str, after: str) -> str:
        held = self._pools.holders()
        lines = held[:3]
        if len(held) > 3:
            lines.append(f"and {len(held) - 3} more")
        return f"{before}{', '.join(lines)}{after}" if lines else ""

    # --- the table --------------------------------------------------------------------------------------------------

    def _options(self, chosen: Schedule | None) -> tuple[QuoteOption, ...]:
        """Cheapest, chosen and fastest; the first and the last as if their workers were free from now on."""
        curve = self._curve
        most = self._pools.num_workers(self._each)
        sizes = [] if curve is None else [n for n in curve.sizes if n <= most]
        if curve is None or not sizes:
            return ()
        cheapest = min(sizes, key=lambda n: (n * self._time_s(n, curve), n))
        rows = [self._option("cheapest", cheapest, self._constant(cheapest, curve), curve)]
        if chosen:
            rows.append(self._option("chosen", longest_run(chosen), chosen, curve))
        rows.append(self._option("fastest", sizes[-1], self._constant(sizes[-1], curve), curve))
        return tuple(rows)

    def _constant(self, num_workers: int, curve: SpeedCurve) -> Schedule:
        end_s = self._now_s + self._time_s(num_workers, curve)
        return (PlannedRun(start_s=self._now_s, end_s=end_s, num_devices=num_workers),)

    def _option(self, name: OptionName, num_workers: int, schedule: Schedule, curve: SpeedCurve) -> QuoteOption:
        finish, cost = self._ranges(schedule, self._job)
        alone = curve.rate(1) or curve.rate(curve.sizes[0]) / curve.sizes[0]
        lost = max(0.0, 1.0 - curve.rate(num_workers) / (num_workers * alone)) if num_workers else 0.0
        verdict = self._option_verdict(finish, cost)
        if lost >= _NOTABLE_COMMUNICATION:
            verdict = f"{verdict} (communication takes {100 * lost:.0f} %)".strip()
        samples = math.ceil(self._job.global_batch_size / max(1, num_workers))
        return QuoteOption(
            name=name,
            workers=num_workers,
            batch_per_worker=None if self._job.has_own_batch else samples,
            finish_s=finish,
            cost_usd=cost,
            communication_fraction=lost,
            verdict=verdict,
        )

    def _option_verdict(self, finish: Range, cost: Range) -> str:
        goal = self._job.goal
        if finish.p90 is None:
            return ""
        late_s = 0.0 if goal.deadline_s is None else finish.p90 - (goal.deadline_s - self._now_s)
        over_usd = 0.0 if goal.budget_usd is None or cost.p90 is None else cost.p90 - goal.budget_usd
        problems = [f"misses the deadline by {format_duration(late_s)}"] if late_s > 0 else []
        problems += [f"costs {money(over_usd)} more than the budget"] if over_usd > 0 else []
        if problems:
            return ", ".join(problems)
        met = [what for what, wish in (("deadline", goal.deadline_s), ("budget", goal.budget_usd)) if wish is not None]
        return f"fits {' and '.join(met)}" if met else ""


def probability_text(probability: float) -> str:
    """Like 0.93, 0.996, over 0.999."""
    if probability > 0.999:
        return "over 0.999"
    return f"{probability:.3f}" if probability >= 0.985 else f"{probability:.2f}"
