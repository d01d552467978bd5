"""The evidence on a job on functions: its plan, its pace, the functions that were replaced, and its cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from springtide.control.records import JobRecord
from springtide.core.functions import FunctionMenu
from springtide.core.quantities import format_duration
from springtide.core.status.functions import FunctionRunStatus, PlaceStatus
from springtide.core.workload import JobState
from springtide.scheduling.functions.plan_text import money, words

MAX_PLACES_NAMED = 3
# From this ratio of measured to predicted step time on, the evidence says where the time goes.
_NOTABLE_RATIO = 1.25


def function_evidence(record: JobRecord, run: FunctionRunStatus, *, has_search: bool = False) -> Iterator[str]:
    """One sentence each on the job's plan, pace, losses and cost.

    With a search the menu is only what the job began with, so the plan's rank on it is left out.
    """
    menu = record.job.menu
    assert menu is not None
    yield _way(record, menu, run, has_search=has_search)
    if not record.state.is_terminal:
        yield from _pace(run)
    yield from _losses(run)
    if not record.state.is_terminal:
        yield from _absent(run.places)
    spent = f"has cost {money(run.bill.total_usd)}"
    if run.budget_usd is not None:
        left = max(0.0, run.budget_usd - run.bill.total_usd)
        spent += f" of its budget of {money(run.budget_usd)}, {money(left)} left"
    yield spent


def _way(record: JobRecord, menu: FunctionMenu, run: FunctionRunStatus, *, has_search: bool) -> str:
    verb = "would run" if record.runs_as.plan is None else "ran" if record.state.is_terminal else "runs"
    rank = next((index for index, option in enumerate(menu.options) if option.plan == run.plan), None)
    sentence = f"{verb} at {run.service} as {words(run.plan)}"
    if has_search or rank is None or len(menu.options) == 1:
        return sentence
    place = "the cheapest" if rank == 0 else "the fastest" if rank == len(menu.options) - 1 else f"number {rank + 1}"
    recommended = ", the recommended one" if rank == menu.recommended else ""
    return f"{sentence}: {place} of {len(menu.options)} ways from cheap to fast{recommended}"


def _pace(run: FunctionRunStatus) -> Iterator[str]:
    if run.step_s is None:
        return
    sentence = f"its newest step took {format_duration(run.step_s)}"
    if run.predicted_step_s:
        ratio = run.step_s / run.predicted_step_s
        sentence += f", predicted were {format_duration(run.predicted_step_s)}"
        if ratio >= _NOTABLE_RATIO:
            sentence += f" ({ratio:.1f} times as long: {_where(run)})"
    yield sentence


def _where(run: FunctionRunStatus) -> str:
    """What the slowest function spends most of its step on."""
    slowest = max(run.places, key=lambda place: place.lanes.step_s, default=None)
    if slowest is None:
        return "the reason is not known"
    lanes = slowest.lanes
    parts = {
        "computation": lanes.forward_s + lanes.backward_s + lanes.update_s,
        "waiting for the others": lanes.flush_s,
        "the exchange of gradients": lanes.sync_s,
    }
    return f"stage {slowest.stage} spends most of it on {max(parts, key=lambda name: parts[name])}"


def _losses(run: FunctionRunStatus) -> Iterator[str]:
    if run.num_replaced or run.num_lost:
        sentence = _count(
            run.num_replaced, "function was replaced after it died", "functions were replaced after they died"
        )
        if run.num_lost:
            sentence += f", {_count(run.num_lost, 'invocation')} never began"
        if run.num_redone_steps:
            sentence += f", {_count(run.num_redone_steps, 'step')} redone from saved states"
        yield sentence
    if run.num_handovers:
        yield f"{_count(run.num_handovers, 'function')} handed over to a successor before the lifetime was over"
    if run.num_throttled:
        yield (
            f"{run.service} put off {_count(run.num_throttled, 'invocation')} (throttling); a higher concurrency limit "
            "there makes that rarer"
        )


def _absent(places: Sequence[PlaceStatus]) -> Iterator[str]:
    """Places that wait for a function, each with the error that its last function reported."""
    lost = [place for place in places if place.phase in ("lost", "failed", "throttled")]
    for place in lost[:MAX_PLACES_NAMED]:
        error = f": {place.error}" if place.error else ""
        yield f"stage {place.stage}, replica {place.replica} waits for a new function{error}"
    if len(lost) > MAX_PLACES_NAMED:
        yield f"and {len(lost) - MAX_PLACES_NAMED} more places wait for a new function"


def function_next_steps(record: JobRecord, run: FunctionRunStatus) -> list[str] | None:
    """What its owner could do; None where it is the same as for any job."""
    job_id = record.workload_id
    if record.state is JobState.RUNNING:
        return [f"springtide status {job_id}", f"springtide logs {job_id} -f", f"springtide pause {job_id}"]
    if record.state is not JobState.PAUSED or run.budget_usd is None:
        return None
    if run.bill.total_usd < 0.8 * run.budget_usd:
        return None
    total = record.progress.total_steps or 0
    # The whole job at the price of the steps so far, with a fifth on top.
    whole_usd = (
        run.bill.total_usd * total / record.progress.step if record.progress.step and total else 2 * run.budget_usd
    )
    enough = max(1.2 * whole_usd, 1.2 * run.budget_usd)
    return [f"springtide resume {job_id} --budget {enough:.2g}", f"springtide cancel {job_id}"]


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
