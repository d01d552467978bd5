"""`springtide run`: submit a training function, a declared task or a plain script, and watch it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import click

from springtide.cli.loading import find_training, import_file, split_target, uses_springtide
from springtide.cli.progress import JobWatcher, can_redraw, display, follow
from springtide.cli.session import Session, common_options, refuse
from springtide.cli.story import num_workers_over_time, workers_text
from springtide.cli.tables import final_line
from springtide.client.functions import submit_job
from springtide.client.goals import TrainKeywords, TrainOptions
from springtide.client.handles import JobHandle
from springtide.client.source import name_from, read_source
from springtide.core.errors import BackendError
from springtide.core.quantities import parse_range
from springtide.core.status import JobStatus
from springtide.core.workload import JobState


def parse_params(given: tuple[str, ...]) -> dict[str, str]:
    """`("lr=0.1",)` as a mapping. Raises InvalidRequest."""
    params = {}
    for item in given:
        key, separator, value = item.partition("=")
        if not separator or not key:
            refuse(f"--param {item!r} is not a parameter; write it like --param lr=0.1")
        params[key] = value
    return params


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("target", metavar="FILE[:FUNCTION]")
@click.argument("script_args", nargs=-1, metavar="[-- SCRIPT ARGS]")
@click.option("--deadline", metavar="TIME", help="When it must be done: 10m, 1h30m or 18:00.")
@click.option("--budget", metavar="MONEY", help="What it may cost: $4. Kept and shown; local devices have no price.")
@click.option("--workers", metavar="N|MIN..MAX|auto", help="How many workers it may have, whenever.")
@click.option("--epochs", type=click.IntRange(min=1), help="Passes over the dataset.")
@click.option("--batch", type=click.IntRange(min=1), help="The global batch size, whatever the number of workers.")
@click.option("--name", help="The job's name; its id is made from it.")
@click.option("--seed", type=click.IntRange(min=0), help="Where all chance comes from.")
@click.option("--param", "params", multiple=True, metavar="K=V", help="For the function: ctx.params[K]. Repeatable.")
@click.option("--detach", is_flag=True, help="Submit and return.")
@click.option("--best-effort", is_flag=True, help="Submit without the deadline and the budget.")
@common_options
@click.pass_obj
def run(session: Session, /, target: str, script_args: tuple[str, ...], **options: Any) -> None:
    """Train FILE's function (or run FILE as a plain script) and watch it.

    Ctrl-C detaches; the job goes on. Exit code 1 if the job failed.
    """
    path, object_name = split_target(target)
    handle = _submit(session, path, object_name, script_args, options)
    job = handle.status()
    if options["detach"] and job.state != JobState.REJECTED:
        session.answer(job, f"{job.job_id} submitted", _reattach(job.job_id))
        return
    watch(session, handle, is_script=job.kind == "script")


def _submit(
    session: Session, path: Path, object_name: str, script_args: tuple[str, ...], given: dict[str, Any]
) -> JobHandle:
    overrides = _overrides(given)
    found = find_training(import_file(path), path, object_name) if uses_springtide(path) else None
    if found is not None:
        if script_args:
            refuse(f"{path.name} has a training function, which takes no script arguments; use --param name=value")
        base = found.options
        changed = base.override(overrides)
        source, name = found.source(), found.name or name_from(found.source().object_name)
    else:
        if object_name:
            refuse(f"{path.name} has no training function {object_name!r}: it does not import springtide")
        _check_script(path, overrides)
        changed = TrainOptions(workers=1).override(overrides)
        source, name = read_source(path, "", "script", script_args), name_from(path.stem)
    if given["best_effort"]:
        changed = changed.override({"deadline": None, "budget": None})
    return submit_job(source, changed, name, session.client)


def _overrides(given: dict[str, Any]) -> TrainKeywords:
    names = {
        "deadline": "deadline",
        "budget": "budget",
        "workers": "workers",
        "epochs": "epochs",
        "batch": "global_batch",
        "name": "name",
        "seed": "seed",
    }
    overrides: dict[str, Any] = {names[key]: given[key] for key in names if given[key] is not None}
    if given["params"]:
        overrides["params"] = parse_params(given["params"])
    return cast(TrainKeywords, overrides)


def _check_script(path: Path, overrides: TrainKeywords) -> None:
    """A plain script runs under torchrun's variables with a fixed number of workers, and counts its own epochs."""
    for keyword, flag in (("epochs", "--epochs"), ("global_batch", "--batch")):
        if keyword in overrides:
            refuse(f"{path.name} is a plain script, which {flag} cannot steer; pass it on: -- {flag} N")
    workers = overrides.get("workers")
    if workers is None:
        return
    if workers == "auto" or len(set(parse_range(str(workers), "workers"))) > 1:
        refuse(f"{path.name} is a plain script and cannot be resized; give one number: --workers 2")


def watch(session: Session, handle: JobHandle, *, is_script: bool) -> None:
    """Show the job until it ends, then how it ended. Ctrl-C detaches. Exit code 1 unless it succeeded."""
    live = not session.as_json and can_redraw()
    watcher = JobWatcher()
    try:
        if is_script:
            # A script counts no steps that the platform could see: what it writes is its progress.
            for line in handle.logs(follow=True):
                session.note(line.rstrip("\n"))
            live = False
        with display(live=live, to_stderr=session.as_json) as shown:
            job = follow(session.client, handle.id, shown, watcher=watcher)
    except KeyboardInterrupt:
        session.note(f"\ndetached; {handle.id} goes on\n{_reattach(handle.id)}")
        raise click.exceptions.Exit(0) from None
    tell_end(session, job, watcher)
    if job.state != JobState.SUCCEEDED:
        raise click.exceptions.Exit(1)


def tell_end(session: Session, job: JobStatus, watcher: JobWatcher) -> None:
    """Answer with how the job ended."""
    if job.state == JobState.REJECTED:
        text = f"REFUSED {job.reason}"
        if job.alternatives:
            text += f"\n  would work: {' | '.join(job.alternatives)} | --best-effort"
        session.answer(job, text)
        return
    if job.state == JobState.SUCCEEDED:
        hint = f"look back: springtide status {job.job_id} | springtide logs {job.job_id}"
    else:
        hint = f"why: springtide why {job.job_id} | what it wrote: springtide logs {job.job_id}"
    try:
        workers = workers_text(num_workers_over_time(session.client.history(job.job_id)))
    except BackendError:
        # The platform may have been stopped since; the end is known all the same.
        workers = ""
    session.answer(job, final_line(job, workers, watcher.pauses_s), hint)


def _reattach(job_id: str) -> str:
    return (
        f"  watch it again  springtide status {job_id} -f\n"
        f"  what it writes  springtide logs {job_id} -f\n"
        f"  stop it         springtide cancel {job_id}"
    )
