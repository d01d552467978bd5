"""Commands that change running workloads: `scale`, `change`, `move`, `pause`, `resume`, `cancel`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from springtide.cli.jobs.flags import option_flags
from springtide.cli.jobs.offers import quote_text, times
from springtide.cli.session import Session, common_options, find_job, look_up
from springtide.cli.tables.columns import bounds
from springtide.cli.tables.functions import usd_range
from springtide.client.changes import as_change
from springtide.client.layer_profiles import read_layers
from springtide.core.options.jobs import JOB_OPTIONS
from springtide.core.quantities import format_duration, parse_money_usd, parse_range
from springtide.core.status.platform import JobStatus


@click.command()
@click.argument("identifier", metavar="ID")
@click.argument("size", metavar="N|MIN..MAX")
@common_options
@click.pass_obj
def scale(session: Session, identifier: str, size: str) -> None:
    """Change how many workers (of a job) or replicas (of a service) there may be, while it runs.

    The global batch stays what it is, and nothing restarts.
    """
    found = look_up(session, session.client.status(), identifier)
    if isinstance(found, JobStatus):
        minimum, maximum = parse_range(size, "workers")
        session.client.scale(found.job_id, minimum, maximum)
        job = session.client.job(found.job_id)
        allowed = "1 worker" if maximum == 1 else f"{bounds(minimum, maximum)} workers"
        text = f"{job.job_id} may have {allowed} now; it has {job.num_workers}"
        session.answer(job, text, f"watch it: springtide status {job.job_id} -f")
        return
    minimum, maximum = parse_range(size, "replicas", lowest=0)
    session.client.scale(found.service_id, minimum, maximum)
    service = session.client.service(found.name)
    ready = "1 is ready" if service.num_ready == 1 else f"{service.num_ready} are ready"
    text = f"{service.name} may have {bounds(minimum, maximum)} replicas now; {ready}"
    session.answer(service, text, f"watch it: springtide status {service.name}")


@click.command()
@click.argument("identifier", metavar="ID")
@option_flags(JOB_OPTIONS, "change")
@common_options
@click.pass_obj
def change(session: Session, /, identifier: str, **wishes: Any) -> None:
    """Change a job's deadline, budget or retries while it runs.

    A sooner deadline is promised only if it can be kept beside all others; if not, nothing changes, and you are told
    which one could be.
    """
    wish = as_change(datetime.now().astimezone(), **wishes)
    job = session.client.change(find_job(session.client.status(), identifier).job_id, wish)
    session.answer(job, f"{job.job_id} {job.state}: {_kept(job)}", f"the plan for it: springtide why {job.job_id}")


def _kept(job: JobStatus) -> str:
    """The present deadline and budget, as text."""
    told = "no deadline"
    if job.deadline_at_s is not None:
        word = "promised" if job.is_promised else "aimed at"
        told = f"deadline {format_duration(job.deadline_at_s - job.submitted_at_s)} after it was submitted, {word}"
    return told if job.budget_usd is None else f"{told}, budget ${job.budget_usd:g}"


@click.command()
@click.argument("identifier", metavar="ID")
@click.option(
    "--to", type=click.Choice(["functions"]), required=True, help="Where it goes on: the platform's function service."
)
@click.option(
    "--profile",
    type=click.Path(exists=True, dir_okay=False),
    metavar="PROFILE.json",
    help="Its layers, as `springtide profile FILE --layers` takes them; none is needed after `run --on auto`.",
)
@click.option("--quote", "is_quote", is_flag=True, help="Only say what the rest would take there; nothing is moved.")
@common_options
@click.pass_obj
def move(session: Session, identifier: str, to: str, profile: str | None, is_quote: bool) -> None:
    """Have a job on machines go on on functions, from a checkpoint: with the same samples, at the next step.

    First says when the rest would be done there and what it would cost. What was spent on machines counts in the
    budget. A job that functions cannot take over goes on on machines; one on functions does not move back.
    """
    job_id, layers = find_job(session.client.status(), identifier).job_id, read_layers(profile)
    answer = session.client.quote_move(job_id, layers)
    if is_quote:
        again = "" if profile is None else f" --profile {profile}"
        session.answer(answer, quote_text(answer), f"do it: springtide move {job_id} --to {to}{again}")
        return
    if answer.finish_s.p90 is not None:
        finish, cost = times(answer.finish_s), usd_range(answer.cost_usd)
        session.note(f"the rest of {job_id} on functions: done in {finish}, for {cost}")
    job = session.client.move(job_id, layers)
    text = f"{job.job_id} leaves its machines at step {job.step} and goes on on functions from its checkpoint"
    session.answer(job, text, f"watch it: springtide status {job.job_id} -f")


@click.command()
@click.argument("identifier", metavar="ID")
@common_options
@click.pass_obj
def pause(session: Session, identifier: str) -> None:
    """Commit a checkpoint and give the job's devices back until `resume`."""
    job = session.client.pause(find_job(session.client.status(), identifier).job_id)
    text = f"{job.job_id} is being paused at step {job.step}: it commits a checkpoint and gives its devices back"
    session.answer(job, text, f"go on later: springtide resume {job.job_id}")


@click.command()
@click.argument("identifier", metavar="ID")
@click.option("--budget", metavar="MONEY", help="What all of it may cost from now on, counted from its submission.")
@common_options
@click.pass_obj
def resume(session: Session, identifier: str, budget: str | None) -> None:
    """Let a paused job continue from its checkpoint as soon as there is a device."""
    budget_usd = None if budget is None else parse_money_usd(budget)
    job = session.client.resume(find_job(session.client.status(), identifier).job_id, budget_usd)
    text = f"{job.job_id} {job.state}: {job.reason}" if job.reason else f"{job.job_id} {job.state}"
    session.answer(job, text, f"watch it: springtide status {job.job_id} -f")


@click.command()
@click.argument("identifier", metavar="ID")
@common_options
@click.pass_obj
def cancel(session: Session, identifier: str) -> None:
    """End a job for good, or take a service away once its requests are answered."""
    found = look_up(session, session.client.status(), identifier)
    if isinstance(found, JobStatus):
        job = session.client.cancel(found.job_id)
        kept = "" if job.checkpoint_step is None else f"; its checkpoint of step {job.checkpoint_step} stays"
        session.answer(job, f"{job.job_id} {job.state}{kept}", "what is left: springtide ps")
        return
    session.client.remove_service(found.name)
    session.answer(
        found, f"{found.name} is being removed; requests under way are answered first", "what is left: springtide ps"
    )
