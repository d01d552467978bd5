"""`springtide run`: submit a training function, a declared task or a plain script, and watch it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from springtide.cli.jobs.in_cluster import K8S, check_cluster_options, cluster_options, run_in_cluster
from springtide.cli.jobs.job_options import (
    JobRequest,
    asked_options,
    check_place,
    folder_options,
    folder_wish,
    library_warning,
    read_asked,
    takes_layers,
    with_secrets,
)
from springtide.cli.jobs.offers import alternative_text, refusal_text
from springtide.cli.jobs.profiled import check_profile, profiled_request
from springtide.cli.jobs.progress import JobWatcher, can_redraw, display, follow, follow_script
from springtide.cli.session import Session, common_options, refuse
from springtide.cli.tables.deadlines import promise_line
from springtide.cli.tables.shares import held_line
from springtide.cli.tables.statuses import final_line
from springtide.cli.tables.story import num_workers_over_time, workers_text
from springtide.client.folders.send import submit_with_folder
from springtide.client.functions import quote_job, submit_job
from springtide.client.handles import JobHandle
from springtide.core.errors import BackendError, CapacityError
from springtide.core.status.platform import JobStatus
from springtide.core.workload import JobState


@click.command(context_settings={"ignore_unknown_options": False})
@asked_options
@click.option("--detach", is_flag=True, help="Submit and return.")
@click.option(
    "--profile",
    callback=check_profile,
    metavar="FILE",
    help="What `springtide profile` wrote: its speed is known then. On functions: its profile of layers.",
)
@folder_options
@cluster_options
@common_options
@click.pass_obj
def run(session: Session, /, target: str, script_args: tuple[str, ...], profile: str | None, **options: Any) -> None:
    """Train FILE's function (or run FILE as a plain script) and watch it.

    Ctrl-C detaches; the job goes on. Exit code 1 if the job failed.
    """
    asked = with_secrets(session, read_asked(target, script_args, options))
    check_place(asked)
    if warning := library_warning(asked):
        session.note(warning)
    check_cluster_options(options, options["on"])
    folder = folder_wish(options)
    if options["on"] == K8S:
        if profile is not None:
            refuse("--profile is for a platform that is asked over REST; leave it out with --on k8s")
        where, image = options["namespace"] or "", options["image"] or ""
        run_in_cluster(session, asked, namespace=where, image=image, is_detached=options["detach"], folder=folder)
        return
    if profile is None or takes_layers(asked):
        handle = submit_job(
            asked.source,
            asked.options,
            asked.name,
            session.client,
            profile=profile,
            on_progress=session.note,
            is_declared=asked.is_declared,
            folder=folder,
        )
    else:
        request = profiled_request(session, asked, Path(profile), folder)
        submitted = submit_with_folder(session.client, request, folder, session.note)
        handle = JobHandle(session.client, submitted.job_id)
    job = handle.status()
    if job.state == JobState.REJECTED:
        tell_refusal(session, job, asked, profile if takes_layers(asked) else None)
        raise click.exceptions.Exit(1)
    if options["detach"]:
        told = (
            promise_line(job),
            held_line(job.share, job.enforced, job.devices_each).rstrip("\n"),
            job.place_reason and f"  {job.place_reason}",
        )
        session.answer(job, "\n".join([f"{job.job_id} submitted", *filter(None, told)]), _reattach(job.job_id))
        return
    if job.place_reason:
        session.note(f"{job.job_id} {job.place_reason}")
    watch(session, handle, is_script=job.is_plain_script)


def watch(session: Session, handle: JobHandle, *, is_script: bool) -> None:
    """Show the job, and what a script writes, until it ends, then how it ended. Ctrl-C detaches. Exit code 1 unless it
    succeeded."""
    live = not session.as_json and can_redraw()
    watcher = JobWatcher()
    try:
        with display(live=live, to_stderr=session.as_json) as shown:
            if is_script:
                job = follow_script(session.client, handle.id, shown, watcher=watcher)
            else:
                job = follow(session.client, handle.id, shown, watcher=watcher)
    except KeyboardInterrupt:
        session.note(f"\ndetached; {handle.id} goes on\n{_reattach(handle.id)}")
        raise click.exceptions.Exit(0) from None
    tell_end(session, job, watcher)
    if job.state != JobState.SUCCEEDED:
        raise click.exceptions.Exit(1)


def tell_end(session: Session, job: JobStatus, watcher: JobWatcher) -> None:
    """Print how the job ended."""
    if job.state == JobState.REJECTED:
        session.answer(job, refusal_text(job.reason, job.alternatives))
        return
    if job.state == JobState.SUCCEEDED:
        hint = f"look back: springtide status {job.job_id} | springtide logs {job.job_id}"
    else:
        hint = f"why: springtide why {job.job_id} | what it wrote: springtide logs {job.job_id}"
    try:
        workers = workers_text(num_workers_over_time(session.client.history(job.job_id)))
    except BackendError:
        # The platform may have been stopped meanwhile; print the end without the workers over time.
        workers = ""
    session.answer(job, final_line(job, workers, watcher.pauses_s), hint)


def tell_refusal(session: Session, job: JobStatus, asked: JobRequest, profile: str | None = None) -> None:
    """Print why the job was refused, and changes with which the platform would accept it now."""
    reason, changes, told = job.reason, job.alternatives, job.alternatives
    try:
        quote = quote_job(
            asked.source, asked.options, asked.name, session.client, profile=profile, compares=takes_layers(asked)
        )
    except (BackendError, CapacityError):
        # Without a quote, only the policy's own alternatives are printed.
        quote = None
    is_quoted = quote is not None and quote.verdict == "refused"
    if quote is not None and is_quoted:
        reason, changes = quote.reason, tuple(offer.change for offer in quote.alternatives)
        told = tuple(alternative_text(offer, quote.on) for offer in quote.alternatives)
    told_text = refusal_text(reason, told, is_quoted=is_quoted)
    session.answer(replace(job, reason=reason, alternatives=changes), told_text)


def _reattach(job_id: str) -> str:
    return (
        f"  watch it again  springtide status {job_id} -f\n"
        f"  what it writes  springtide logs {job_id} -f\n"
        f"  stop it         springtide cancel {job_id}"
    )
