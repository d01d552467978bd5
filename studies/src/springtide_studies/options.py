"""Options that several benches have, and how their texts are read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from springtide.cli.session import refuse


def seed_option() -> click.Option:
    """--seed N."""
    return click.Option(["--seed"], type=click.IntRange(min=0), default=0, help="Where chance comes from. [default: 0]")


def seeds_option(default: int) -> click.Option:
    """--seeds N: how many worlds are drawn."""
    return click.Option(
        ["--seeds"],
        type=click.IntRange(min=1),
        metavar="N",
        default=default,
        help=f"So many worlds. [default: {default}]",
    )


def small_option(text: str) -> click.Option:
    """--small; `text` says what it leaves out."""
    return click.Option(["--small"], is_flag=True, help=text)


def only_option(what: str) -> click.Option:
    """--only A,B; `what` says of which."""
    return click.Option(["--only"], metavar="A,B", help=f"Of {what} these.")


def policies_option(text: str = "These instead of the usual ones.") -> click.Option:
    """--policies P,P."""
    return click.Option(["--policies"], metavar="P,P", help=text)


def sizes_option(what: str) -> click.Option:
    """--sizes N,N; `what` is counted."""
    return click.Option(["--sizes"], metavar="N,N", help=f"These numbers of {what}.")


def trace_options(overhead: str) -> list[click.Option]:
    """--traces, --overhead, --cache and --processes of what plays traces; `overhead` is the default of that rule."""
    return [
        click.Option(["--traces"], multiple=True, metavar="DIR", help="Where the traces are. May be repeated."),
        click.Option(
            ["--overhead"],
            metavar="RULE",
            default=overhead,
            help=f"What a change costs: elasticflow, measured, pollux or none. [default: {overhead}]",
        ),
        click.Option(["--cache"], metavar="DIR", help="Keep each result here, so that a cut-off run goes on."),
        click.Option(
            ["--processes"],
            type=click.IntRange(min=1),
            metavar="N",
            default=1,
            help="Policies at a time. [default: 1]",
        ),
    ]


def names_of(text: str | None) -> list[str]:
    """The items of a list with commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def sizes_of(text: str | None, least: int, most: int, what: str, example: str, multiple: int = 1) -> list[int]:
    """The numbers of a list with commas. Raises InvalidRequest for one that is no number of `what`."""
    sizes = names_of(text)
    for size in sizes:
        if not size.isdecimal() or not least <= int(size) <= most or int(size) % multiple:
            refuse(f"--sizes {size!r} is no number of {what}; give {example}")
    return [int(size) for size in sizes]


def folder_of(options: Mapping[str, Any], option: str) -> Path | None:
    """An option as a folder or file; None where it was not given."""
    return Path(options[option]) if options[option] else None


def trace_folders(options: Mapping[str, Any]) -> list[Path]:
    """What --traces names, or else SPRINGTIDE_TRACES. Raises InvalidRequest for a folder that is not there."""
    named: Sequence[str] = options["traces"] or [
        name for name in os.environ.get("SPRINGTIDE_TRACES", "").split(os.pathsep) if name
    ]
    missing = [name for name in named if not Path(name).is_dir()]
    if missing:
        refuse(f"there is no folder {missing[0]!r}; name one that holds traces with --traces DIR")
    return [Path(name) for name in named]
