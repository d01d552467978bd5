"""Changes of a refused job that would be accepted. Each is offered only if the policy accepts it when asked."""

from __future__ import annotations

import math
from collections.abc import Callable

from springtide.control.parts import share_of
from springtide.control.quotes.confidence import SpeedRisk
from springtide.control.quotes.inquiry import Inquiry, InquiryResult, Options, changed_job, known_curve
from springtide.control.quotes.quote_pools import PoolContext
from springtide.core.decision import Schedule
from springtide.core.status.quote import Alternative, Range
from springtide.core.workload import MAX_VIRTUAL_SHARDS, TrainingJob

# A counter-offer must still be accepted when it is submitted a little later, with other jobs further on. So it has to
# be accepted with a deadline that is shorter by this fraction.
SPARE_FRACTION = 0.01
# The precision of the search for a deadline, as a fraction of it. The result is then rounded up to a readable one.
_EXACT_FRACTION = 0.01
_LONGEST_DEADLINE_S = 10 * 365 * 86400.0
_MOST_GROWTH = 16
_MAX_DOUBLINGS = 16
_ROUNDINGS = 6
# The probabilities that are offered where a higher one is refused.
_LEVELS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
# (up to this many seconds, rounded to a multiple of this many)
_UNITS_S = (
    (120.0, 5.0),
    (600.0, 10.0),
    (3600.0, 30.0),
    (6 * 3600.0, 300.0),
    (48 * 3600.0, 1800.0),
    (math.inf, 21600.0),
)

Ranges = Callable[[Schedule | None, TrainingJob], tuple[Range, Range]]


def find_alternatives(
    inquiry: Inquiry,
    job: TrainingJob,
    refused: InquiryResult,
    share: int | None,
    ranges: Ranges,
    risk: SpeedRisk | None = None,
) -> tuple[Alternative, ...]:
    """Return changes that would be accepted now, closest to the request first. `share` is the minimum share, if any."""
    search = _Search(inquiry, job, refused, ranges, risk)
    found = [
        search.later_deadline(),
        search.lower_confidence(),
        search.fewer_epochs(),
        search.more_workers(),
        search.lower_minimum(),
    ]
    found.append(search.more_devices(share))
    found += [search.larger_budget(), search.fewer_workers(), search.whole_devices(), search.best_effort()]
    return tuple(alternative for alternative in found if alternative is not None)


def readable_s(seconds: float) -> float:
    """Round up to a duration that people would write."""
    for limit_s, unit_s in _UNITS_S:
        rounded = math.ceil(seconds / unit_s - 1e-9) * unit_s
        if rounded <= limit_s:
            return float(rounded)
    raise AssertionError("the last unit has no limit")


def typed_duration(seconds: float) -> str:
    """A whole number of seconds as the command line takes it: 45s, 8m30s, 1h5m."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours}h" if hours else "", f"{minutes}m" if minutes else "", f"{rest}s" if rest else ""]
    return "".join(parts) or "0s"


class _Search:
    def __init__(
        self, inquiry: Inquiry, job: TrainingJob, refused: InquiryResult, ranges: Ranges, risk: SpeedRisk | None
    ) -> None:
        self._inquiry = inquiry
        self._job = job
        self._now_s = inquiry.snapshot.now_s
        self._ranges, self._risk = ranges, risk
        self._curve = known_curve(refused.view)
        pools, self._each = PoolContext(inquiry.snapshot, refused.plan), job.devices_each
        # In devices, and in workers of the job.
        self._num_devices, self._total = pools.num_devices, pools.num_workers(self._each)
        without = changed_job(job, {"budget_usd": None}, self._now_s)
        self._is_about_money = job.goal.budget_usd is not None and inquiry.ask(without).is_accepted

    # --- one kind of change each ------------------------------------------------------------------------------------

    def later_deadline(self) -> Alternative | None:
        """The earliest deadline that is admitted, rounded up."""
        goal = self._job.goal
        if goal.deadline_s is None or self._curve is None or self._is_about_money:
            return None
        refused_s = max(0.0, goal.deadline_s - self._now_s)
        admitted_s = self._accepted_deadline_s(refused_s)
        if admitted_s is None:
            return None
        while admitted_s - refused_s > _EXACT_FRACTION * admitted_s:
            middle_s = (refused_s + admitted_s) / 2
            if self._is_accepted_with_spare({"deadline_s": middle_s}):
                admitted_s = middle_s
            else:
                refused_s = middle_s
        candidate_s = readable_s(admitted_s)
        for _ in range(_ROUNDINGS):
            answer = self._lasting_answer({"deadline_s": candidate_s})
            if answer is not None:
                return self._offer(f"--deadline {typed_duration(candidate_s)}", {"deadline_s": candidate_s}, answer)
            candidate_s = readable_s(candidate_s * 1.05 + 1.0)
        return None

    def _accepted_deadline_s(self, refused_s: float) -> float | None:
        """A deadline that is admitted, not much later than needed."""
        assert self._curve is not None
        steps = self._job.total_steps or 0
        most, overheads = self._curve.sizes[-1], self._inquiry.snapshot.overheads
        alone_s = steps / self._curve.rate(most) + overheads.cost_s(most * self._each)
        candidate_s = max(refused_s * 1.05, alone_s, 5.0)
        for _ in range(_MAX_DOUBLINGS):
            if candidate_s > _LONGEST_DEADLINE_S:
                return None
            if self._is_accepted_with_spare({"deadline_s": candidate_s}):
                return candidate_s
            candidate_s *= 2
        return None

    def lower_confidence(self) -> Alternative | None:
        """The highest of a few lower probabilities with which the deadline is admitted."""
        asked = self._job.confidence
        if asked is None or self._risk is None or self._job.goal.deadline_s is None or self._is_about_money:
            return None
        for level in (level for level in _LEVELS if level < asked):
            options: Options = {"confidence": level}
            answer = self._lasting_answer(options)
            if answer is not None:
                return self._offer(f"--confidence {level:g}", options, answer)
        return None

    def fewer_epochs(self) -> Alternative | None:
        """The largest number of epochs that is accepted."""
        return self._largest("num_epochs", 1, self._job.num_epochs - 1, lambda count: f"--epochs {count}")

    def more_workers(self) -> Alternative | None:
        """A higher bound on workers, if the owner's bound is what makes the deadline impossible."""
        most = min(self._total, MAX_VIRTUAL_SHARDS)
        if not self._job.elastic or self._job.max_workers >= most or self._curve is None or self._is_about_money:
            return None
        count = self._smallest(self._job.max_workers, most, lambda n: self._is_accepted_with_spare({"max_workers": n}))
        answer = None if count is None else self._lasting_answer({"max_workers": count})
        if count is None or answer is None:
            return None
        return self._offer(f"--workers {self._job.min_workers}..{count}", {"max_workers": count}, answer)

    def lower_minimum(self) -> Alternative | None:
        """A smaller minimum of workers, if the job asks for more than there are devices."""
        if not self._job.elastic or self._job.min_workers <= self._total or not self._total:
            return None
        options: Options = {"min_workers": 1, "max_workers": min(self._total, MAX_VIRTUAL_SHARDS)}
        answer = self._lasting_answer(options)
        return None if answer is None else self._offer(f"--workers 1..{options['max_workers']}", options, answer)

    def more_devices(self, share: int | None) -> Alternative | None:
        """The smallest cluster that would take the job: with further nodes, or with more devices in its only node."""
        nodes = self._inquiry.snapshot.cluster.nodes
        if not nodes or self._job.goal.deadline_s is None or share is None or self._is_about_money:
            return None
        unit = len(nodes[-1].devices) if len(nodes) > 1 else 1
        # More devices only help a job that may use them. For one bounded below that, `more_workers` offers a change.
        if not unit or (self._job.elastic and self._job.max_workers < self._total):
            return None
        most = max(1, (_MOST_GROWTH - 1) * self._num_devices // unit)
        there = len(self._inquiry.snapshot.cluster.device_ids())

        def is_enough(more: int) -> bool:
            return self._is_accepted_with_spare(self._bounds_on(self._num_devices + more * unit), there + more * unit)

        # The search starts where the job's minimum of workers fits: it cannot start on fewer.
        missing = self._job.min_workers * self._each - self._num_devices
        count = self._smallest(max(0, -(-missing // unit) - 1), most, is_enough)
        if count is None:
            return None
        bounds, num_devices = self._bounds_on(self._num_devices + count * unit), there + count * unit
        answer = self._lasting_answer(bounds, num_devices)
        if answer is None:
            return None
        if len(nodes) > 1:
            what = f"{count} more node{'s' if count > 1 else ''} of {unit} devices"
        else:
            what = f"{num_devices} devices instead of {there}"
        return self._offer(what, bounds, answer, num_devices)

    def larger_budget(self) -> Alternative | None:
        """A budget that covers the planned cost."""
        if not self._is_about_money:
            return None
        answer = self._inquiry.ask(changed_job(self._job, {"budget_usd": None}, self._now_s))
        _, cost = self._ranges(self._inquiry.schedule(answer), answer.view.job)
        budget_usd = math.ceil((cost.p90 or 0.0) * 100.0 + 1e-9) / 100.0
        for _ in range(_MAX_DOUBLINGS):
            if budget_usd > (self._job.goal.budget_usd or 0.0):
                held = self._lasting_answer({"budget_usd": budget_usd})
                if held is not None:
                    return self._offer(f"--budget {budget_usd:.2f}", {"budget_usd": budget_usd}, held)
            budget_usd = math.ceil(budget_usd * 110.0 + 1.0) / 100.0
        return None

    def fewer_workers(self) -> Alternative | None:
        """The most workers with which the job stays within its budget."""
        if not self._is_about_money or not self._job.elastic:
            return None
        least, most = self._job.min_workers, min(self._job.max_workers, self._total) - 1
        return self._largest("max_workers", least, most, lambda count: f"--workers {least}..{count}")

    def whole_devices(self) -> Alternative | None:
        """Whole devices instead of shares of them."""
        if share_of(self._job) is None or self._is_about_money:
            return None
        answer = self._lasting_answer({"share": None})
        return None if answer is None else self._offer("leave --share out", {"share": None}, answer)

    def best_effort(self) -> Alternative | None:
        """No deadline and no budget: the job runs when devices are free."""
        options: Options = {"deadline_s": None, "budget_usd": None}
        if self._job.min_workers > self._total:
            # It would be accepted and never start.
            return None
        answer = self._inquiry.ask(changed_job(self._job, options, self._now_s))
        return self._offer("--best-effort", options, answer) if answer.is_accepted else None

    # --- how they are found -----------------------------------------------------------------------------------------

    def _is_accepted_with_spare(self, options: Options, num_devices: int | None = None) -> bool:
        """Whether the changed job is accepted with a deadline that is shorter by SPARE_FRACTION."""
        changed = self._changed(options)
        if changed.goal.deadline_s is not None:
            spared = {"deadline_s": (changed.goal.deadline_s - self._now_s) * (1.0 - SPARE_FRACTION)}
            changed = changed_job(changed, spared, self._now_s)
        return self._inquiry.ask(changed, num_devices).is_accepted

    def _changed(self, options: Options) -> TrainingJob:
        changed, level = changed_job(self._job, options, self._now_s), options.get("confidence")
        return changed if level is None or self._risk is None else self._risk.at_level(changed, level)

    def _lasting_answer(self, options: Options, num_devices: int | None = None) -> InquiryResult | None:
        """The policy's answer to the changed job, if it is accepted both as it is and with a shorter deadline."""
        answer = self._inquiry.ask(self._changed(options), num_devices)
        return answer if answer.is_accepted and self._is_accepted_with_spare(options, num_devices) else None

    def _bounds_on(self, num_devices: int) -> dict[str, float | int | None]:
        """The job's upper bound on workers raised to the size of a larger cluster."""
        most = max(self._job.min_workers, min(num_devices // self._each, MAX_VIRTUAL_SHARDS))
        return {"max_workers": most} if self._job.elastic else {}

    def _largest(self, option: str, least: int, most: int, text: Callable[[int], str]) -> Alternative | None:
        """An offer of the largest accepted value from `least` to `most`; None if the smallest is refused."""
        if most < least or self._curve is None:
            return None
        if not self._is_accepted_with_spare({option: least}):
            return None
        low, high = least, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._is_accepted_with_spare({option: middle}):
                low = middle
            else:
                high = middle
        answer = self._lasting_answer({option: low})
        return None if answer is None else self._offer(text(low), {option: low}, answer)

    def _smallest(self, refused: int, most: int, is_enough: Callable[[int], bool]) -> int | None:
        """The smallest count above `refused` that is enough: doubling strides find a bound, then bisection."""
        stride, low = 1, refused
        while True:
            high = min(most, low + stride)
            if high <= low:
                return None
            if is_enough(high):
                break
            low, stride = high, stride * 2
        while high - low > 1:
            middle = (low + high) // 2
            if is_enough(middle):
                high = middle
            else:
                low = middle
        return high

    def _offer(
        self, change: str, options: Options, answer: InquiryResult, num_devices: int | None = None
    ) -> Alternative:
        finish, cost = self._ranges(self._inquiry.schedule(answer), answer.view.job)
        return Alternative(
            change=change, finish_s=finish, cost_usd=cost, options=dict(options), num_devices=num_devices
        )
