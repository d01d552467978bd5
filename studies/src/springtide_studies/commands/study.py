"""`springtide simulate --study`: lent servers, or devices that workloads share; a table, or JSON."""

from __future__ import annotations

import importlib
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from springtide.cli import terminal
from springtide.cli.commands.simulate import SimulatedStudy, num_cores
from springtide.cli.session import Session, complain, refuse
from springtide.cli.tables.columns import UNKNOWN, align, duration, number, percent
from springtide_studies.options import names_of, small_option

_LOANING_OPTIONS = ("n_r_max", "days", "training", "ablations")
# What belongs to a trace, hence not to a study, which brings its own jobs, tide and costs.
_NOT_FOR_STUDIES = ("trace", "from_live", "jobs", "profiles", "draw", "error", "mtbf", "adaptive", "series")
# Each is a module of its own, with `run_study` and `study_text`.
_SHARING_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "dilu-packing": "springtide_studies.dilu.packing",
        "dilu-coscaling": "springtide_studies.dilu.coscaling",
        "dilu-collocation": "springtide_studies.dilu.collocation",
    }
)
SHARING_STUDIES = tuple(_SHARING_MODULES)
_NOT_FOR_SHARING = (*_LOANING_OPTIONS, *_NOT_FOR_STUDIES, "cluster", "policy", "processes", "report")
_SHOWN: tuple[tuple[str, str], ...] = (
    ("queueing_mean_s", "MEAN WAIT"),
    ("jct_mean_s", "MEAN TIME"),
    ("utilisation", "USE"),
    ("training_utilisation", "TRAINING USE"),
    ("minimums_broken", "BROKEN"),
    ("need_missed_fraction", "NEED MISSED"),
    ("reclaims", "RECLAIMS"),
    ("reclaims_interrupting", "INTERRUPTING"),
    ("reclaim_p95_s", "RECLAIM P95"),
    ("reclaim_cost_device_s", "COST GPU S"),
    ("loaned_servers_mean", "LOANED"),
    ("preemptions", "STOPPED"),
    ("cpu_s", "CPU"),
)
_PERCENT = frozenset(("utilisation", "training_utilisation", "need_missed_fraction"))


def run_loaning(session: Session, options: Mapping[str, Any], shown_progress: AbstractContextManager[Any]) -> None:
    """Play the study and answer. `policy` names the rows that are wanted (none: all). Exit code 1 if a row failed."""
    for option in ("data", "small"):
        if options[option]:
            refuse(f"--{option} belongs to a study of shared devices; add --study {SHARING_STUDIES[0]} or another")
    for option in _NOT_FOR_STUDIES:
        if options[option]:
            refuse(f"--study brings its own jobs and tide; leave --{_flag(option)} out")
    from springtide_studies.loans import study as loaning

    with shown_progress as on_progress:
        answer = loaning.study_loaning(
            n_r_max=loaning.parse_sizes(options["n_r_max"]) if options["n_r_max"] else loaning.N_R_MAX,
            days=options["days"] or loaning.DAYS,
            seed=options["seed"],
            training=options["training"] or "fifo",
            cluster=options["cluster"] or loaning.CLUSTER,
            ablations=options["ablations"],
            only=list(dict.fromkeys(names_of(options["policy"]))),
            num_processes=options["processes"] or num_cores(),
            timer=time.process_time,
            on_progress=on_progress,
        )
    if options["report"] is not None:
        from springtide.simulator.report.report import write_report

        write_report(options["report"], answer, command=shlex.join(["springtide", *sys.argv[1:]]))
    terminal.write_answer(answer, study_text(answer), options["output"], session.hint)
    _warn(answer)


def run_sharing_study(
    session: Session, options: Mapping[str, Any], shown_progress: AbstractContextManager[Any]
) -> None:
    """Play one of `SHARING_STUDIES` and answer."""
    for option in _NOT_FOR_SHARING:
        if options[option]:
            refuse(f"--study {options['study']} takes --data, --small and --seed; leave --{_flag(option)} out")
    data = options["data"]
    if data is not None and not data.is_dir():
        refuse(f"there is no folder {str(data)!r}; name the one that holds workload/, profiles/ and traces/")
    study = importlib.import_module(_SHARING_MODULES[options["study"]])
    with shown_progress as on_progress:
        answer: dict[str, Any] = study.run_study(
            data=data, seed=options["seed"], is_small=options["small"], on_progress=on_progress
        )
    terminal.write_answer(answer, study.study_text(answer), options["output"], session.hint)


def _flag(option: str) -> str:
    return {"report": "html"}.get(option, option).replace("_", "-")


def _warn(answer: Mapping[str, Any]) -> None:
    for name, figures in answer["policies"].items():
        if figures.get("minimums_broken"):
            complain(f"{name} broke {figures['minimums_broken']} guaranteed minimums of {figures['minimums']}")
    errors: Mapping[str, str] = answer.get("errors", {})
    for name, sentence in errors.items():
        complain(f"{name} failed: {sentence}")
    if errors:
        raise click.exceptions.Exit(1)


def study_text(answer: Mapping[str, Any]) -> str:
    """Every strategy at every size of the inference pool, and ours against the baselines beside the paper."""
    sizes = list(dict.fromkeys(size for figures in answer["policies"].values() for size in figures["n_r_max"]))
    rows = [
        [size, name, *[_cell(key, figures["n_r_max"][size].get(key)) for key, _ in _SHOWN]]
        for size in sizes
        for name, figures in answer["policies"].items()
        if size in figures["n_r_max"]
    ]
    tables = [align(("N_R MAX", "POLICY", *[title for _, title in _SHOWN]), rows)]
    compared = _ratio_rows(answer["ratios"])
    if compared:
        tables.append(align(("FIGURE", "OURS", "AGAINST", *[f"N={size}" for size in sizes], "PAPER"), compared))
    return "\n\n".join(tables)


def _ratio_rows(ratios: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for figure, (least, most) in ratios["paper"].items():
        paper = f"x{least:.2f} to x{most:.2f}"
        for ours, baselines in ratios[figure].items():
            for baseline, by_size in baselines.items():
                cells = [UNKNOWN if ratio is None else f"x{ratio:.2f}" for ratio in by_size.values()]
                rows.append([figure, ours, baseline, *cells, paper])
    return rows


def _cell(key: str, value: Any) -> str:
    if value is None:
        return UNKNOWN
    if key in _PERCENT:
        return percent(value)
    if key.endswith("device_s"):
        return f"{value:.0f}"
    if key.endswith("_s"):
        return duration(value)
    return number(value) if isinstance(value, float) else str(value)


LOANING = SimulatedStudy(
    run=run_loaning,
    options=[
        click.Option(
            ["--n-r-max"], metavar="N,N", help="loaning: servers that inference needs at most. [default: 2,4,6,8]"
        ),
        click.Option(
            ["--days"], type=click.IntRange(min=1), metavar="N", help="loaning: days of the tide. [default: 3]"
        ),
        click.Option(
            ["--training"], metavar="P", help="loaning: the policy that schedules training jobs. [default: fifo]"
        ),
        click.Option(["--ablations"], is_flag=True, help="loaning: our strategy without one of its parts, too."),
    ],
)
SHARING = SimulatedStudy(
    run=run_sharing_study,
    options=[
        click.Option(
            ["--data"],
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="dilu-...: the published workloads.",
        ),
        small_option("dilu-...: a part of it, in seconds."),
    ],
)
