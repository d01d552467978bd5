"""What stands beside the newest steps of a journal: snapshots of the state, and segments of the steps before them.

A cut adds a snapshot and moves the steps before the one that was the newest until then into segments. It may be
interrupted between any two of its statements: each leaves a journal that opens and has lost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from struct import pack
from typing import Any, NamedTuple

import msgspec

from springtide.control.journal.chain import JournalMark, Row, follow
from springtide.control.journal.codec import LONGEST_SAME, SAME_MEMORY, SCHEMA_VERSION, decode_step
from springtide.control.journal.database import Database
from springtide.control.journal.retention import Retention
from springtide.control.journal.segments import Segment, SegmentStore, packed, rows_of
from springtide.control.state_data import decode_snapshot
from springtide.core.errors import JournalDamaged

SEGMENT_STEPS = 10_000
# So that a cut is short also after an old journal of a million steps was opened.
_SEGMENTS_A_CUT = 3
_NUM_SNAPSHOTS = 2

TABLES = (
    "CREATE TABLE IF NOT EXISTS @snapshots (seq INTEGER PRIMARY KEY, chain BLOB NOT NULL, now_s REAL NOT NULL, "
    "schema INTEGER NOT NULL, blob BLOB NOT NULL, checksum BLOB NOT NULL) STRICT",
    "CREATE TABLE IF NOT EXISTS @segments (first_seq INTEGER PRIMARY KEY, last_seq INTEGER NOT NULL, "
    "chain_in BLOB NOT NULL, chain_out BLOB NOT NULL, sha256 BLOB NOT NULL, num_bytes INTEGER NOT NULL, "
    "last_s REAL NOT NULL) STRICT",
)


class JournalSnapshot(NamedTuple):
    """The state after step `seq`, as it is stored."""

    seq: int
    chain: bytes
    now_s: float
    schema: int
    blob: bytes


class Archive:
    """The snapshots and segments of one journal."""

    def __init__(self, database: Database, segments: SegmentStore, *, has_tables: bool = True) -> None:
        """`has_tables` is False for an older journal that is open for reading only."""
        self._db = database
        self._contents = segments
        self.has_tables = has_tables

    # --- snapshots --------------------------------------------------------------------------------------------------

    def snapshots(self) -> Iterator[JournalSnapshot]:
        """The snapshots that are as they were written and stand where the chain says, the newest first."""
        genesis = self._db.genesis().chain
        for (seq,) in self._select("SELECT seq FROM @snapshots ORDER BY seq DESC"):
            for found in self._select(
                "SELECT seq, chain, now_s, schema, blob, checksum FROM @snapshots WHERE seq = ?", seq
            ):
                snapshot, checksum = _typed(found)
                if snapshot is None or snapshot.schema > SCHEMA_VERSION or _checksum(snapshot, genesis) != checksum:
                    continue
                at = self._db.query("SELECT chain FROM @steps WHERE seq = ?", snapshot.seq)
                if not at or bytes(at[0][0] or b"") == snapshot.chain:
                    yield snapshot

    def num_snapshots(self) -> int:
        """How many snapshots there are, sound or not."""
        return len(self._select("SELECT seq FROM @snapshots"))

    def newest_mark(self) -> JournalMark | None:
        """The place of the newest snapshot; None if there is none."""
        found = self._select("SELECT seq, chain FROM @snapshots ORDER BY seq DESC LIMIT 1")
        return JournalMark(int(found[0][0]), bytes(found[0][1])) if found else None

    def cut(
        self,
        mark: JournalMark,
        now_s: float,
        blob: bytes,
        keep: Retention,
        at: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Add the state after the step at `mark`, and move what is older than the snapshot before it.

        `at` is called with the name of each place at which a crash may interrupt this. Raises JournalError, Superseded.
        """
        snapshot = JournalSnapshot(mark.seq, mark.chain, now_s, SCHEMA_VERSION, blob)
        checksum = _checksum(snapshot, self._db.genesis().chain)
        at("cut.snapshot.before")
        with self._db.transaction():
            self._db.query("DELETE FROM @snapshots WHERE seq >= ?", mark.seq)
            self._db.query(
                "INSERT INTO @snapshots (seq, chain, now_s, schema, blob, checksum) VALUES (?, ?, ?, ?, ?, ?)",
                *snapshot,
                checksum,
            )
        at("cut.snapshot.after")
        # Only snapshots that can be read count: the steps after the older of two such ones stay as they are.
        sound = self._sound()
        if len(sound) == _NUM_SNAPSHOTS:
            for _ in range(_SEGMENTS_A_CUT):
                self._move_steps(sound[-1], at)
            with self._db.transaction():
                self._db.query("DELETE FROM @snapshots WHERE seq < ?", sound[-1])
            at("cut.older.after")
        self.drop(keep, now_s, at)

    # --- segments ---------------------------------------------------------------------------------------------------

    def segments(self) -> list[Segment]:
        """All segments, in order."""
        columns = ", ".join(Segment._fields)
        return [
            Segment(int(first), int(last), bytes(before), bytes(after), bytes(digest), int(size), float(last_s))
            for first, last, before, after, digest, size, last_s in self._select(
                f"SELECT {columns} FROM @segments ORDER BY first_seq"
            )
        ]

    def rows(self, after_seq: int = 0) -> Iterator[Row]:
        """The steps in segments, each compared with the chain. Raises JournalDamaged, JournalError."""
        before: Segment | None = None
        for segment in self.segments():
            if segment.first_seq == 1 and segment.chain_in != self._db.genesis().chain:
                raise JournalDamaged(1, "step 1 of the journal or what the journal was founded with was changed")
            if segment.last_seq > after_seq:
                ends = None if before is None else JournalMark(before.last_seq, before.chain_out)
                if before is not None and ends != (segment.first_seq - 1, segment.chain_in):
                    raise JournalDamaged(
                        before.last_seq + 1, f"the segment of step {before.last_seq + 1} does not follow the one before"
                    )
                yield from (row for row in rows_of(segment, self._contents.read(segment)) if row.seq > after_seq)
            before = segment

    def first_mark(self) -> JournalMark:
        """The place before the oldest step that is kept: the beginning, unless retention has dropped steps."""
        segments = self.segments()
        if segments:
            return JournalMark(segments[0].first_seq - 1, segments[0].chain_in)
        (first,) = self._db.query("SELECT min(seq) FROM @steps")[0]
        return self._db.genesis() if first in (None, 1) else self.mark_at(int(first) - 1) or self._db.genesis()

    def mark_at(self, seq: int) -> JournalMark | None:
        """The place of a step that stands in no table of steps any more; None if it is not known."""
        for sql in (
            "SELECT chain_out FROM @segments WHERE last_seq = ?",
            "SELECT chain FROM @snapshots WHERE seq = ?",
        ):
            if found := self._select(sql, seq):
                return JournalMark(seq, bytes(found[0][0]))
        return None

    def snapshot_memory(self, seq: int) -> Any:
        """The policy's memory in the snapshot after that step, which has a checksum; None where there is none."""
        for snapshot in self.snapshots():
            if snapshot.seq == seq:
                return msgspec.json.decode(decode_snapshot(snapshot.blob).state.memory)
        return None

    def memory_at(self, seq: int) -> Any:
        """The policy's memory at a step that stands in no table of steps any more."""
        memory = None
        for row in self.rows(max(0, seq - LONGEST_SAME - 1)):
            if row.seq > seq:
                break
            if (told := decode_step(row.step).memory) != SAME_MEMORY:
                memory = told
        return memory

    def drop(self, keep: Retention, now_s: float, at: Callable[[str], None] = lambda name: None) -> None:
        """Drop the segments that retention does not keep. The newest one stays: it says where the steps begin."""
        segments = self.segments()
        num_bytes, first = 0, len(segments)
        for number, segment in reversed(list(enumerate(segments))):
            num_bytes += segment.num_bytes
            is_kept = num_bytes <= keep.steps_bytes and segment.last_s >= now_s - keep.steps_s
            if not is_kept and number < len(segments) - 1:
                break
            first = number
        if first < len(segments) and first > 0:
            with self._db.transaction():
                self._db.query("DELETE FROM @segments WHERE first_seq < ?", segments[first].first_seq)
            at("cut.dropped.after")
        self.clear()

    def move_all(self) -> None:
        """Move all steps before the older snapshot, however many. Raises JournalError."""
        sound = self._sound()
        while len(sound) == _NUM_SNAPSHOTS and self._move_steps(sound[-1], lambda name: None):
            pass

    def _sound(self) -> list[int]:
        return [found.seq for found in self.snapshots()][:_NUM_SNAPSHOTS]

    def clear(self) -> None:
        """Delete what a crash has left of a cut."""
        self._contents.keep_only(self.segments())

    def _select(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._db.query(sql, *values) if self.has_tables else []

    def _move_steps(self, until_seq: int, at: Callable[[str], None]) -> bool:
        """Move the oldest steps into a segment. Returns whether there were any that could be moved."""
        found = self._db.query(
            "SELECT seq, term, now_s, step, chain FROM @steps WHERE seq <= ? ORDER BY seq LIMIT ?",
            until_seq,
            SEGMENT_STEPS,
        )
        first = int(found[0][0]) if found else 0
        begin = self._db.genesis() if first == 1 else self.mark_at(first - 1)
        if not found or begin is None:
            return False
        rows = [Row(int(q), int(t), float(n), bytes(s), bytes(c or b"")) for q, t, n, s, c in found]
        try:
            rows = list(follow(rows, begin))
        except JournalDamaged:
            # They stay for `springtide journal check`; nothing is decided by them.
            return False
        segment, content = packed(rows, begin.chain)
        at("cut.segment.before")
        self._contents.write(segment, content)
        at("cut.segment.written")
        columns = ", ".join(Segment._fields)
        with self._db.transaction():
            self._db.query(f"INSERT INTO @segments ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", *segment)
            self._db.query("DELETE FROM @steps WHERE seq <= ?", segment.last_seq)
        at("cut.segment.after")
        return True


def _typed(found: tuple[Any, ...]) -> tuple[JournalSnapshot | None, bytes]:
    seq, chain, now_s, schema, blob, checksum = found
    try:
        return JournalSnapshot(int(seq), bytes(chain), float(now_s), int(schema), bytes(blob)), bytes(checksum)
    except (TypeError, ValueError):
        return None, b""


def _checksum(snapshot: JournalSnapshot, genesis: bytes) -> bytes:
    """Depends on what the journal was founded with, since the first step may have been dropped."""
    digest = blake2b(pack(">QdQ", snapshot.seq, snapshot.now_s, snapshot.schema), key=genesis, digest_size=16)
    digest.update(snapshot.chain + snapshot.blob)
    return digest.digest()
