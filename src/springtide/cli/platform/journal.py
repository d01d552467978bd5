"""`springtide journal`: what the platform has recorded, whether it is whole, and what to do if it is not."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from springtide.cli.platform.platform_process import is_alive, read_platform
from springtide.cli.session import Session, common_options, json_option, state_option
from springtide.cli.settings import resolve
from springtide.cli.tables.columns import count
from springtide.control.journal.export import OlderExport, export_older, export_rows
from springtide.control.journal.inspection import JournalReport, inspect_journal
from springtide.control.journal.journal import cut_journal, open_journal, read_journal
from springtide.control.journal.retention import retention_of
from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.quantities import format_duration

_url = click.option(
    "--journal", "url", metavar="URL", default="", help="postgresql://... [default: the file in the state directory]"
)


@click.group()
@json_option
@state_option
def journal() -> None:
    """Check, repair and export the journal: the record of all that the platform was told and decided."""


@journal.command()
@_url
@common_options
@click.pass_obj
def check(session: Session, url: str) -> None:
    """Read the whole journal and say whether every step is as it was written. Exit code 1 if not.

    Where the steps are sound that a platform starts from, damage to older ones is told and keeps none from starting.

    It may be checked while the platform runs.
    """
    report = _inspect(url, session.state_dir)
    hint = "" if report.damaged_seq is None else "go on without what is damaged: springtide journal repair"
    session.answer(report, _described(report), hint)
    if report.damaged_seq is not None or report.damaged_past:
        sys.exit(1)


@journal.command()
@_url
@click.option("--yes", "is_sure", is_flag=True, help="Do it; without this, only what would be done is shown.")
@common_options
@click.pass_obj
def repair(session: Session, url: str, is_sure: bool) -> None:
    """Drop everything from the first damaged step on, so that the platform starts with what stands before it.

    The journal is copied as it is first. What was recorded in the dropped steps is lost to the platform: jobs that were
    submitted there are unknown, and others go on from an earlier state and their newest checkpoint.
    """
    report = _inspect(url, session.state_dir)
    if report.damaged_seq is None:
        session.answer(report, f"{_described(report)}\nthere is nothing to repair")
        return
    if report.num_sound == 0:
        raise InvalidRequest(
            f"no step of the journal can be trusted ({report.problem}): put it back from a copy, or start with another "
            "state directory"
        )
    plan = f"the platform would go on from step {report.num_sound}, {_age(report)} after it was created"
    if not is_sure:
        session.answer(report, f"{_described(report)}\n{plan}", "do it: springtide journal repair --yes")
        return
    _refuse_running(session, url)
    kept = cut_journal(url, session.state_dir, report.num_sound + 1)
    text = f"the journal ends at step {report.num_sound} now; as it was it is kept in {kept}"
    session.answer({"num_steps": report.num_sound, "kept": kept}, text, "go on: springtide up")


@journal.command()
@_url
@common_options
@click.pass_obj
def compact(session: Session, url: str) -> None:
    """Move old steps into compressed segments and drop what retention does not keep, for a platform that is down.

    A running platform does that by itself, every 10 minutes or 10,000 steps. How long steps and ended jobs are kept,
    the settings say: springtide config show.
    """
    from springtide.service.compaction import compact as compact_journal

    _refuse_running(session, url)
    keep = retention_of(str(resolve("journal_retention").value), str(resolve("keep_ended").value))
    before = _inspect(url, session.state_dir)
    if before.damaged_seq is not None:
        raise InvalidRequest(f"the journal is damaged ({before.problem}): springtide journal check")
    with contextlib.closing(open_journal(url, session.state_dir, holder="springtide journal compact")) as found:
        compact_journal(found, keep)
    report = _inspect(url, session.state_dir)
    session.answer(report, _described(report), "go on: springtide up")


@journal.command()
@_url
@click.option("--schema", type=int, metavar="N", help="Write a journal of this older schema instead: 1.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@common_options
@click.pass_obj
def export(session: Session, url: str, schema: int | None, file: Path) -> None:
    """Write every step as a line of JSON to FILE.

    With --schema, FILE becomes a journal that the version before this one can start from, which reads no newer one.
    Nothing is written if that cannot hold the state of a workload that has not ended; then the reason is named.
    """
    if file.exists():
        raise InvalidRequest(f"{file} is there already: name a new file")
    if schema is not None:
        _refuse_running(session, url)
        with contextlib.closing(read_journal(url, session.state_dir)) as found:
            older = export_older(found, schema, file)
        hint = (
            f"move journal.* and segments in {session.state_dir} away, put it there as journal.db, start that version"
        )
        session.answer(older, _described_older(older), hint)
        return
    num_steps = 0
    with contextlib.closing(read_journal(url, session.state_dir)) as found, file.open("xb") as lines:
        file.chmod(0o600)
        for line in export_rows(found):
            lines.write(line)
            num_steps += 1
    session.answer({"num_steps": num_steps, "file": str(file)}, f"{count(num_steps, 'step')} written to {file}")


def _refuse_running(session: Session, url: str) -> None:
    running = read_platform(session.state_dir)
    if not url and running is not None and is_alive(running.pid):
        raise BackendError("a platform uses this journal: stop it first with `springtide down`")


def _inspect(url: str, state_dir: Path) -> JournalReport:
    if not url and not (state_dir / "journal.db").exists():
        raise InvalidRequest(f"there is no journal in {state_dir}")
    with contextlib.closing(read_journal(url, state_dir)) as found:
        return inspect_journal(found)


def _described(report: JournalReport) -> str:
    lines = [
        f"{count(report.num_sound, 'step')} of schema {report.schema}, {report.num_bytes:,} bytes, the last one "
        f"{_age(report)} after the platform was created"
    ]
    if report.starts_from:
        lines.append(
            f"  a start reads the snapshot of step {report.starts_from} and what comes after; beside it stand "
            f"{count(report.num_segments, 'segment')} of older steps and {count(report.num_ended, 'ended job')}"
        )
    if report.begins_at > 1:
        lines.append(f"  retention has dropped the steps before {report.begins_at}")
    if report.events:
        told = ", ".join(f"{number:,} {kind}" for kind, number in sorted(report.events.items(), key=lambda e: -e[1]))
        lines.append(f"  events: {told}")
    if report.damaged_past:
        lines.append(f"DAMAGED, where a start does not read: {report.damaged_past}")
    if report.damaged_seq is None:
        which = "every step that a start reads" if report.damaged_past else "every step"
        lines.append(f"{which} is as it was written, and the journal ends where it was written last")
    else:
        after = f"; {count(report.num_after, 'step')} from there on cannot be used" if report.num_after else ""
        lines.append(f"DAMAGED: {report.problem}{after}")
    return "\n".join(lines)


def _described_older(older: OlderExport) -> str:
    text = f"{count(older.num_steps, 'step')} written to {older.file}, a journal of schema {older.schema}"
    if older.left_out:
        left_out = ", ".join(f"{number:,} {kind}" for kind, number in sorted(older.left_out.items()))
        text += f"\n  left out, without a change of the state: {left_out}"
    return text


def _age(report: JournalReport) -> str:
    return format_duration(report.last_s)
