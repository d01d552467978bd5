"""`springtide bench calibration`: the probabilities that quotes say beside how often deadlines are kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide_studies.calibration.world import DRIFT, DRIFT_FROM, Promise, promises
from springtide_studies.options import seed_option
from springtide_studies.rows import machine_facts, machine_load

# How far what is kept may be from what was said, beyond what chance makes of it (two standard deviations).
_MOST_OFF = 0.02
_AFTER_DRIFT = 0.1
_FEWEST = 30
# What cannot be known beforehand is only counted.
_FAILED = "with a failure"
_TELL_EVERY = 500


def row_of(case: str, found: Sequence[Promise]) -> dict[str, Any]:
    """How often the promises were kept, and how probable that was said to be."""
    num = len(found)
    kept, said = sum(one.is_kept for one in found) / num, sum(one.said for one in found) / num
    chance = math.sqrt(sum(one.said * (1.0 - one.said) for one in found)) / num
    return {
        "case": case,
        "ours": kept,
        "baseline": said,
        "baseline_name": f"said, {num} jobs +-{chance:.3f}",
        "ratio": None,
        "unit": "kept",
        "num": num,
        "chance": chance,
        "is_within": abs(kept - said) <= _MOST_OFF + 2.0 * chance,
    }


def rows_of(found: Sequence[Promise], num_jobs: int) -> list[dict[str, Any]]:
    """All admitted by decile of what was said; first runs; those after the drift; and by the level that was asked."""
    drift_at = DRIFT_FROM * num_jobs
    after = [one for one in found if drift_at <= one.index < drift_at + _AFTER_DRIFT * num_jobs]
    groups: list[tuple[str, Iterable[Promise]]] = [("all", found)]
    for name, part, width in (("all", found, 1), ("first runs", [o for o in found if not o.num_earlier], 2)):
        for low in range(0, 10, width):
            case = f"{name}, said {low / 10:g} to {(low + width) / 10:g}"
            groups.append((case, [one for one in part if low <= min(9.99, 10 * one.said) < low + width]))
    groups.append(("first runs", [one for one in found if not one.num_earlier]))
    for least, most in ((0.0, 0.5), (0.5, 0.9), (0.9, 1.01)):
        case = f"after a drift of {DRIFT:.0%}, said {least:g} to {min(most, 1.0):g}"
        groups.append((case, [one for one in after if least <= one.said < most]))
    groups.append((_FAILED, [one for one in found if one.num_failures]))
    groups += [(f"asked {asked:g}", [o for o in found if o.asked == asked]) for asked in (0.5, 0.8, 0.9, 0.95, 0.99)]
    return [row_of(case, list(part)) for case, part in groups if part]


def run_bench(num_jobs: int, seed: int, timer: Callable[[], float], tell: Tell) -> Report:
    """Play the world and compare."""
    load_before, begun_s = machine_load(), timer()

    def progress(index: int) -> None:
        if index % _TELL_EVERY == 0:
            tell(f"job {index:,} of {num_jobs:,}: {timer() - begun_s:.0f} s of CPU")

    found = list(promises(num_jobs, seed, progress))
    rows = rows_of(found, num_jobs)
    sure = next((row for row in rows if row["case"] == "asked 0.99"), None)
    is_kept = sure is None or sure["ours"] >= 0.99 - 2.0 * math.sqrt(0.99 * 0.01 / sure["num"])
    return {
        "bench": "calibration",
        "rows": rows,
        "passed": is_kept and all(row["is_within"] for row in rows if row["num"] >= _FEWEST and row["case"] != _FAILED),
        "criterion": f"kept within {_MOST_OFF:g} of what was said, and of what was asked at 0.99 at most 1 % "
        f"broken; both beyond two standard deviations of chance, and where there are {_FEWEST} jobs or more",
        "settings": {"jobs": num_jobs, "seed": seed, "promised": len(found), "cpu_s": timer() - begun_s},
        "machine": machine_facts(load_before),
    }


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    return run_bench(options["jobs"], options["seed"], time.process_time, tell)


BENCH = Bench(
    run=_run,
    options=[
        click.Option(["--jobs"], type=click.IntRange(min=100), default=10_000, help="Jobs that ask. [default: 10,000]"),
        seed_option(),
    ],
)
