"""`springtide devices`: shows devices and the workloads that share them."""

from __future__ import annotations

import time

import click
import msgspec

from springtide.cli import terminal
from springtide.cli.jobs.progress import can_redraw, terminal_width
from springtide.cli.session import Session, common_options
from springtide.cli.tables.shares import devices_text
from springtide.core.status.platform import DeviceStatus
from springtide.core.status.shares import SharingStatus


class DevicesReport(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `springtide devices --json`: devices with their holders, and the state of sharing."""

    now_s: float
    devices: tuple[DeviceStatus, ...]
    sharing: SharingStatus


def _look(session: Session) -> DevicesReport:
    status = session.client.status()
    return DevicesReport(now_s=status.now_s, devices=status.devices, sharing=session.client.sharing())


@click.command()
@click.option("--watch", "is_watched", is_flag=True, help="Look again and again; Ctrl-C ends it.")
@click.option("--every", type=click.FloatRange(min=0.1), default=0.5, show_default=True, help="Seconds between looks.")
@common_options
@click.pass_obj
def devices(session: Session, is_watched: bool, every: float) -> None:
    """Show each device, the workloads on it and their shares, what is granted and used, and what is enforced."""
    if not is_watched or session.as_json or not can_redraw():
        report = _look(session)
        hint = "watch it: springtide devices --watch | as a picture: springtide dashboard"
        session.answer(report, devices_text(report.devices, report.sharing, terminal_width()), hint)
        return
    from rich.live import Live

    try:
        with Live(terminal.rich_text(""), screen=True, auto_refresh=False) as live:
            while True:
                report = _look(session)
                text = devices_text(report.devices, report.sharing, live.console.width)
                title = "springtide devices   Ctrl-C ends\n\n"
                live.update(terminal.rich_text(title + text, no_wrap=True, overflow="crop"), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:
        session.hint("the same once: springtide devices")
