"""Quotes and refusals as text: the table of options, the verdict, and what would work instead. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from springtide.cli.tables.columns import UNKNOWN, align
from springtide.cli.tables.functions import bill_text, function_options_table, places_lines, usd
from springtide.cli.tables.search import search_quote_text
from springtide.cli.tables.shares import held_line
from springtide.core.quantities import format_duration
from springtide.core.status.quote import Alternative, CountedOn, Quote, QuoteOption, Range

BEST_EFFORT = "--best-effort"
MAX_STRETCHES = 4


def times(finish_s: Range) -> str:
    """Like 7m40 .. 8m30; a dash if unknown."""
    if finish_s.p10 is None or finish_s.p90 is None:
        return UNKNOWN
    return f"{format_duration(finish_s.p10)} .. {format_duration(finish_s.p90)}"


def dollars(cost_usd: Range) -> str:
    """The upper end (p90) of the range; amounts below a cent as "< $0.01"."""
    if cost_usd.p90 is None:
        return UNKNOWN
    return "< $0.01" if 0 < cost_usd.p90 < 0.01 else f"${cost_usd.p90:.2f}"


def options_table(options: Sequence[QuoteOption]) -> str:
    rows = [
        (
            f"{option.name} ->" if option.name == "chosen" else option.name,
            str(option.workers),
            UNKNOWN if option.batch_per_worker is None else str(option.batch_per_worker),
            times(option.finish_s),
            dollars(option.cost_usd),
            option.verdict,
        )
        for option in options
    ]
    return align(("", "workers", "batch/worker", "finish (p10..p90)", "cost", "verdict"), rows)


def alternative_text(offer: Alternative, on: str = "") -> str:
    """Like --epochs 3 (2m40, $0.02): the change, and its effect if known.

    `on` is the function service that it is for; amounts then have fractions of a cent.
    """
    told = [] if offer.finish_s.p90 is None else [format_duration(offer.finish_s.p90)]
    if offer.cost_usd.p90:
        is_of_functions = "--on functions" in offer.change or (on and "--on" not in offer.change)
        told.append(usd(offer.cost_usd.p90) if is_of_functions else dollars(offer.cost_usd))
    return f"{offer.change} ({', '.join(told)})" if told else offer.change


def refusal_text(reason: str, alternatives: Sequence[str], *, is_quoted: bool = False) -> str:
    """REFUSED, the reason, and what would be accepted. Without a quote, which knows whether the job could run without
    its deadline (`is_quoted`), that is offered, too."""
    offers = list(alternatives)
    if not is_quoted and not any(BEST_EFFORT in offer for offer in offers):
        offers.append(BEST_EFFORT)
    return f"REFUSED {reason}\n  would work: {' | '.join(offers)}" if offers else f"REFUSED {reason}"


def quote_text(quote: Quote) -> str:
    parts = [options_table(quote.options)] if quote.options else []
    if quote.on and quote.function_options:
        parts = [function_options_table(quote.function_options)]
    if quote.verdict == "refused":
        offers = [alternative_text(offer, quote.on) for offer in quote.alternatives]
        parts.append(refusal_text(quote.reason, offers, is_quoted=True))
    else:
        parts.append(f"ACCEPTED {quote.reason}")
        parts += [f"  {quote.place_reason}"] if quote.place_reason else []
    parts += [f"  because {line}" for line in quote.evidence]
    if quote.share is not None:
        parts.append(held_line(quote.share, quote.enforced, quote.devices_each).rstrip("\n"))
    if quote.search is not None and quote.verdict == "accepted":
        parts.append(f"  the search: {search_quote_text(quote.search)}")
    if quote.on and quote.bill is not None:
        parts.append(f"  the bill: {usd(quote.bill.total_usd)} expected: {bill_text(quote.bill)}")
    parts += places_lines(quote)
    if quote.minimum_share is not None:
        parts.append(f"  minimum share: {quote.minimum_share} from now on")
    if len(quote.schedule) > 1 or (quote.schedule and quote.schedule[0].start_s > 1.0):
        runs = [
            f"{run.num_devices} from {format_duration(run.start_s)}" if run.start_s else f"{run.num_devices} from now"
            for run in quote.schedule[:6]
        ]
        parts.append("  workers over time: " + ", ".join(runs) + (", ..." if len(quote.schedule) > 6 else ""))
    if quote.counts_on:
        parts.append(f"  promises count on: {counted_on_text(quote.counts_on)}")
    return "\n".join(parts)


def counted_on_text(stretches: Sequence[CountedOn]) -> str:
    """Like 6 devices (2 on loan) for 1h30, then 4 devices: the devices that can be counted on over time."""
    told = []
    for stretch in stretches[:MAX_STRETCHES]:
        devices = "1 device" if stretch.num_devices == 1 else f"{stretch.num_devices} devices"
        loaned = f" ({stretch.num_loaned} on loan)" if stretch.num_loaned else ""
        until = "" if stretch.until_s is None else f" until {format_duration(stretch.until_s)} from now"
        told.append(f"{devices}{loaned}{until}")
    return ", then ".join(told) + (", ..." if len(stretches) > MAX_STRETCHES else "")
