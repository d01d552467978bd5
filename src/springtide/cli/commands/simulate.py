"""`springtide simulate`: runs policies on a trace of jobs and compares the results."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from springtide.cli import terminal
from springtide.cli.jobs.progress import can_redraw
from springtide.cli.session import Session, complain, refuse, state_option
from springtide.cli.tables.columns import align, duration, number, percent
from springtide.core.plugins import load_from_studies, offered

PLAIN_LINE_S = 10.0
# The studies that springtide-studies registers in this entry point group.
STUDIES = ("loaning", "dilu-packing", "dilu-coscaling", "dilu-collocation")
_GROUP = "springtide.studies"
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


@dataclass(frozen=True, kw_only=True)
class SimulatedStudy:
    """One of `STUDIES`: its own options, and the function that runs it and prints the answer.

    `run` gets the session, all options of the command by name, and a context manager that yields a progress function.
    """

    run: Callable[[Session, Mapping[str, Any], AbstractContextManager[Any]], None]
    options: Sequence[click.Option] = ()


class _SimulateCommand(click.Command):
    """Adds the options of installed studies."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        of_studies = {option.name: option for study in _installed_studies().values() for option in study.options}
        return [*super().get_params(ctx), *of_studies.values()]


def _installed_studies() -> dict[str, SimulatedStudy]:
    return {name: _load_study(name) for name in STUDIES if name in offered(_GROUP)}


def _load_study(name: str) -> SimulatedStudy:
    study: SimulatedStudy = load_from_studies(_GROUP, name, f"study {name}")
    return study


@click.command(cls=_SimulateCommand)
@click.option("--trace", metavar="generated:N|FILE", help="The jobs that arrive.")
@click.option("--cluster", metavar="NODESxDEVICES", help="What they share: 16x8, or 8x4:V100,4x8:T4.")
@click.option("--from-live", is_flag=True, help="Play the running platform forward instead of a trace.")
@click.option("--policy", metavar="P[,P..]", help="See `springtide policies`. With --study: these of its rows.")
@click.option(
    "--study",
    type=click.Choice(STUDIES),
    help="loaning: servers lent between inference and training; dilu-...: shared devices. Of springtide[studies].",
)
@click.option(
    "--overhead",
    type=click.Choice(("elasticflow", "measured", "pollux", "none")),
    default="elasticflow",
    show_default=True,
    help="What a start, resize or move costs, the same for every policy.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Where all chance comes from.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Only the first N jobs of the trace.")
@click.option("--profiles", type=click.Path(path_type=Path), metavar="DIR", help="The scaling tables. [default: near]")
@click.option("--format", "format_", default="auto", show_default=True, metavar="NAME", help="The format of the trace.")
@click.option("--draw", is_flag=True, help="Draw what the trace does not tell from the scaling tables and the seed.")
@click.option(
    "--error", type=click.FloatRange(0.0, 10.0), default=0.0, metavar="F", help="Spread of true speeds, such as 0.2."
)
@click.option("--mtbf", type=float, metavar="HOURS", help="Mean time between failures of a node. [default: none fail]")
@click.option("--repair", type=float, default=1.0, show_default=True, metavar="HOURS", help="Mean time of its repair.")
@click.option(
    "--placement/--no-placement", default=True, help="Whether scattered groups are slower. [default: they are]"
)
@click.option(
    "--adaptive", is_flag=True, help="Policies choose batch sizes too, of Pollux's jobs. Of springtide[studies]."
)
@click.option("--processes", type=click.IntRange(min=1), metavar="N", help="Policies at a time. [default: all cores]")
@click.option("--json", "output", metavar="OUT|-", help="Write the answer there as JSON; - is standard output.")
@click.option("--html", "report", type=click.Path(path_type=Path), metavar="REPORT", help="Write a report with charts.")
@click.option("--series", is_flag=True, help="Put the curves of the report into the JSON too.")
@state_option
@click.pass_obj
def simulate(session: Session, /, **options: Any) -> None:
    """Ask the same scheduler that runs the platform what it would do with a trace of jobs."""
    names = list(dict.fromkeys(name.strip() for name in (options["policy"] or "").split(",") if name.strip()))
    _check_places(options)
    if options["study"]:
        # A study's runs are not known in advance; they appear as they are run.
        _load_study(options["study"]).run(session, options, shown_progress((), live=_is_live()))
        return
    for name, study in _installed_studies().items():
        for option in study.options:
            if options[str(option.name)]:
                refuse(f"{option.opts[0]} belongs to a study; add --study {name}")
    if options["policy"] is None:
        refuse("name the policies: --policy springtide,fifo; `springtide policies` lists them")
    if options["from_live"]:
        from springtide.cli.commands.simulate_live import play_live

        play_live(session, names, options["output"])
        return
    _play(session, names, options)


def _check_places(options: Mapping[str, Any]) -> None:
    for place in (options["output"] if options["output"] != "-" else None, options["report"]):
        if place is not None and not Path(place).absolute().parent.is_dir():
            refuse(f"{place} cannot be written: there is no folder {Path(place).parent}")
        if place is not None and Path(place).is_dir():
            refuse(f"{place} cannot be written: it is a folder; name a file in it")


def _play(session: Session, names: Sequence[str], options: Mapping[str, Any]) -> None:
    """Simulate the trace under each policy, and print the comparison."""
    trace, cluster, report = options["trace"], options["cluster"], options["report"]
    if trace is None or cluster is None:
        refuse("name the jobs and what they share: --trace FILE --cluster 16x8, or --from-live for what runs now")
    from springtide.simulator.simulate import simulate as play

    if not trace.startswith("generated:") and not Path(trace).is_file():
        refuse(f"there is no trace {trace!r}; give a file or generated:200")
    with shown_progress(names, live=_is_live()) as on_progress:
        answer = play(
            trace,
            cluster,
            names,
            overhead=options["overhead"],
            seed=options["seed"],
            limit=options["jobs"],
            profiles=options["profiles"],
            format=options["format_"],
            draws=options["draw"],
            error_fraction=options["error"],
            mtbf_hours=options["mtbf"],
            repair_hours=options["repair"],
            feels_placement=options["placement"],
            adaptive=options["adaptive"],
            strict=False,
            timer=time.process_time,
            on_progress=on_progress,
            with_series=options["series"] or report is not None,
            num_processes=min(options["processes"] or num_cores(), len(names)),
        )
    if report is not None:
        from springtide.simulator.report.report import write_report

        write_report(report, answer, command=shlex.join(["springtide", *sys.argv[1:]]))
    _print(session, answer, options["output"], options["series"])
    _warn(answer)


def _print(session: Session, answer: dict[str, Any], output: str | None, series: bool) -> None:
    if not series:
        for figures in answer["policies"].values():
            figures.pop("series", None)
    terminal.write_answer(answer, _comparison(answer["policies"]), output, session.hint)


def _warn(answer: Mapping[str, Any]) -> None:
    """Print failures after the numbers; exit with 1 if a policy failed."""
    is_as_predicted = "error_fraction" not in answer
    for name, figures in answer["policies"].items():
        broken = figures["admitted_and_broken"] if figures["promised"] and is_as_predicted else 0
        if broken:
            complain(
                f"{name} broke {broken} of its {figures['promised']} promises though everything was as predicted, "
                f"the worst by {figures['latest_s']:.0f} s"
            )
    errors: Mapping[str, str] = answer.get("errors", {})
    for name, sentence in errors.items():
        complain(f"{name} failed: {sentence}")
    if errors:
        raise click.exceptions.Exit(1)


@contextmanager
def shown_progress(names: Sequence[str], *, live: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A function that shows each policy's progress: as bars on a terminal, else as occasional lines."""
    if not live:
        yield PlainProgress(lambda line: terminal.write(line, err=True)).tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {name: bars.add_task(name, total=None) for name in names}

        def tell(name: str, num_ended: int, num_jobs: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=None)
            bars.update(tasks[name], completed=num_ended, total=num_jobs)

        yield tell


class PlainProgress:
    """A line for each policy every ten seconds; short runs print nothing."""

    def __init__(self, write: Callable[[str], None], monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._monotonic_s = monotonic_s
        self._began_s = monotonic_s()
        self._due_s: dict[str, float] = {}

    def tell(self, name: str, num_ended: int, num_jobs: int) -> None:
        """Report how many jobs have ended under a policy."""
        now_s = self._monotonic_s()
        if now_s >= self._due_s.setdefault(name, self._began_s + PLAIN_LINE_S):
            self._due_s[name] = now_s + PLAIN_LINE_S
            self._write(f"{name}: {num_ended} of {num_jobs} jobs have ended")


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


def _is_live() -> bool:
    return sys.stderr.isatty() and can_redraw()


def num_cores() -> int:
    """The number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
