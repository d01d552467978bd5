"""`springtide pools`: shows pools, the tide and handovers."""

from __future__ import annotations

import click

from springtide.cli.jobs.progress import terminal_width
from springtide.cli.session import Session, common_options
from springtide.cli.tables.pools import pools_text
from springtide.core.tide import MAX_DAYS


@click.command()
@click.option(
    "--days", type=click.IntRange(1, MAX_DAYS), default=1, show_default=True, help="So much of the past of the tide."
)
@common_options
@click.pass_obj
def pools(session: Session, days: int) -> None:
    """Show which server is labelled for what, the tide and its forecast, and what was loaned and reclaimed."""
    report = session.client.pools(days)
    session.answer(report, pools_text(report, terminal_width()), "as a picture: springtide dashboard")
