"""`springtide bench smlt`: work that changes while it runs (SMLT, sections 5.5 and 5.6), beside allocations that stay:
batches that grow, data that arrives for a day, models of changing size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide.core.errors import InvalidRequest
from springtide_studies.goals.smlt_parts import (
    PartResult,
    play_growing,
    play_nas,
    play_online,
    play_shrinking,
)
from springtide_studies.options import names_of, only_option, seed_option, seeds_option
from springtide_studies.rows import machine_facts, machine_load, markdown_table, ratio

NUM_SEEDS = 5
PARTS: Mapping[str, Callable[[int], PartResult]] = MappingProxyType(
    {
        "batching": play_growing,
        "batching-shrinking": play_shrinking,
        "online": play_online,
        "nas": play_nas,
    }
)
PUBLISHED: Mapping[str, str] = MappingProxyType(
    {
        "batching": "over 30 % less cost than LambdaML with a fixed allocation; profiling far cheaper than MLCD's",
        "batching-shrinking": "nothing of its own",
        "online": "IaaS and MLCD pay for idle machines; serverless ways do not (24 hours)",
        "nas": "3 times less cost than LambdaML with the allocation of the first model",
    }
)
# Ours over this one is what has to stay below the bound; for the rest no source says what to expect.
MEASURED_BY: Mapping[str, str] = MappingProxyType(
    {
        "batching": "fixed allocation",
        "batching-shrinking": "fixed allocation",
        "online": "fixed allocation, always on",
        "nas": "fixed allocation",
    }
)
OURS = "Springtide"

Row = dict[str, Any]


def run_bench(
    *,
    num_seeds: int = NUM_SEEDS,
    first_seed: int = 0,
    only: Sequence[str] = (),
    timer: Callable[[], float],
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Each part over seeds `first_seed` and on: mean costs and times, and the first seed's course as series.

    `passed` if every part costs at most what the fixed allocation does and nothing of the work was left undone. Raises
    InvalidRequest for a part that there is not.
    """
    for part in only:
        if part not in PARTS:
            raise InvalidRequest(f"there is no part {part!r}; choose of {', '.join(PARTS)}")
    load_before, began_s = machine_load(), timer()
    seeds = range(first_seed, first_seed + num_seeds)
    rows: list[Row] = []
    series: dict[str, Any] = {}
    for part in only or PARTS:
        tell(f"{part}, seeds {seeds[0]} to {seeds[-1]} ...")
        results = [PARTS[part](seed) for seed in seeds]
        rows += _rows(part, results)
        series[part] = results[0].series
    bounded = [row for row in rows if row["bound"] is not None]
    return {
        "bench": "smlt",
        "rows": rows,
        "series": series,
        "published": dict(PUBLISHED),
        "seeds": [seeds[0], seeds[-1]],
        "criterion": "ours costs no more than the allocation that stays (online: never rests), and all work is done",
        "passed": bool(bounded)
        and all(row["is_done"] and (row["ratio"] or math.inf) <= row["bound"] for row in bounded),
        "machine": {**machine_facts(load_before), "cpu_s": round(timer() - began_s, 1)},
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _rows(part: str, results: Sequence[PartResult]) -> list[Row]:
    rows: list[Row] = []
    ours_usd = _mean([result.ours.usd for result in results])
    ours_s = _mean([result.ours.took_s for result in results])
    for name in results[0].others:
        theirs_usd = _mean([result.others[name].usd for result in results])
        theirs_s = _mean([result.others[name].took_s for result in results])
        is_measure = name == MEASURED_BY.get(part)
        rows.append(
            {
                "case": f"{part}: cost",
                "ours": ours_usd,
                "baseline": theirs_usd,
                "baseline_name": name,
                "ratio": ratio(ours_usd, theirs_usd),
                "bound": 1.0 if is_measure else None,
                "unit": "usd",
                "is_done": all(result.is_done for result in results),
                "ours_profiling_usd": _mean([result.ours.profiled_usd for result in results]),
                "profiling_usd": _mean([result.others[name].profiled_usd for result in results]),
                "ours_s": ours_s,
                "baseline_s": theirs_s,
                "time_ratio": ratio(ours_s, theirs_s),
                "cost_ratios": [round(result.ours.usd / result.others[name].usd, 4) for result in results],
                "time_ratios": [round(result.ours.took_s / result.others[name].took_s, 4) for result in results],
                "num_changes": _mean([float(result.num_changes) for result in results]),
                "num_deaths": sum(result.num_deaths for result in results),
            }
        )
    return rows


def markdown(report: Mapping[str, Any]) -> str:
    """Every part as a table, under what the paper says of it."""
    parts: dict[str, list[Row]] = {}
    for row in report["rows"]:
        parts.setdefault(row["case"].partition(":")[0], []).append(row)
    texts = []
    for part, rows in parts.items():
        table = markdown_table(
            ("beside", "ours $", "theirs $", "cost ratio", "ours s", "theirs s", "time ratio", "their profiling $"),
            [
                (
                    row["baseline_name"],
                    f"{row['ours']:.4g}",
                    f"{row['baseline']:.4g}",
                    f"{row['ratio']:.3f}",
                    f"{row['ours_s']:.0f}",
                    f"{row['baseline_s']:.0f}",
                    f"{row['time_ratio']:.3f}",
                    f"{row['profiling_usd']:.3g}",
                )
                for row in rows
            ],
        )
        texts.append(f"## {part}\n\nPublished: {report['published'][part]}.\n\n{table}")
    return "\n\n".join(texts)


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    return run_bench(
        num_seeds=options["seeds"],
        first_seed=options["seed"],
        only=names_of(options["only"]),
        timer=time.process_time,
        tell=tell,
    )


def _write_page(path: Path, report: Report) -> None:
    from springtide_studies.goals.smlt_page import write_smlt

    write_smlt(path, report)


BENCH = Bench(
    run=_run,
    options=[only_option(", ".join(PARTS)), seeds_option(NUM_SEEDS), seed_option()],
    markdown=markdown,
    write_page=_write_page,
)
