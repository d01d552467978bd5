"""Jobs on functions as text for people: places, where a step's time went, what it costs, quotes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from springtide.cli.tables.columns import UNKNOWN, align, count, duration, percent, shorten
from springtide.core.functions import MIB, Bill, FunctionPlan
from springtide.core.quantities import format_duration
from springtide.core.status.functions import FunctionRunStatus, PlaceStatus, PlanChange
from springtide.core.status.platform import JobStatus
from springtide.core.status.quote import FunctionQuoteOption, PlaceQuote, Quote, Range
from springtide.core.wire.functions import LaneTimes

_BAR_WIDTH = 30
_MAX_ERROR = 200
# The signs of Fig. 6's parts (FuncPipe): what a function computes, waits for others in, and exchanges gradients in.
_PARTS = (("computation", "#"), ("flush", "."), ("synchronisation", "="))


def usd(amount: float) -> str:
    """$4.20, $0.0123, $0.00046: dollars to the cent, less than a dime with three digits that count."""
    if amount == 0 or amount >= 0.1:
        return f"${amount:,.2f}"
    if amount < 1e-6:
        return "< $0.000001"
    whole, _, digits = f"{amount:.{2 - math.floor(math.log10(amount))}f}".partition(".")
    return f"${whole}.{digits.rstrip('0').ljust(2, '0')}"


def usd_range(cost_usd: Range) -> str:
    """$0.011 .. $0.014, or a dash while it is not known."""
    if cost_usd.p10 is None or cost_usd.p90 is None:
        return UNKNOWN
    low, high = usd(cost_usd.p10), usd(cost_usd.p90)
    return low if low == high else f"{low} .. {high}"


def plan_text(plan: FunctionPlan) -> str:
    """Like 6 functions (3 stages x 2 replicas), 2048+1024+1024 MB."""
    sizes = [stage.memory_mb for stage in plan.stages]
    memory = f"{sizes[0]} MB" if len(set(sizes)) == 1 else "+".join(map(str, sizes)) + " MB"
    shape = f"{count(len(plan.stages), 'stage')} x {count(plan.num_replicas, 'replica')}"
    return f"{count(plan.num_functions, 'function')} ({shape}), {memory}"


def bill_text(bill: Bill) -> str:
    """Like functions $0.0103, requests $0.0018: the bill's items above zero."""
    items = (
        ("functions", bill.function_usd),
        ("invocations", bill.invocation_usd),
        ("object requests", bill.request_usd),
        ("storage", bill.storage_usd),
        ("parameter store", bill.parameter_store_usd),
        ("profiling", bill.profiling_usd),
        ("machines before", bill.machines_usd),
    )
    return ", ".join(f"{name} {usd(amount)}" for name, amount in items if amount > 0)


def cost_text(run: FunctionRunStatus) -> str:
    """The cost so far, the budget, and the bill's items."""
    spent = run.bill.total_usd
    told = usd(spent)
    if run.budget_usd is not None:
        told += f" of {usd(run.budget_usd)}, {usd(max(0.0, run.budget_usd - spent))} left"
    items = bill_text(run.bill)
    return f"{told}  ({items})" if items else told


def step_text(run: FunctionRunStatus) -> str:
    """1.92 s measured, 1.81 s predicted (6 % more)."""
    if run.step_s is None:
        return "" if run.predicted_step_s is None else f"{format_duration(run.predicted_step_s)} predicted"
    told = f"{format_duration(run.step_s)} measured"
    if run.predicted_step_s:
        ratio = run.step_s / run.predicted_step_s
        off = (
            f"{ratio:.1f} times as long" if ratio >= 2.0 else f"{abs(ratio - 1):.0%} {'more' if ratio >= 1 else 'less'}"
        )
        told += f", {format_duration(run.predicted_step_s)} predicted ({off})"
    return told


def incidents_text(run: FunctionRunStatus) -> str:
    """The counts of incidents of a job's functions, without those that are 0."""
    told = [
        f"{number} {what}"
        for number, what in (
            (run.num_replaced, "replaced after they died"),
            (run.num_handovers, "handed over in time"),
            (run.num_lost, "never began"),
            (run.num_throttled, "put off by the provider"),
        )
        if number
    ]
    if run.num_redone_steps:
        told.append(f"{count(run.num_redone_steps, 'step')} redone")
    # After a restart the coordinator counts only its own functions, but the bill counts all.
    invoked = max(run.num_invocations, run.usage.num_invocations)
    return ", ".join([count(invoked, "invocation"), *told])


def function_pairs(run: FunctionRunStatus, *, says_step: bool = True) -> list[tuple[str, str]]:
    """The rows of a job's details that only jobs on functions have; `says_step`: also what each step is made of."""
    plan = run.plan
    batches = f"{plan.num_micro_batches} micro-batches of {plan.micro_batch_size} samples"
    exchange = f", gradients exchanged by {plan.collective}" if plan.num_replicas > 1 else ""
    return [
        ("runs on", f"{run.service}: {plan_text(plan)}"),
        *([("each step", f"{batches} in each replica{exchange}")] if says_step else []),
        ("step time", step_text(run)),
        ("functions", incidents_text(run)),
        ("plans", changes_text(run)),
        ("cost", cost_text(run)),
    ]


def changes_text(run: FunctionRunStatus) -> str:
    """How often the plan was changed, how long the newest change took, and the change in preparation."""
    told = []
    if len(run.changes) > 1:
        last = run.changes[-1]
        told.append(f"{count(len(run.changes) - 1, 'change')}, the last after step {last.step}: {change_text(last)}")
    if run.upcoming is not None:
        ready = sum(place.phase in ("warm", "training", "parked") for place in run.joining)
        told.append(f"{ready} of {len(run.joining)} are warm for {plan_text(run.upcoming)}")
    return "; ".join(told)


def change_text(change: PlanChange) -> str:
    """standstill 0.41 s, 4 of 8 functions stayed."""
    stayed = f"{change.num_stayed} of {change.plan.num_functions} functions stayed"
    return f"standstill {format_duration(change.pause_s)}, {stayed}"


def places_table(run: FunctionRunStatus) -> str:
    """One line for each function's place."""
    rows = [
        (
            f"stage {place.stage}, replica {place.replica}",
            place.phase,
            _memory(place),
            str(place.step),
            duration(place.lifetime_left_s),
            str(place.num_handovers),
            str(place.num_replaced),
        )
        for place in run.places
    ]
    table = align(("PLACE", "PHASE", "MEMORY", "STEP", "LIFETIME LEFT", "HANDED OVER", "REPLACED"), rows)
    said = [
        f"last fault of stage {place.stage}, replica {place.replica}: {shorten(place.error, _MAX_ERROR)}"
        for place in run.places
        if place.error
    ]
    return "\n".join([table, *said])


def _memory(place: PlaceStatus) -> str:
    if not place.memory_used_bytes:
        return f"- of {place.memory_mb} MB"
    return f"{place.memory_used_bytes / MIB:.0f} of {place.memory_mb} MB"


def stage_parts(lanes: LaneTimes) -> tuple[float, float, float]:
    """The seconds of computation, flush and synchronisation in a step, as in FuncPipe's figure 6."""
    return lanes.forward_s + lanes.backward_s + lanes.update_s, lanes.flush_s, lanes.sync_s


def breakdown(places: Sequence[PlaceStatus]) -> str:
    """A bar for each stage with the parts of its newest step, as means over its replicas."""
    rows = []
    for stage, members in groupby(sorted(places, key=lambda place: place.stage), key=lambda place: place.stage):
        timed = [place.lanes for place in members if place.lanes.step_s > 0]
        if not timed:
            continue
        step_s = sum(lanes.step_s for lanes in timed) / len(timed)
        parts = [sum(part) / len(timed) for part in zip(*map(stage_parts, timed), strict=True)]
        shares = [min(1.0, part / step_s) for part in parts]
        told = "  ".join(f"{name} {percent(share)}" for (name, _), share in zip(_PARTS, shares, strict=True))
        rows.append(f"stage {stage}  {format_duration(step_s):>7}  [{_bar(shares)}]  {told}")
    return "\n".join(rows)


def _bar(shares: Sequence[float]) -> str:
    """The parts one after another; the rest of the bar is blank."""
    bar = ""
    end = 0.0
    for share, (_, sign) in zip(shares, _PARTS, strict=True):
        end += share
        bar += sign * max(0, min(_BAR_WIDTH, round(end * _BAR_WIDTH)) - len(bar))
    return bar.ljust(_BAR_WIDTH)


def function_details(run: FunctionRunStatus) -> str:
    """The function at each place and the parts of its step; empty while there are none."""
    if not run.places:
        return ""
    parts = [places_table(run)]
    bars = breakdown(run.places)
    if bars:
        signs = ", ".join(f"{sign} {name}" for name, sign in _PARTS)
        parts.append(f"where the newest step's time went ({signs})\n{bars}")
    return "\n\n" + "\n\n".join("\n".join(f"  {line}" for line in part.splitlines()) for part in parts)


def changes(last: FunctionRunStatus, run: FunctionRunStatus, *, has_search: bool = False) -> Iterator[str]:
    """Lines about what changed between two statuses of a job's functions.

    With `has_search` changes of the plan are left out, because the search reports them with its reason.
    """
    if run.plan != last.plan and has_search:
        return
    # Before the first function runs, the plan is only a recommendation.
    if run.plan != last.plan and last.places:
        yield f"runs as {plan_text(run.plan)} now, before as {plan_text(last.plan)}"
        return
    replaced = run.num_replaced - last.num_replaced
    if replaced > 0:
        known = {(place.stage, place.replica): place.num_replaced for place in last.places}
        where = [
            f"stage {place.stage}, replica {place.replica}"
            for place in run.places
            if place.num_replaced > known.get((place.stage, place.replica), 0)
        ]
        named = f" ({'; '.join(where[:3])})" if where else ""
        redone = run.num_redone_steps - last.num_redone_steps
        again = f", {count(redone, 'step')} redone" if redone > 0 else ""
        yield f"{count(replaced, 'function')} died and {'was' if replaced == 1 else 'were'} replaced{named}{again}"
    handed = run.num_handovers - last.num_handovers
    if handed > 0:
        yield f"{count(handed, 'function')} handed over to a warm successor: the lifetime was nearly over"
    throttled = run.num_throttled - last.num_throttled
    if throttled > 0:
        yield f"{run.service} put off {count(throttled, 'invocation')} (throttling)"


# --- quotes ---------------------------------------------------------------------------------------------------------


def function_options_table(options: Sequence[FunctionQuoteOption]) -> str:
    rows = [
        (
            f"{option.name} ->" if option.name == "chosen" else option.name,
            f"{option.plan.num_functions} ({len(option.plan.stages)} x {option.plan.num_replicas})",
            f"{option.plan.memory_mb} MB",
            format_duration(option.step_s),
            _times(option.finish_s),
            usd_range(option.cost_usd),
            option.verdict,
        )
        for option in options
    ]
    header = ("", "functions", "memory", "step", "finish (p10..p90)", "cost (p10..p90)", "verdict")
    return align(header, rows)


def places_lines(quote: Quote) -> list[str]:
    """One line for each place where the job could run; empty if there is only one. The quote's own reason is told."""
    if not quote.elsewhere:
        return []
    here = PlaceQuote(
        on=quote.on or "cluster",
        verdict=quote.verdict,
        reason="",
        finish_s=quote.finish_s,
        cost_usd=quote.cost_usd,
    )
    rows = [
        (place.on, place.verdict, _times(place.finish_s), usd_range(place.cost_usd), place.reason)
        for place in (here, *quote.elsewhere)
    ]
    return align(("the same job on", "", "finish (p10..p90)", "cost (p10..p90)", ""), rows).splitlines()


def _times(finish_s: Range) -> str:
    if finish_s.p10 is None or finish_s.p90 is None:
        return UNKNOWN
    return f"{format_duration(finish_s.p10)} .. {format_duration(finish_s.p90)}"


def functions_cell(job: JobStatus) -> str:
    """6 fn (3 x 2): how many functions, in what shape."""
    if job.functions is None:
        return UNKNOWN
    plan = job.functions.plan
    return f"{plan.num_functions} fn ({len(plan.stages)} x {plan.num_replicas})"
