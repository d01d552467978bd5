"""What stands in a journal, and up to where it can be trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from springtide.control.journal.chain import Row
from springtide.control.journal.codec import SCHEMA_VERSION, decode_step
from springtide.control.journal.journal import DurableJournal
from springtide.control.state_data import decode_snapshot
from springtide.core.errors import JournalDamaged, JournalError
from springtide.core.ports import Step


class JournalReport(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a journal that are as they were written, and what comes after them.

    A platform starts from the snapshot of step `starts_from` (0: there is none) and the steps after it. `last_s` is
    when the last sound step was taken, on the platform's clock. `damaged_seq` is the first of these steps that is
    missing or was changed, None if all are sound; `problem` says what is wrong with it, and `num_after` steps stand
    behind it. What stands before is only read by people: `begins_at` is the oldest step that is kept, and
    `damaged_past` says what is wrong there. `events` counts the sound steps' events by kind.
    """

    schema: int
    num_sound: int
    num_bytes: int
    last_s: float
    events: dict[str, int]
    damaged_seq: int | None = None
    num_after: int = 0
    problem: str = ""
    starts_from: int = 0
    begins_at: int = 1
    num_snapshots: int = 0
    num_segments: int = 0
    num_ended: int = 0
    damaged_past: str = ""


def inspect_journal(journal: DurableJournal) -> JournalReport:
    """Read the whole journal. Raises JournalError if it cannot be read at all."""
    archive = journal.archive
    sound = [snapshot for snapshot in archive.snapshots() if _is_readable(snapshot.blob)]
    begin = sound[0] if sound else None
    reading = _Reading()
    damaged_past = reading.read(journal.rows(), until_seq=begin.seq if begin is not None else 0)
    if begin is not None:
        reading.num_sound, reading.last_s = begin.seq, begin.now_s
    damaged_seq, problem = _needed(reading, journal, begin.seq if begin is not None else 0)
    past = [
        damaged_past and damaged_past[1],
        "" if len(sound) == archive.num_snapshots() else "a snapshot of the state was changed after it was written",
        _ended_problem(journal),
    ]
    return JournalReport(
        schema=SCHEMA_VERSION,
        num_sound=reading.num_sound,
        num_bytes=reading.num_bytes,
        last_s=reading.last_s,
        events=dict(sorted(reading.kinds.items())),
        damaged_seq=damaged_seq,
        num_after=max(0, journal.newest.seq - reading.num_sound),
        problem=problem,
        starts_from=begin.seq if begin is not None else 0,
        begins_at=reading.first_seq or 1,
        num_snapshots=archive.num_snapshots(),
        num_segments=len(archive.segments()),
        num_ended=journal.ended.count() if archive.has_tables else 0,
        damaged_past="; ".join(filter(None, past)),
    )


class _Reading:
    """What was seen of the steps that are sound."""

    def __init__(self) -> None:
        self.num_bytes, self.num_sound, self.last_s = 0, 0, 0.0
        self.first_seq: int | None = None
        self.kinds: Counter[str] = Counter()

    def read(self, rows: Iterator[Row], until_seq: int | None = None) -> tuple[int, str] | None:
        """Read up to a step, or all. Returns the first damaged one and what is wrong with it."""
        if until_seq == 0:
            return None
        try:
            for row in rows:
                step = _decoded(row)
                self.first_seq = self.first_seq or row.seq
                self.kinds.update(type(event).__name__ for event in step.events)
                self.num_sound, self.last_s = row.seq, row.now_s
                self.num_bytes += len(row.step)
                if row.seq == until_seq:
                    break
        except JournalDamaged as error:
            return error.seq, error.problem
        return None


def _needed(reading: _Reading, journal: DurableJournal, after_seq: int) -> tuple[int | None, str]:
    """The first damaged step of those that a start reads, and what is wrong with it."""
    found = reading.read(journal.rows(after_seq))
    if found is None and after_seq == 0 and (reading.first_seq or 1) > 1:
        reading.num_sound = 0
        return 1, f"the journal begins at step {reading.first_seq}, and no snapshot of the steps before can be read"
    if found is None:
        try:
            journal.check_end()
        except JournalDamaged as error:
            found = error.seq, error.problem
    return found or (None, "")


def _ended_problem(journal: DurableJournal) -> str:
    damaged = journal.ended.damaged() if journal.archive.has_tables else []
    if not damaged:
        return ""
    jobs = "1 job" if len(damaged) == 1 else f"{len(damaged)} jobs"
    return f"the record of {jobs} that has ended was changed: {', '.join(damaged[:5])}"


def _is_readable(blob: bytes) -> bool:
    try:
        decode_snapshot(blob)
    except JournalError:
        return False
    return True


def _decoded(row: Row) -> Step:
    try:
        return decode_step(row.step)
    except JournalError as error:
        raise JournalDamaged(row.seq, str(error)) from error
