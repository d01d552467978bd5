"""Commands that show state: `ps`, `status`, `why`, `logs`, `top`."""

from __future__ import annotations

import time

import click
from msgspec.structs import replace

from springtide.cli import terminal
from springtide.cli.jobs.progress import can_redraw, terminal_width
from springtide.cli.session import Session, common_options, find_job, look_up, workload_id
from springtide.cli.tables.pools import MAX_NODES, nodes_table, pools_line
from springtide.cli.tables.statuses import job_details, platform_summary, service_details
from springtide.cli.tables.story import explanation, num_workers_over_time, workers_text
from springtide.client.handles import JobHandle
from springtide.core.status.platform import JobStatus, PlatformStatus
from springtide.core.workload import JobState


@click.command()
@click.option("--all", "show_all", is_flag=True, help="Ended jobs too, however many.")
@common_options
@click.pass_obj
def ps(session: Session, show_all: bool) -> None:
    """List jobs and services with their state, progress and reason."""
    status = session.client.status()
    if show_all and status.num_older:
        status = replace(status, jobs=tuple(session.client.jobs()))
    hint = "why is it so: springtide why ID | watch: springtide top | Gantt: springtide dashboard"
    if not status.jobs and not status.services:
        hint = "start something: springtide run FILE | springtide deploy FILE | springtide hello"
    pools = pools_line(status.pools, status.nodes)
    summary = platform_summary(status, show_all=show_all, width=terminal_width(), pools=pools)
    session.answer(status, summary, hint)


@click.command()
@click.argument("identifier", metavar="ID")
@click.option("-f", "--follow", "is_followed", is_flag=True, help="Watch a job until it ends; Ctrl-C stops watching.")
@common_options
@click.pass_obj
def status(session: Session, identifier: str, is_followed: bool) -> None:
    """Show one job or service. ID may be its name or the beginning of its id."""
    platform = session.client.status()
    found = look_up(session, platform, identifier)
    if is_followed:
        from springtide.cli.commands.run import watch

        job = find_job(platform, identifier)
        watch(session, JobHandle(session.client, job.job_id), is_script=job.is_plain_script)
        return
    if isinstance(found, JobStatus):
        if found.on:
            # The platform's status leaves out the functions of an ended job.
            found = session.client.job(found.job_id)
        has_ended = JobState(found.state).is_terminal
        logs_hint = f"what it {'wrote' if has_ended else 'writes'}: springtide logs {found.job_id}"
        hint = f"why: springtide why {found.job_id} | {logs_hint}{'' if has_ended else ' -f'}"
        counts = num_workers_over_time(session.client.history(found.job_id))
        workers = workers_text(counts) if has_ended or len(counts) > 1 else ""
        session.answer(found, job_details(found, platform.now_s, workers), hint)
    else:
        hint = f"why: springtide why {found.name} | what it writes: springtide logs {found.name} -f"
        session.answer(found, service_details(found), hint)


@click.command()
@click.argument("identifier", metavar="ID")
@common_options
@click.pass_obj
def why(session: Session, identifier: str) -> None:
    """Explain its state: the one reason, what that rests on, and what could be done."""
    platform = session.client.status()
    answer = session.client.why(workload_id(look_up(session, platform, identifier)))
    session.answer(answer, explanation(answer, platform.wall_clock_offset_s))


@click.command()
@click.argument("identifier", metavar="ID")
@click.option("-f", "--follow", is_flag=True, help="Go on until it ends; Ctrl-C stops only the printing.")
@click.option("--replica", metavar="R", help="Only this replica.")
@click.option("--tail", type=click.IntRange(min=0), default=200, show_default=True, help="The last lines of each.")
@click.option("--raw", is_flag=True, help="Escape sequences as they were written; they reach the terminal.")
@common_options
@click.pass_obj
def logs(session: Session, identifier: str, follow: bool, replica: str | None, tail: int, raw: bool) -> None:
    """Print what its workers wrote, each line with the replica that wrote it."""
    found = look_up(session, session.client.status(), identifier)
    lines = session.client.logs(workload_id(found), replica=replica, tail=tail, follow=follow)
    if session.as_json:
        session.print_json({"workload_id": workload_id(found), "lines": list(lines)})
        return
    is_empty = True
    try:
        for line in lines:
            (terminal.write_raw if raw else terminal.write)(line.rstrip("\n"))
            is_empty = False
    except KeyboardInterrupt:
        session.hint(f"{found.name} goes on. stop it: springtide cancel {workload_id(found)}")
        return
    if is_empty:
        terminal.write(f"{workload_id(found)} has written nothing", err=True, dim=True)
    if isinstance(found, JobStatus) and follow:
        ended = session.client.job(found.job_id)
        session.hint(f"{ended.job_id} {ended.state}: {ended.reason}")
        if JobState(ended.state).is_terminal and ended.state != JobState.SUCCEEDED:
            raise click.exceptions.Exit(1)


def _everything(status: PlatformStatus, width: int | None) -> str:
    """The text of `top`: pools and their servers, if any, jobs and services."""
    pools = pools_line(status.pools, status.nodes)
    if pools:
        nodes = [node for node in status.nodes if node.num_devices]
        pools += "\n\n" + nodes_table(nodes, status.now_s, most=MAX_NODES, width=width)
    return platform_summary(status, width=width, pools=pools)


@click.command()
@click.option("--every", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds between looks.")
@common_options
@click.pass_obj
def top(session: Session, every: float) -> None:
    """Watch devices, jobs and services; Ctrl-C ends it. Off a terminal it prints once."""
    if session.as_json or not can_redraw():
        status = session.client.status()
        session.answer(status, _everything(status, terminal_width()))
        return
    from rich.live import Live

    try:
        with Live(terminal.rich_text(""), screen=True, auto_refresh=False) as live:
            while True:
                platform = session.client.status()
                title = f"springtide top   {platform.version}   step {platform.seq} of the journal   Ctrl-C ends\n\n"
                table = _everything(platform, live.console.width)
                live.update(terminal.rich_text(title + table, no_wrap=True, overflow="crop"), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:
        session.hint("the same once: springtide ps | Gantt: springtide dashboard")
