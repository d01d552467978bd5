"""`springtide versions` and `springtide rollback`: the revisions of a service."""

from __future__ import annotations

from typing import Any

import click

from springtide.cli.jobs.releases import (
    release_asked,
    release_options,
    released_problem,
    wait_released,
    with_room_asked,
)
from springtide.cli.session import Session, common_options
from springtide.cli.tables.columns import align
from springtide.core.quantities import format_duration
from springtide.core.status.revisions import RevisionStatus


@click.command()
@click.argument("name")
@common_options
@click.pass_obj
def versions(session: Session, name: str) -> None:
    """List the revisions of a service: which answer, which did or were given up, and why."""
    revisions, now_s = session.client.service(name).revisions, session.client.status().now_s
    session.answer(revisions, revisions_table(revisions, now_s), f"go back to one: springtide rollback {name} --to N")


@click.command()
@click.argument("name")
@click.option("--to", "revision", type=click.IntRange(min=1), metavar="N", help="Left out: the one replaced last.")
@release_options
@common_options
@click.pass_obj
def rollback(session: Session, /, name: str, revision: int | None, **options: Any) -> None:
    """Give up what is being released; else bring an earlier revision back, which starts beside the present one."""
    release = release_asked(options)
    service = with_room_asked(session, release, lambda how: session.client.roll_back(name, revision, how))
    wanted = service.releasing or service.revision
    waited = wait_released(session, service.name, wanted)
    service = session.client.service(name) if waited is None else waited
    problem = released_problem(service, wanted)
    if problem:
        session.answer(service, problem, f"what it wrote: springtide logs {service.name}")
        raise click.exceptions.Exit(1)
    session.answer(service, f"{service.name}: revision {wanted} answers", f"all: springtide versions {service.name}")


def revisions_table(revisions: tuple[RevisionStatus, ...], now_s: float) -> str:
    """One line for each revision, the newest first."""
    rows = [
        (
            str(each.revision),
            each.state,
            f"{each.weight:.0%}" if each.weight else "-",
            f"{each.num_ready}/{each.num_replicas}" if each.num_replicas else "-",
            f"{format_duration(max(0.0, now_s - each.began_at_s))} ago",
            each.source,
            each.reason,
        )
        for each in reversed(revisions)
    ]
    return align(("REVISION", "STATE", "REQUESTS", "READY", "DEPLOYED", "FILE", "REASON"), rows)
