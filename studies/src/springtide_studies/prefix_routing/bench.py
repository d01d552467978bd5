"""`springtide bench prefixes`: a recorded trace of prompts on two modelled replicas, by prefixes and otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide_studies.options import seed_option
from springtide_studies.prefix_routing.play import RULES, Played, RoutingRule, play
from springtide_studies.prefix_routing.trace import hits_of_belady, hits_of_one_cache, read_prompts
from springtide_studies.rows import machine_facts, machine_load, ratio

# Blocks of 512 tokens in the cache of one replica; the last never fills.
CAPACITIES = (4_000, 16_000, 1 << 20)
LEAST_HITS = 0.97
MOST_SHARE = 0.6
_WEIGHTS = (0.05, 0.1, 0.2, 0.3, 1.0)
_ANSWERS = (0.0, 512.0, 2048.0)
# A cache that is believed to be so many times as large as it is.
_TOO_LARGE = 4


def row_of(case: str, played: Played, pooled: int) -> dict[str, Any]:
    """One rule on one size of cache: its hits beside those of one pooled cache, and what it did to the load."""
    p50, p99 = played.first_token_quantile_s(0.5), played.first_token_quantile_s(0.99)
    return {
        "case": f"{case}: share {played.share_of_work:.2f}, at work {played.load:.2f}, TTFT {p50:.2f} / {p99:.2f} s",
        "ours": played.num_hits / played.num_blocks,
        "baseline": pooled / played.num_blocks,
        "baseline_name": "one pooled LRU cache",
        "ratio": ratio(played.num_hits, pooled),
        "unit": "hits",
        "share_of_requests": played.share_of_requests,
        "share_of_work": played.share_of_work,
        "load": played.load,
        "ttft_p50_s": p50,
        "ttft_p99_s": p99,
    }


def run_bench(options: Mapping[str, Any], timer: Callable[[], float], tell: Tell) -> Report:
    """Play one half of the trace by each rule: the first one, on which the weights are chosen, or the second."""
    load_before, begun_s = machine_load(), timer()
    prompts = read_prompts(Path(options["trace"]))
    is_first = options["half"] == "first"
    begin = 0 if is_first else len(prompts) // 2
    prompts = prompts[: len(prompts) // 2] if is_first else prompts[begin:]
    arrived = prompts[0].timestamp
    prompts = [replace(prompt, timestamp=prompt.timestamp - arrived) for prompt in prompts]
    rows, is_passed = [], True
    for capacity in CAPACITIES:
        pooled, belady = hits_of_one_cache(prompts, 2 * capacity), hits_of_belady(prompts, 2 * capacity)
        rules: list[tuple[str, RoutingRule, int | None]] = [(name, RoutingRule(name=name), None) for name in RULES]
        rules += [("prefixes", RoutingRule(), None)]
        rules += [
            (f"prefixes, cache believed {_TOO_LARGE} times as large", RoutingRule(), _TOO_LARGE * capacity),
            ("the same, never corrected", RoutingRule(is_corrected=False), _TOO_LARGE * capacity),
        ]
        if is_first:
            rules += [
                (
                    f"prefixes, weight {weight:g}, answers {each:g}",
                    RoutingRule(wait_weight=weight, answer_tokens=each),
                    None,
                )
                for weight in _WEIGHTS
                for each in _ANSWERS
            ]
        found = {}
        for name, rule, believed in rules:
            tell(f"{capacity:,} blocks, {name}: {timer() - begun_s:.0f} s of CPU")
            found[name] = play(
                prompts,
                rule,
                capacity=capacity,
                believed=believed,
                stretch=options["stretch"],
                seed=options["seed"],
            )
            rows.append(row_of(f"{capacity:,} blocks, {name}", found[name], pooled) | {"belady_hits": belady})
        ours = found["prefixes"]
        is_passed &= (
            ours.num_hits >= LEAST_HITS * pooled
            and ours.first_token_quantile_s(0.99) < found["load"].first_token_quantile_s(0.99)
            and max(ours.share_of_requests, ours.share_of_work) <= MOST_SHARE
        )
    return {
        "bench": "prefixes",
        "rows": rows,
        "passed": is_passed,
        "criterion": f"prefixes: hits of at least {LEAST_HITS:g} of one pooled cache, TTFT p99 below load's, no "
        f"replica with more than {MOST_SHARE:.0%} of requests or work, with each size of cache",
        "settings": {**options, "prompts": len(prompts), "cpu_s": timer() - begun_s},
        "machine": machine_facts(load_before),
    }


BENCH = Bench(
    run=lambda options, tell: run_bench(options, time.process_time, tell),
    options=[
        click.Option(["--trace"], required=True, metavar="FILE", help="A trace in Mooncake's form."),
        click.Option(
            ["--half"],
            type=click.Choice(["first", "second"]),
            default="second",
            help="The half of it that is played; the first with all weights. [default: second]",
        ),
        click.Option(
            ["--stretch"],
            type=click.FloatRange(min=0.1),
            default=8.0,
            help="Times between arrivals are so many times as long, for small engines. [default: 8]",
        ),
        seed_option(),
    ],
)
