"""Changes of a submitted job's goal: whether the new goal can be met; if not, why, and which goals could be."""

from __future__ import annotations

from datetime import UTC, datetime

from springtide.control.quotes.budget import cost_usd, money
from springtide.control.quotes.reconsider import reconsider, soonest_s
from springtide.control.records import JobRecord
from springtide.core.decision import PlannedRun, Snapshot
from springtide.core.errors import InvalidRequest
from springtide.core.quantities import format_duration, parse_duration_s
from springtide.core.workload import Goal
from springtide.perf.curve import fit_scaling
from springtide.scheduling.functions.plan_text import above
from springtide.service.ports import PlatformLike


def check_goal(platform: PlatformLike, record: JobRecord, goal: Goal) -> float | None:
    """When a job is planned to end if its deadline, as `goal` has it, is a promise; None where nothing is promised.

    Raises InvalidRequest.
    """
    if record.job.is_on_functions:
        return _checked_on_functions(platform, record, goal)
    _check_budget(platform, record, goal)
    return _promised_s(platform, record, goal)


def _check_budget(platform: PlatformLike, record: JobRecord, goal: Goal) -> None:
    budget_usd, before_usd = goal.budget_usd, record.job.goal.budget_usd
    if budget_usd is None or budget_usd == before_usd:
        return
    now_s = platform.now_s()
    spent_usd = record.attained_service_s(now_s) / 3600.0 * platform.usd_per_device_hour
    _refuse_spent(record, budget_usd, spent_usd)
    if before_usd is not None and budget_usd > before_usd:
        # A larger budget is never refused, whatever the job is planned to cost.
        return
    to_come = tuple(
        PlannedRun(start_s=max(now_s, run.start_s), end_s=run.end_s, num_devices=run.num_devices)
        for run in platform.view().future.get(record.workload_id, ())
        if run.end_s > now_s
    )
    planned_usd = spent_usd + cost_usd(to_come, platform.usd_per_device_hour)
    if to_come and planned_usd > budget_usd:
        raise InvalidRequest(
            f"its planned cost of {money(planned_usd)} exceeds a budget of {money(budget_usd)}; name at least "
            f"${planned_usd + 0.005:.2f}, or leave it as it was"
        )


def _refuse_spent(record: JobRecord, budget_usd: float, spent_usd: float) -> None:
    if budget_usd <= spent_usd:
        raise InvalidRequest(
            f"a budget of {money(budget_usd)} is spent: {record.workload_id} has cost {money(spent_usd)} already, and "
            f"budgets count from the submission; name more, like ${_enough(2 * spent_usd)}"
        )


def _enough(usd: float) -> str:
    """The amount as a user would type it: in cents; below a cent rounded up to a few digits."""
    return above(usd) if usd < 0.01 else f"{usd:.2f}"


def _checked_on_functions(platform: PlatformLike, record: JobRecord, goal: Goal) -> float | None:
    """`check_goal` for a job on functions, which take over the new goal at their next boundary."""
    before, budget_usd = record.job.goal, goal.budget_usd
    if budget_usd is not None and budget_usd != before.budget_usd:
        _refuse_spent(record, budget_usd, record.spent.bill.total_usd)
    deadline_s = goal.deadline_s if goal.is_hard else None
    was_s = before.deadline_s if record.promise.admitted_at_s is not None else None
    is_kept = deadline_s is None or (was_s is not None and deadline_s >= was_s)
    if is_kept and _is_no_less(budget_usd, before.budget_usd):
        # A looser goal than the promised one: the promise covers it.
        return None if deadline_s is None else record.promise.promised_finish_s
    snapshot, offset_s = platform.snapshot(), platform.wall_clock_offset_s
    if not is_kept and deadline_s is not None:
        _refuse_past(deadline_s, snapshot.now_s, offset_s)
    if all(view.job.job_id != record.workload_id for view in snapshot.jobs):
        if deadline_s is not None and not is_kept:
            _refuse_paused(record)
        return None
    found = reconsider(snapshot, platform.make_policy(), record.workload_id, goal)
    if not found.refusal:
        return found.finish_s
    ways = [way for each in found.alternatives if (way := _in_words(each, snapshot.now_s + offset_s))]
    ways += [] if deadline_s is None else ["the deadline as an aim (--soft, or spec.soft: true)"]
    would = f"; what would do: {' | '.join(ways)}" if ways else ""
    raise InvalidRequest(f"{found.refusal}{would}; until then it goes on as it was")


def _in_words(alternative: str, now_unix_s: float) -> str:
    """An alternative that is a flag of the command line, in words that also fit an object; empty for any other."""
    flag, _, value = alternative.partition(" ")
    if flag == "--deadline":
        return f"a deadline at {_moment(now_unix_s + parse_duration_s(value, flag))}"
    return f"a budget of ${value}" if flag == "--budget" else ""


def _is_no_less(budget_usd: float | None, before_usd: float | None) -> bool:
    return budget_usd is None or (before_usd is not None and budget_usd >= before_usd)


def _refuse_past(deadline_s: float, now_s: float, offset_s: float) -> None:
    if deadline_s <= now_s:
        raise InvalidRequest(
            f"a deadline at {_moment(deadline_s + offset_s)} has passed; name a later one, like "
            f"{_moment(now_s + 3600.0 + offset_s)}"
        )


def _refuse_paused(record: JobRecord) -> None:
    # When it is resumed, the policy could refuse the deadline, which would end the job.
    raise InvalidRequest(
        f"{record.workload_id} is paused, and nothing is promised to a paused job: let it go on first "
        "(springtide resume ID, or spec.suspend: false), or say that the deadline is an aim (--soft, or spec.soft: "
        "true)"
    )


def _promised_s(platform: PlatformLike, record: JobRecord, goal: Goal) -> float | None:
    before, deadline_s = record.job.goal, goal.deadline_s
    if not goal.is_hard or deadline_s is None:
        return None
    snapshot = platform.snapshot()
    now_s, offset_s = snapshot.now_s, platform.wall_clock_offset_s
    _refuse_past(deadline_s, now_s, offset_s)
    was_promised = record.promise.admitted_at_s is not None
    if was_promised and before.deadline_s is not None and deadline_s >= before.deadline_s:
        # A looser goal than the promised one: the promise covers it.
        return record.promise.promised_finish_s
    if all(view.job.job_id != record.workload_id for view in snapshot.jobs):
        _refuse_paused(record)
    policy = platform.make_policy()
    found = reconsider(snapshot, policy, record.workload_id, goal)
    if not found.refusal and (found.finish_s is not None or not was_promised):
        if found.finish_s is None:
            _refuse_hopeless(snapshot, record, deadline_s, offset_s)
        return found.finish_s
    if goal.waits and not was_promised and not record.replicas:
        # It stays in line. A job with replicas would have to give them up for that.
        return None
    later_s = soonest_s(snapshot, policy, record.workload_id, goal)
    offer = "" if later_s is None else f"; {_moment(later_s + offset_s)} could be promised"
    kept = f"; the one at {_moment(before.deadline_s + offset_s)} holds" if before.deadline_s else ""
    why = found.refusal or f"{platform.view().policy} promises none"
    raise InvalidRequest(
        f"a deadline in {format_duration(deadline_s - now_s)} cannot be promised: {why}{offer}, or say that it is an "
        f"aim (--soft, or spec.soft: true){kept}"
    )


def _refuse_hopeless(snapshot: Snapshot, record: JobRecord, deadline_s: float, offset_s: float) -> None:
    """Refuse a deadline that is not promised and that even all devices would miss, at the measured speed."""
    view = next(view for view in snapshot.jobs if view.job.job_id == record.workload_id)
    if view.total_steps is None or not view.learnt.throughput_samples_per_s or record.job.batch is not None:
        return
    curve = fit_scaling(view.learnt.throughput_samples_per_s)
    most = max(1, min(view.bounds.max_workers, len(snapshot.cluster.device_ids())))
    rate = max(curve.samples_per_s(count) for count in range(1, most + 1))
    least_s = (view.total_steps - view.progress.step) * record.job.global_batch_size / rate
    if snapshot.now_s + least_s > deadline_s:
        devices = "1 device" if most == 1 else f"{most} devices"
        raise InvalidRequest(
            f"a deadline in {format_duration(deadline_s - snapshot.now_s)} cannot be met: as fast as it was measured, "
            f"what is left takes {format_duration(least_s)} even on {devices}; name one from "
            f"{_moment(snapshot.now_s + least_s + offset_s)} on, or say that it is an aim (--soft, or spec.soft: true)"
        )


def _moment(unix_s: float) -> str:
    # Up to the next whole second, so that what is offered is not a little sooner than what was found.
    return datetime.fromtimestamp(-(-unix_s // 1), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
