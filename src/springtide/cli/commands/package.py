"""`springtide package`: writes the recipe of a function's container image, and estimates the image's size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from springtide.cli.session import Session, common_options
from springtide.cli.tables.columns import align

if TYPE_CHECKING:
    from springtide.backends.functions.image import Platform, SizeReport

_SHOWN = 8
_MB = 1 << 20


@click.command()
@click.option("--out", default="springtide-image", metavar="DIR", help="The build context to write.", show_default=True)
@click.option(
    "--platform",
    type=click.Choice(["lambda", "alibaba"]),
    default="lambda",
    show_default=True,
    help="AWS Lambda, or Alibaba Function Compute.",
)
@click.option("--sizes-only", is_flag=True, help="Write nothing; only say how large it gets.")
@common_options
@click.pass_obj
def package(session: Session, out: str, platform: Platform, sizes_only: bool) -> None:
    """Write the recipe of a function's container image, and report its size against the provider's limits."""
    from springtide.backends.functions.image import size_report, write_package

    directory = Path(out).expanduser()
    report = size_report(platform) if sizes_only else write_package(directory, platform)
    session.answer(report, _as_text(report), "" if sizes_only else f"docker build -t springtide {directory}")


def _as_text(report: SizeReport) -> str:
    rows = [(one.name, one.version, _megabytes(one.num_bytes), str(one.num_files)) for one in report.packages[:_SHOWN]]
    rest = report.packages[_SHOWN:]
    if rest:
        size = _megabytes(sum(one.num_bytes for one in rest))
        rows.append((f"{len(rest)} more", "", size, str(sum(one.num_files for one in rest))))
    rows.append(("together", "", _megabytes(report.total_bytes), str(sum(one.num_files for one in report.packages))))
    lines = [align(("PACKAGE", "VERSION", "SIZE", "FILES"), rows), ""]
    lines.append(f"container image, at most 10 GB: {'fits' if report.fits_image else 'does NOT fit'}")
    lines.append(f"zip file, at most 250 MB unpacked: {'fits' if report.fits_zip else 'does NOT fit'}")
    return "\n".join([*lines, *report.notes])


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / _MB:.1f} MB"
