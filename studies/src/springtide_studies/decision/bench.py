"""`springtide bench decision`: how long a policy takes to decide at one event, as the cluster and its jobs grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import msgspec
import numpy as np

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide.scheduling.registry import make_policy
from springtide_studies.decision.crowd import DeadlineCrowd
from springtide_studies.decision.everything import CASES
from springtide_studies.decision.goodput import GoodputCrowd, is_goodput_policy, rows_of
from springtide_studies.decision.kinds import kinds_markdown, measure_cases, mixed_rows
from springtide_studies.decision.platform import DEVICES_PER_NODE, BenchPlatform, Crowd
from springtide_studies.options import names_of, policies_option, seed_option, sizes_of, sizes_option
from springtide_studies.rows import machine_facts, machine_load, markdown_table, ratio

SIZES: tuple[int, ...] = (64, 512, 1024, 2048, 4096, 8192)
# At the largest size 2,000 jobs live; smaller clusters have as many for each device.
DEVICES_PER_JOB = 8192 / 2000
BOUND_MS = 100.0
_MOST_DEVICES = 1 << 20
NUM_EVENTS = 500
# The case of jobs with profiles alone; those of `everything.CASES` have everything on.
PLAIN = "plain"
OURS, OTHERS = "springtide", ("elasticflow", "edf")


class DecisionTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy took on one size. An instant is a moment at which a job arrived or ended, or a plan changed;
    its time is the sum over every decision of that moment, echoes included. `turn` is that of the whole control loop.
    `quiet` are the moments at which a policy only looked. Milliseconds of CPU.
    """

    policy: str
    num_devices: int
    num_jobs_mean: float
    num_instants: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    turn_p99_ms: float
    quiet_p50_ms: float | None
    quiet_max_ms: float | None
    warm_up_s: float


def measure(
    policy: str, num_devices: int, *, seed: int, timer: Callable[[], float], num_events: int = NUM_EVENTS
) -> DecisionTimes:
    """Warm a cluster of `num_devices` up and time the policy over `num_events` further arrivals and endings.

    `timer` counts seconds, best of CPU: what else runs on the machine is then no part of the answer.
    """
    crowd: Crowd = (
        GoodputCrowd(num_devices, seed)
        if is_goodput_policy(policy)
        else DeadlineCrowd(num_devices, max(1, round(num_devices / DEVICES_PER_JOB)), seed)
    )
    platform = BenchPlatform(make_policy(policy), crowd, timer)
    began_s = timer()
    platform.warm_up()
    warm_up_s, warm_events = timer() - began_s, platform.num_events
    spent: list[tuple[float, float, int]] = []
    quiet_s: list[float] = []
    at_s, decided_s, turned_s, is_news = platform.now_s, 0.0, 0.0, False
    while platform.num_events - warm_events < num_events and not platform.is_over:
        num_live = platform.num_live
        decide_s, turn_s, is_change = platform.step(platform.wait())
        if platform.now_s > at_s:
            # The instant is over: the times of all its turns add up to one sample.
            if is_news:
                spent.append((decided_s * 1000.0, turned_s * 1000.0, num_live))
            elif turned_s:
                quiet_s.append(decided_s)
            at_s, decided_s, turned_s, is_news = platform.now_s, 0.0, 0.0, False
        decided_s, turned_s, is_news = decided_s + decide_s, turned_s + turn_s, is_news or is_change
    decided_ms, turned_ms, live = np.array(spent or [(0.0, 0.0, 0)]).T
    return DecisionTimes(
        policy=policy,
        num_devices=num_devices,
        num_jobs_mean=float(live.mean()),
        num_instants=len(spent),
        p50_ms=float(np.percentile(decided_ms, 50)),
        p90_ms=float(np.percentile(decided_ms, 90)),
        p99_ms=float(np.percentile(decided_ms, 99)),
        max_ms=float(decided_ms.max()),
        turn_p99_ms=float(np.percentile(turned_ms, 99)),
        quiet_p50_ms=float(np.percentile(quiet_s, 50)) * 1000.0 if quiet_s else None,
        quiet_max_ms=max(quiet_s) * 1000.0 if quiet_s else None,
        warm_up_s=warm_up_s,
    )


def run_bench(
    policies: Sequence[str] | None = None,
    *,
    cases: Sequence[str] = (PLAIN,),
    sizes: Sequence[int] = SIZES,
    seed: int = 0,
    num_events: int = NUM_EVENTS,
    timer: Callable[[], float],
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure every policy, and the default one in every case, on every size; return the report of `springtide bench`.

    `PLAIN` among the cases is that of jobs with profiles alone, for all policies. Each row sets the first policy beside
    another one; `bound` stands where the aim stands, at the largest size. `tell` is given a line after each
    measurement. Raises InvalidRequest for a policy or case that is not known.
    """
    names = tuple(policies or (OURS, *OTHERS)) if PLAIN in cases else ()
    for name in names:
        make_policy(name)
    load_before = machine_load()
    measured: dict[tuple[str, int], DecisionTimes] = {}
    for num_devices in sizes:
        for name in names:
            found = measured[name, num_devices] = measure(
                name, num_devices, seed=seed, timer=timer, num_events=num_events
            )
            tell(
                f"{name} on {num_devices} devices, {found.num_jobs_mean:.0f} jobs: p50 {found.p50_ms:.2f} ms, "
                f"p99 {found.p99_ms:.2f} ms, max {found.max_ms:.2f} ms over {found.num_instants} instants"
            )
    by_goodput = [name for name in names if is_goodput_policy(name)]
    ours, *others = [name for name in names if name not in by_goodput] or [""]
    rows: list[dict[str, Any]] = [
        {
            "case": f"{num_devices} devices, {measured[ours, num_devices].num_jobs_mean:.0f} jobs: {ours} p99",
            "ours": measured[ours, num_devices].p99_ms,
            "baseline": measured[other, num_devices].p99_ms,
            "baseline_name": f"{other} p99",
            "ratio": ratio(measured[ours, num_devices].p99_ms, measured[other, num_devices].p99_ms),
            "bound": BOUND_MS if num_devices == max(SIZES) else None,
            "unit": "ms CPU",
        }
        for num_devices in sizes
        for other in others or (ours,)
        if ours
    ]
    of_goodput: list[dict[str, Any]] = []
    for name in by_goodput:
        of_goodput += rows_of(name, {size: msgspec.to_builtins(measured[name, size]) for size in sizes})
    mixed_cases = [case for case in cases if case != PLAIN]
    mixed = measure_cases(mixed_cases, sizes, seed=seed, timer=timer, num_events=num_events, tell=tell)
    with_all = mixed_rows(mixed, max(SIZES), BOUND_MS)
    largest = [measured[ours, num_devices] for num_devices in sizes if ours and num_devices == max(SIZES)]
    return {
        "bench": "decision",
        "machine": machine_facts(load_before) | {"seed": seed, "events": num_events},
        "rows": rows + of_goodput + with_all,
        "criterion": (
            f"{ours or OURS} decides within {BOUND_MS:.0f} ms of CPU at p99 on {max(SIZES):,} devices with about "
            f"{max(SIZES) / DEVICES_PER_JOB:,.0f} jobs, and with everything on"
            if ours or mixed
            else "goodput jobs: p90 within 50 ms of CPU on 128 devices, p99 within 1 s on 8,192"
        ),
        "passed": bool(largest or by_goodput or any(row["bound"] for row in with_all))
        and all(found.p99_ms <= BOUND_MS for found in largest)
        and all(row["bound"] is None or row["ours"] <= row["bound"] for row in with_all + of_goodput),
        "table": [msgspec.to_builtins(found) for found in measured.values()],
        "mixed": [msgspec.to_builtins(found) for found in mixed],
    }


def markdown(report: Mapping[str, Any]) -> str:
    """The growth table of a report and those by kind of event, for a page of results."""
    header = ("policy", "devices", "jobs", "instants", "p50 ms", "p90 ms", "p99 ms", "max ms", "turn p99 ms")
    rows = sorted(report["table"], key=lambda row: (row["policy"] != OURS, row["policy"], row["num_devices"]))
    growth = markdown_table(
        header,
        [
            (
                row["policy"],
                f"{row['num_devices']:,}",
                f"{row['num_jobs_mean']:,.0f}",
                str(row["num_instants"]),
                *(f"{row[key]:.3g}" for key in ("p50_ms", "p90_ms", "p99_ms", "max_ms", "turn_p99_ms")),
            )
            for row in rows
        ],
    )
    tables = ([growth] if rows else []) + ([kinds_markdown(report["mixed"])] if report["mixed"] else [])
    return "\n\n".join(tables)


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    example = f"multiples of {DEVICES_PER_NODE}, as 64,512"
    sizes = sizes_of(options["sizes"], DEVICES_PER_NODE, _MOST_DEVICES, "devices", example, DEVICES_PER_NODE)
    return run_bench(
        names_of(options["policies"]) or None,
        cases=names_of(options["cases"]) or (PLAIN, *CASES),
        sizes=sizes or SIZES,
        seed=options["seed"],
        num_events=options["events"],
        timer=time.process_time,
        tell=tell,
    )


BENCH = Bench(
    run=_run,
    options=[
        policies_option(),
        click.Option(
            ["--cases"],
            metavar="C,C",
            help=f"Of {PLAIN} (profiled jobs) and {', '.join(CASES)} (everything on) these. [default: all]",
        ),
        sizes_option("devices"),
        click.Option(
            ["--events"],
            type=click.IntRange(min=1),
            default=NUM_EVENTS,
            help=f"So many arrivals and endings. [default: {NUM_EVENTS}]",
        ),
        seed_option(),
    ],
    markdown=markdown,
)
