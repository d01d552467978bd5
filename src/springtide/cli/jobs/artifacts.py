"""`springtide artifacts`: list and fetch the files that a job left."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import click

from springtide.cli.session import Session, common_options, json_option, look_up, refuse, state_option
from springtide.cli.tables.columns import UNKNOWN, align, count
from springtide.client.artifacts import fetch_artifacts
from springtide.core.quantities import format_bytes
from springtide.core.status.artifacts import ArtifactStatus
from springtide.core.status.platform import JobStatus


@click.group()
@json_option
@state_option
def artifacts() -> None:
    """What a job left: its weights, and the files that it wrote to the folder SPRINGTIDE_OUT."""


@artifacts.command("list")
@click.argument("identifier", metavar="JOB")
@common_options
@click.pass_obj
def list_command(session: Session, identifier: str) -> None:
    """List the artifacts of JOB by name; with --json also their digests."""
    job_id = _job_id(session, identifier)
    found = session.client.artifacts(job_id, with_digests=session.as_json)
    if not found:
        session.answer(found, f"{job_id} has left nothing so far; a job writes files to the folder $SPRINGTIDE_OUT")
        return
    rows = [(each.name, format_bytes(each.num_bytes), _moment(each)) for each in found]
    session.answer(found, align(("NAME", "SIZE", "WRITTEN"), rows), f"fetch them: springtide artifacts get {job_id}")


@artifacts.command("get")
@click.argument("identifier", metavar="JOB")
@click.argument("names", nargs=-1, metavar="[NAME...]")
@click.option("--to", metavar="DIR", type=Path, help="The folder that they go into. [default: the job's id]")
@click.option("--force", is_flag=True, help="Replace files that are there with another content.")
@common_options
@click.pass_obj
def get(session: Session, identifier: str, names: tuple[str, ...], to: Path | None, force: bool) -> None:
    """Fetch the artifacts of JOB, all of them or those that are named, and check their digests."""
    job_id = _job_id(session, identifier)
    folder = to or Path(job_id)
    paths = fetch_artifacts(
        session.client,
        job_id,
        folder,
        names,
        overwrites=force,
        on_fetched=lambda found: session.note(f"{found.name}  {format_bytes(found.num_bytes)}"),
    )
    session.answer([str(path) for path in paths], f"{count(len(paths), 'file')} of {job_id} in {folder}")


def _job_id(session: Session, identifier: str) -> str:
    status = session.client.status()
    found = look_up(session, status, identifier)
    if not isinstance(found, JobStatus):
        refuse(f"{found.name} is a service, and only jobs leave artifacts; `springtide ps` lists jobs")
    return found.job_id


def _moment(found: ArtifactStatus) -> str:
    if found.modified_unix_s is None:
        return UNKNOWN
    return datetime.fromtimestamp(found.modified_unix_s).strftime("%Y-%m-%d %H:%M:%S")
