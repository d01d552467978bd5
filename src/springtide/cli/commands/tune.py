"""`springtide tune`: runs a study of a file's task and shows its trials as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import click

from springtide.cli import terminal
from springtide.cli.jobs.flags import given_keywords, option_flags
from springtide.cli.jobs.progress import can_redraw
from springtide.cli.loading import as_typed, find_training, import_file, split_target
from springtide.cli.session import Session, common_options, refuse
from springtide.cli.tables.columns import UNKNOWN, align, count, number, percent, shorten
from springtide.cli.tables.functions import usd
from springtide.client.functions import Task
from springtide.client.studies import Direction, Study, Trial
from springtide.client.tuning import Metric
from springtide.client.tuning import tune as run_study
from springtide.core.options.jobs import JOB_OPTIONS
from springtide.core.options.rules import ONLY_DECLARED

_MAX_ROWS = 20


@click.command()
@click.argument("target", metavar="FILE[:TASK]")
@click.option("--trials", type=click.IntRange(min=1), required=True, help="How many jobs to try.")
@click.option("--budget", metavar="MONEY", required=True, help="What all of them may cost together: $4.")
@click.option("--parallel", type=click.IntRange(min=1), default=1, show_default=True, help="Jobs at a time.")
@click.option(
    "--metric", default="loss", show_default=True, help="loss, cost, or a function of FILE of a job's status."
)
@click.option("--direction", type=click.Choice(get_args(Direction)), default="minimize", show_default=True)
@click.option("--study", default="", help="The study's name; another call with it goes on.  [default: the task's name]")
@click.option("--prune/--no-prune", default=None, help="End trials worse than the median.  [default: for the loss]")
@option_flags(JOB_OPTIONS, "tune")
@common_options
@click.pass_obj
def tune(session: Session, /, target: str, **options: Any) -> None:
    """Search over jobs on functions: trials of FILE's task with the parameters that its search_space(trial) suggests.

    All trials together cost at most the budget. Ctrl-C detaches; the same command goes on.
    """
    path, object_name = split_target(target)
    module = import_file(path)
    task = find_training(module, path, object_name)
    if not isinstance(task, Task):
        refuse(f"{path.name} declares no task to try: {ONLY_DECLARED}")
    metric = _metric_of(module, path, options["metric"])
    live = not session.as_json and can_redraw()
    try:
        with shown_study(live=live, note=session.note) as show:
            study = run_study(
                task,
                trials=options["trials"],
                budget=options["budget"],
                parallel=options["parallel"],
                direction=options["direction"],
                metric=metric,
                study=options["study"],
                prunes=options["prune"],
                client=session.client,
                folder=session.state_dir / "studies",
                on_change=show,
                on_progress=session.note,
                **given_keywords(JOB_OPTIONS, "tune", options),
            )
    except KeyboardInterrupt:
        session.note("\ndetached; trials that run go on, and the same command takes them up")
        raise click.exceptions.Exit(0) from None
    session.answer(_answer(study) if session.as_json else study, study_text(study), _hint(study, path))
    if study.best is None:
        raise click.exceptions.Exit(1)


def _answer(study: Study) -> dict[str, Any]:
    """The study as JSON values, with totals of its trials."""
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(study)
    best = None if study.best is None else study.best.number
    return {**fields, "spent_usd": study.spent_usd, "best_trial": best}


def _metric_of(module: ModuleType, path: Path, name: str) -> str | Metric:
    """The function of this name in the file, or else the name as a metric that the job reports."""
    found = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    if not name.isidentifier():
        refuse(f"--metric {name!r} is no metric; use loss, cost, or the name of a function in {path.name}")
    return name


@contextmanager
def shown_study(*, live: bool, note: Callable[[str], None]) -> Iterator[Callable[[Study], None]]:
    """A function that shows a changing study: a table on a terminal, else a line for each trial that begins or ends."""
    if not live:
        yield _Lines(note).show
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    with Live(terminal.rich_text(""), console=console, refresh_per_second=4, transient=True) as shown:
        yield lambda study: shown.update(
            terminal.rich_text(study_table(study, console.width), no_wrap=True, overflow="ellipsis")
        )


class _Lines:
    """Prints a line for each trial that begins or ends."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._states: dict[int, str] = {}

    def show(self, study: Study) -> None:
        for trial in study.trials:
            if trial.state != "begun" and self._states.get(trial.number) != trial.state:
                self._states[trial.number] = trial.state
                self._note(trial_line(trial, study))


def trial_line(trial: Trial, study: Study) -> str:
    """A line about a trial that has just begun or ended."""
    params = _params_text(trial)
    if trial.state == "running":
        return f"trial {trial.number}  {params}  runs as {trial.job_id}, may cost {usd(trial.cap_usd)}"
    value = f"{study.metric} {number(trial.value)}" if trial.value is not None else shorten(trial.reason, 100)
    return f"trial {trial.number}  {params}  {trial.state}  {value}  {usd(trial.spent_usd)}"


def study_table(study: Study, width: int | None = None) -> str:
    """The newest trials, one line each, and the remaining budget."""
    best = study.best
    rows = [
        (
            f"{trial.number}{' *' if best is not None and trial.number == best.number else ''}",
            trial.state,
            percent(trial.progress_fraction),
            number(trial.value if trial.value is not None else (trial.losses[-1] if trial.losses else None)),
            usd(trial.spent_usd),
            usd(trial.cap_usd),
            _params_text(trial),
            shorten(trial.reason) if trial.state in ("pruned", "failed") else "",
        )
        for trial in study.trials[-_MAX_ROWS:]
    ]
    header = ("TRIAL", "STATE", "PROGRESS", study.metric.upper(), "COST", "CAP", "PARAMETERS", "")
    num_over = sum(trial.is_over for trial in study.trials)
    foot = (
        f"{num_over} of {study.num_trials} trials are over; {usd(study.spent_usd)} of {usd(study.budget_usd)} spent"
        f"{'' if best is None else f'; best {study.metric} {number(best.value)} (trial {best.number})'}"
    )
    return f"{align(header, rows, width)}\n{foot}"


def study_text(study: Study) -> str:
    best = study.best
    if best is None:
        told = "no trial has come through"
    else:
        told = f"best {study.metric} {number(best.value)}: trial {best.number}, {_params_text(best)}"
        told += f"\n  its model  {best.artifact_path}" if best.artifact_path else ""
    states = [trial.state for trial in study.trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("succeeded", "pruned", "failed"))
    return (
        f"{study_table(study)}\n{study.name}: {study.reason}\n  {told}\n"
        f"  {count(len(study.trials), 'trial')}: {counts}; {usd(study.spent_usd)} of {usd(study.budget_usd)} spent"
    )


def _params_text(trial: Trial) -> str:
    return " ".join(f"{name}={_value_text(value)}" for name, value in trial.params.items()) or UNKNOWN


def _value_text(value: str) -> str:
    """A parameter's value with few digits; integers and text unchanged."""
    try:
        return number(float(value), 3) if "." in value or "e" in value else value
    except ValueError:
        return shorten(value, 20)


def _hint(study: Study, path: Path) -> str:
    if study.best is None:
        newest = next((trial.job_id for trial in reversed(study.trials) if trial.job_id), "")
        return f"why a trial ended: springtide why {newest}" if newest else ""
    more = f"springtide tune {as_typed(path)} --trials {2 * study.num_trials} --budget {2 * study.budget_usd:g}"
    return f"go on: {more} --study {study.name}"
