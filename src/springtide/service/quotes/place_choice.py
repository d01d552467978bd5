"""One quote for two places: the same job on the platform's machines and on functions, and which one `auto` takes. Pure.

The rule of `--on auto` is `_choice`; docs/functions.md tells it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import MappingProxyType

from msgspec.structs import replace

from springtide.core.errors import InvalidRequest
from springtide.core.options.jobs import Where
from springtide.core.quantities import format_duration
from springtide.core.status.quote import Alternative, PlaceQuote, Quote
from springtide.scheduling.functions.plan_text import money

# What a place says: its quote, or why the job cannot run there at all.
Answer = Quote | InvalidRequest
_NAMES = MappingProxyType({"cluster": "machines", "functions": "functions"})


def answer_of(ask: Callable[[], Quote]) -> Answer:
    """The quote that `ask` returns, or the InvalidRequest that it raises."""
    try:
        return ask()
    except InvalidRequest as error:
        return error


def with_other_place(quote: Quote, other: Answer, place: Where) -> Quote:
    """Add to a quote what would happen to the same job on `place`; the job may be impossible there."""
    if isinstance(other, InvalidRequest):
        return replace(quote, elsewhere=(PlaceQuote(on=place, verdict="refused", reason=str(other)),))
    line = PlaceQuote(
        on=place, verdict=other.verdict, reason=other.reason, finish_s=other.finish_s, cost_usd=other.cost_usd
    )
    quote = replace(quote, elsewhere=(line,))
    if quote.verdict == "refused" and other.verdict == "accepted":
        offer = Alternative(change=f"--on {place}", finish_s=other.finish_s, cost_usd=other.cost_usd)
        quote = replace(quote, alternatives=(*quote.alternatives, offer))
    return replace(quote, bill=other.bill, function_options=other.function_options) if other.on else quote


def choose_place(machines: Answer, functions: Answer) -> Quote:
    """The quote of the place that `auto` takes: its `place_reason` says why, `elsewhere` holds the other one.

    Raises InvalidRequest if the job can run on neither.
    """
    if isinstance(functions, InvalidRequest):
        if isinstance(machines, InvalidRequest):
            raise machines
        place, why = "cluster", f"functions were not considered: {functions}"
    elif isinstance(machines, InvalidRequest):
        place, why = "functions", f"machines cannot run it: {machines}"
    else:
        place, why = _choice(machines, functions)
    quotes: dict[str, Answer] = {"cluster": machines, "functions": functions}
    other: Where = "functions" if place == "cluster" else "cluster"
    chosen, left = quotes[place], quotes[other]
    assert isinstance(chosen, Quote)
    found = replace(with_other_place(chosen, left, other), place_reason=f"on {_NAMES[place]}: {why}")
    if found.verdict == "accepted" or isinstance(left, InvalidRequest):
        return found
    reason = f"on machines: {chosen.reason}; on functions: {left.reason}"
    return replace(found, reason=reason, alternatives=(*_offers(chosen, "cluster"), *_offers(left, "functions")))


def _choice(machines: Quote, functions: Quote) -> tuple[Where, str]:
    """The place for a job that both could run, and why. Machines come first where nothing speaks for functions."""
    if functions.verdict == "refused":
        if machines.verdict == "accepted":
            return "cluster", f"functions refuse it: {functions.reason}"
        offers = " | ".join(offer.change for offer in _offers(functions, "functions"))
        return "cluster", f"neither place makes it; on functions {functions.reason}; would work there: {offers}"
    if machines.verdict == "refused":
        return "functions", f"machines refuse it: {machines.reason}"
    if machines.deadline_s is None and machines.budget_usd is None:
        starts_s, done_s = machines.start_s, functions.finish_s.p90
        if starts_s is None or done_s is None or starts_s < done_s:
            return "cluster", "it has neither deadline nor budget"
        begins, ends = format_duration(starts_s), format_duration(done_s)
        return "functions", f"they are done in {ends}, and machines would only begin in {begins}"
    both = f"{_figures(machines)} on machines, {_figures(functions)} on functions"
    match _makes_goal(machines), _makes_goal(functions):
        case True, True if _most_usd(machines) <= _most_usd(functions):
            return "cluster", f"they make its goal at no higher price: {both}"
        case True, True:
            return "functions", f"both make its goal, functions for less: {both}"
        case True, False:
            return "cluster", f"they make its goal, and functions may not: {both}"
        case False, True:
            return "functions", f"they make its goal, and machines may not: {both}"
    if (machines.finish_s.p90 or math.inf) <= (functions.finish_s.p90 or math.inf):
        return "cluster", f"neither place is sure to make its goal: {both}"
    return "functions", f"neither place is sure to make its goal, and functions end earlier: {both}"


def _makes_goal(quote: Quote) -> bool:
    """Whether an accepted job is promised its deadline or expected to keep it, at a known price within its budget."""
    finish_s, deadline_s = quote.finish_s.p90, quote.deadline_s
    is_in_time = deadline_s is None or quote.is_promised or (finish_s is not None and finish_s <= deadline_s)
    return is_in_time and (quote.budget_usd is None or _most_usd(quote) <= quote.budget_usd)


def _most_usd(quote: Quote) -> float:
    return math.inf if quote.cost_usd.p90 is None else quote.cost_usd.p90


def _figures(quote: Quote) -> str:
    """Like 23.3 s and $0.0046 at most; where nothing is known of the job's speed, so."""
    if quote.finish_s.p90 is None or quote.cost_usd.p90 is None:
        return "an unknown time"
    return f"{format_duration(quote.finish_s.p90)} and {money(quote.cost_usd.p90)} at most"


def _offers(quote: Quote, place: Where) -> Iterable[Alternative]:
    """A place's counter-offers, with the place."""
    for offer in quote.alternatives:
        if not offer.change.startswith("--on"):
            yield replace(offer, change=f"--on {place} {offer.change}", options={"on": place, **offer.options})
