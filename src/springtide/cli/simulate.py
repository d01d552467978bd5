"""`springtide simulate`: what policies would do with a trace of jobs, side by side."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from springtide.cli.session import Session, refuse, state_option
from springtide.cli.tables import align, duration, number, percent

_SHOWN: tuple[tuple[str, str], ...] = (
    ("deadlines_met", "DEADLINES MET"),
    ("deadline_satisfactory_ratio", "SATISFIED"),
    ("declined", "DECLINED"),
    ("admitted_and_broken", "BROKEN"),
    ("jct_mean_s", "MEAN TIME"),
    ("jct_p95_s", "P95 TIME"),
    ("queueing_mean_s", "MEAN WAIT"),
    ("makespan_s", "ALL DONE"),
    ("cluster_efficiency", "EFFICIENCY"),
    ("utilisation", "USE"),
    ("resizes", "RESIZES"),
    ("decision_ms_p99", "DECISION P99 MS"),
    ("cpu_s", "CPU"),
)


@click.command()
@click.option("--trace", required=True, metavar="generated:N|FILE", help="The jobs that arrive.")
@click.option("--cluster", required=True, metavar="NODESxDEVICES", help="What they share: 16x8.")
@click.option("--policy", required=True, metavar="P[,P..]", help="See `springtide policies`.")
@click.option(
    "--overhead",
    type=click.Choice(("elasticflow", "measured", "none")),
    default="elasticflow",
    show_default=True,
    help="What a start, resize or move costs, the same for every policy.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Where all chance comes from.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Only the first N jobs of the trace.")
@click.option("--profiles", type=click.Path(path_type=Path), metavar="DIR", help="The scaling tables. [default: near]")
@click.option(
    "--error", type=click.FloatRange(0.0, 10.0), default=0.0, metavar="F", help="Spread of true speeds, such as 0.2."
)
@click.option("--mtbf", type=float, metavar="HOURS", help="Mean time between failures of a node. [default: none fail]")
@click.option("--repair", type=float, default=1.0, show_default=True, metavar="HOURS", help="Mean time of its repair.")
@click.option(
    "--placement/--no-placement", default=True, help="Whether scattered groups are slower. [default: they are]"
)
@click.option("--processes", type=click.IntRange(min=1), metavar="N", help="Policies at a time. [default: all cores]")
@click.option("--json", "output", metavar="OUT|-", help="Write the answer there as JSON; - is standard output.")
@click.option("--html", "report", type=click.Path(path_type=Path), metavar="REPORT", help="Write a report with charts.")
@click.option("--series", is_flag=True, help="Put the curves of the report into the JSON too.")
@state_option
@click.pass_obj
def simulate(
    session: Session,
    trace: str,
    cluster: str,
    policy: str,
    overhead: str,
    seed: int,
    jobs: int | None,
    profiles: Path | None,
    error: float,
    mtbf: float | None,
    repair: float,
    placement: bool,
    processes: int | None,
    output: str | None,
    report: Path | None,
    series: bool,
) -> None:
    """Ask the same scheduler that runs the platform what it would do with a trace of jobs."""
    from springtide.sim.figures import simulate as play

    names = list(dict.fromkeys(name.strip() for name in policy.split(",") if name.strip()))
    if not trace.startswith("generated:") and not Path(trace).is_file():
        refuse(f"there is no trace {trace!r}; give a file or generated:200")
    for place in (output if output != "-" else None, report):
        if place is not None and not Path(place).absolute().parent.is_dir():
            refuse(f"{place} cannot be written: there is no folder {Path(place).parent}")
    answer = play(
        trace,
        cluster,
        names,
        overhead=overhead,
        seed=seed,
        limit=jobs,
        profiles=profiles,
        error_fraction=error,
        mtbf_hours=mtbf,
        repair_hours=repair,
        feels_placement=placement,
        strict=False,
        timer=time.process_time,
        with_series=series or report is not None,
    )
    if report is not None:
        from springtide.sim.report import write_report

        write_report(report, answer, command=click.get_current_context().command_path)
    _print(session, answer, output, series)


def _print(session: Session, answer: dict[str, Any], output: str | None, series: bool) -> None:
    if not series:
        for figures in answer["policies"].values():
            figures.pop("series", None)
    encoded = msgspec.json.format(msgspec.json.encode(answer), indent=2) + b"\n"
    if output == "-":
        click.echo(encoded.decode(), nl=False)
        return
    if output is not None:
        Path(output).write_bytes(encoded)
    click.echo(_comparison(answer["policies"]))
    session.hint(f"all numbers: {output}" if output else "all numbers: --json OUT (or --json -)")


def _comparison(found: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [name, str(row.get("jobs", "-")), *[_cell(key, row.get(key)) for key, _ in _SHOWN]]
        for name, row in found.items()
    ]
    return align(("POLICY", "JOBS", *[title for _, title in _SHOWN]), rows)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key.endswith("_s"):
        return duration(value)
    if key in ("utilisation", "deadline_satisfactory_ratio", "cluster_efficiency"):
        return percent(value)
    return number(value) if isinstance(value, float) else str(value)


def num_cores() -> int:
    """How many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
