"""`springtide data`: named datasets in the platform's store, complete or growing by appends until closed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import click

from springtide.cli import terminal
from springtide.cli.session import Session, common_options, json_option, state_option
from springtide.cli.tables.columns import UNKNOWN, align, count, number

if TYPE_CHECKING:
    from springtide.storage.datasets.manifest import DatasetArray, DatasetStatus

_TELL_S = 1.0
_UNITS = ("B", "KB", "MB", "GB", "TB")
_shard_size = click.option(
    "--shard-size", metavar="SIZE", help="How much of the samples lies in one object, like 64MB. [default: 32 MiB]"
)


@click.group()
@json_option
@state_option
def data() -> None:
    """Datasets in the platform's store, by name: for st.dataset(NAME) and st.stream(NAME) in a task."""


@data.command()
@click.argument("name")
@click.argument("source")
@_shard_size
@common_options
@click.pass_obj
def put(session: Session, name: str, source: str, shard_size: str | None) -> None:
    """Put SOURCE as the whole dataset NAME; the same content again changes nothing.

    SOURCE is arrays.npz, array.npy, arrays.safetensors, or FILE.py:FACTORY, a function that returns named arrays (a
    dict, or a tuple x, y) or yields pieces of them.
    """
    status = _send(session, name, "put", source, shard_size)
    session.answer(status, _sentence(status), f"train on it: st.Task(..., dataset=st.dataset({name!r}))")


@data.command()
@click.argument("name")
@click.argument("source")
@_shard_size
@common_options
@click.pass_obj
def append(session: Session, name: str, source: str, shard_size: str | None) -> None:
    """Add SOURCE to the growing dataset NAME, which the first append makes.

    SOURCE is as in `springtide data put`; each piece that a factory yields is an append of its own.
    """
    status = _send(session, name, "append", source, shard_size)
    session.answer(status, _sentence(status), f"train on it as it grows: st.Task(..., dataset=st.stream({name!r}))")


@data.command()
@click.argument("name")
@common_options
@click.pass_obj
def close(session: Session, name: str) -> None:
    """Say that the growing dataset NAME has all its samples: jobs train on the rest and finish."""
    from springtide.client.datasets import close_dataset

    status = close_dataset(name, client=session.client)
    session.answer(status, _sentence(status))


@data.command()
@common_options
@click.pass_obj
def ls(session: Session) -> None:
    """List the datasets."""
    from springtide.client.datasets import datasets

    found = datasets(client=session.client)
    if not found:
        session.answer(found, "no datasets", "put one: springtide data put NAME FILE.npz")
        return
    rows = [
        (each.name, each.kind, f"{each.num_samples:,}", size(each.num_bytes), str(each.num_shards), _arrays(each))
        for each in found
    ]
    session.answer(found, align(("NAME", "KIND", "SAMPLES", "SIZE", "SHARDS", "ARRAYS"), rows))


@data.command()
@click.argument("name")
@common_options
@click.pass_obj
def rm(session: Session, name: str) -> None:
    """Take the dataset NAME and all its shards away."""
    from springtide.client.datasets import remove_dataset

    remove_dataset(name, client=session.client)
    session.answer({"removed": name}, f"{name} is gone")


@data.command()
@click.argument("name")
@common_options
@click.pass_obj
def show(session: Session, name: str) -> None:
    """Show one dataset."""
    from springtide.client.datasets import show_dataset

    status = show_dataset(name, client=session.client)
    changed = datetime.fromtimestamp(status.changed_at_unix_s).isoformat(" ", "seconds")
    rate = f"{number(status.arrivals_per_s)} samples/s" if status.arrivals_per_s else UNKNOWN
    lines = [
        _sentence(status),
        *(f"  {array.name:<10} {array.dtype}{_shape(array)}" for array in status.arrays),
        f"  version    {status.version}, changed {changed}",
        *([f"  arriving   {rate}"] if status.kind == "growing" else []),
        f"  digest     {status.digest}",
    ]
    session.answer(status, "\n".join(lines))


def _send(
    session: Session, name: str, verb: Literal["put", "append"], source: str, shard_size: str | None
) -> DatasetStatus:
    from springtide.cli.commands.data_sources import pieces_of
    from springtide.client.datasets import send_pieces, shard_bytes_of

    shard_bytes = shard_bytes_of(shard_size)
    pieces: Iterator[dict[str, Any]] = pieces_of(source)
    progress = _Progress()
    try:
        return send_pieces(session.client, name, verb, pieces, shard_bytes=shard_bytes, on_progress=progress.show)
    finally:
        progress.end()


class _Progress:
    """A progress line on standard error, updated about once a second; nothing if that is not a terminal."""

    def __init__(self) -> None:
        self._told_at_s = time.monotonic()
        self._is_shown = False

    def show(self, num_samples: int, num_bytes: int) -> None:
        """Show how much has been sent."""
        if not sys.stderr.isatty() or time.monotonic() - self._told_at_s < _TELL_S:
            return
        self._told_at_s = time.monotonic()
        self._is_shown = True
        terminal.write_status(f"{num_samples:,} samples, {size(num_bytes)} sent")

    def end(self) -> None:
        """Clear the progress line."""
        if self._is_shown:
            terminal.write_status("")


def _sentence(status: DatasetStatus) -> str:
    kind = {"growing": ", and grows", "closed": ", and is closed"}.get(status.kind, "")
    shards = count(status.num_shards, "shard")
    return f"{status.name} has {status.num_samples:,} samples, {size(status.num_bytes)} in {shards}{kind}"


def _arrays(status: DatasetStatus) -> str:
    return " ".join(f"{array.name}:{array.dtype}{_shape(array)}" for array in status.arrays)


def _shape(array: DatasetArray) -> str:
    return f"[{','.join(map(str, array.shape))}]" if array.shape else ""


def size(num_bytes: float) -> str:
    """1.4 MB: three digits and a decimal unit."""
    unit = 0
    while num_bytes >= 999.5 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1000, unit + 1
    return f"{num_bytes:.3g} {_UNITS[unit]}"
