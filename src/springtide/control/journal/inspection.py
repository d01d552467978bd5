"""What stands in a journal, and up to where it can be trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from springtide.control.journal.chain import Row
from springtide.control.journal.codec import SCHEMA_VERSION, decode_step
from springtide.control.journal.journal import DurableJournal
from springtide.core.errors import JournalDamaged, JournalError
from springtide.core.ports import Step


class JournalReport(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a journal that are as they were written, and what comes after them.

    `last_s` is when the last sound step was taken, on the platform's clock. `damaged_seq` is the first step that is
    missing or was changed, None if all are sound; `problem` says what is wrong with it. `num_after` steps stand behind
    it. `events` counts the sound steps' events by kind.
    """

    schema: int
    num_sound: int
    num_bytes: int
    last_s: float
    events: dict[str, int]
    damaged_seq: int | None = None
    num_after: int = 0
    problem: str = ""


def inspect_journal(journal: DurableJournal) -> JournalReport:
    """Read the whole journal. Raises JournalError if it cannot be read at all."""
    num_bytes, last_s, num_sound = 0, 0.0, 0
    kinds: Counter[str] = Counter()
    damaged_seq: int | None = None
    problem = ""
    try:
        for row in journal.rows():
            step = _decoded(row)
            kinds.update(type(event).__name__ for event in step.events)
            num_sound, last_s = row.seq, row.now_s
            num_bytes += len(row.step)
        journal.check_end()
    except JournalDamaged as error:
        damaged_seq, problem = error.seq, error.problem
    return JournalReport(
        schema=SCHEMA_VERSION,
        num_sound=num_sound,
        num_bytes=num_bytes,
        last_s=last_s,
        events=dict(sorted(kinds.items())),
        damaged_seq=damaged_seq,
        num_after=max(0, journal.newest.seq - num_sound),
        problem=problem,
    )


def export_rows(journal: DurableJournal) -> Iterator[bytes]:
    """Each step as a line of JSON: its number, term, time and content. Raises JournalDamaged, JournalError."""
    for row in journal.rows():
        step = msgspec.Raw(row.step)
        yield msgspec.json.encode({"seq": row.seq, "term": row.term, "now_s": row.now_s, "step": step}) + b"\n"


def _decoded(row: Row) -> Step:
    try:
        return decode_step(row.step)
    except JournalError as error:
        raise JournalDamaged(row.seq, str(error)) from error
