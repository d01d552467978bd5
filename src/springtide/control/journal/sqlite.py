"""The journal in one SQLite file of the state directory, with a file beside it that says how far it was written."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from springtide.control.journal import archive, ended
from springtide.control.journal.chain import CHANGING_KEYS, JournalMark, Row, follow, genesis, link
from springtide.control.journal.codec import (
    SAME_MEMORY,
    SCHEMA_VERSION,
    StepEncoder,
    decode_rows,
    decode_step,
    unreadable_schema,
    upgraded,
)
from springtide.control.journal.retention import Retention
from springtide.control.journal.segments import SegmentFolder
from springtide.control.journal.witness import Witness, compare, read_witness
from springtide.core.errors import JournalDamaged, JournalError
from springtide.core.ports import Step
from springtide.storage.files import open_private

_log = logging.getLogger(__name__)

# A damaged file is told in words that may not be UTF-8, and has values of other types.
_ERRORS = (sqlite3.Error, UnicodeError, TypeError)
_TERM, _SCHEMA = "term", "schema"
_STEPS = (
    "CREATE TABLE IF NOT EXISTS {} (seq INTEGER PRIMARY KEY, term INTEGER NOT NULL, now_s REAL NOT NULL, "
    "step BLOB NOT NULL, chain BLOB NOT NULL) STRICT"
)
_META = "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT"
_INSERT = "INSERT INTO {} (seq, term, now_s, step, chain) VALUES (?, ?, ?, ?, ?)"
_SELECT = "SELECT seq, term, now_s, step, chain FROM steps WHERE seq > ? ORDER BY seq"


class SqliteJournal:
    """A journal in one SQLite file: WAL with full sync, so that what `append` returned from survives power loss.

    One writer at a time holds it exclusively (a second control plane on the same directory is refused); readers
    open their own `SqliteJournal(path, read_only=True)` and never wait. A journal of an older schema is converted
    when it is opened for writing, and a copy of it is kept.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Raises JournalDamaged if steps that were acknowledged are missing at the end, JournalError."""
        self._path = path
        self._lock = threading.RLock()
        self._witness: Witness | None = None
        self._encoder = StepEncoder()
        if not read_only:
            # Before anything is written: opening for writing would drop the damaged end of a write-ahead log.
            _check_end_of(path)
        try:
            self._db = _connect(path, read_only=read_only)
            if not read_only:
                self._prepare()
            if (found := self.meta(_SCHEMA)) != str(SCHEMA_VERSION):
                raise JournalError(unreadable_schema(str(path), found))
            self._term = int(self.meta(_TERM) or 0)
            has_archive = "SELECT 1 FROM sqlite_master WHERE name = 'snapshots'"
            self.ended = ended.EndedJobs(self)
            self.archive = archive.Archive(
                self,
                SegmentFolder(path.with_name("segments")),
                has_tables=self._db.execute(has_archive).fetchone() is not None,
            )
            self._newest = self._mark_at(None)
        except _ERRORS as error:
            raise JournalError(f"the journal {path} cannot be opened: {error}") from error
        if not read_only:
            self._open_witness()

    @property
    def newest(self) -> JournalMark:
        """The place of the newest step."""
        return self._newest

    @property
    def term(self) -> int:
        """How often `take_term` was called, by all processes that ever held the file."""
        return self._term

    def take_term(self) -> int:
        """Begin the next term and return its number. The directory's lock keeps other processes out."""
        self._term += 1
        self._put_meta(_TERM, str(self._term))
        return self._term

    def check(self) -> None:
        """Does nothing: no process can take the next term while the directory is locked."""

    def check_end(self) -> None:
        """Raise JournalDamaged unless the journal reaches as far as was acknowledged."""
        noted = read_witness(witness_path(self._path))
        if noted is not None:
            at_noted = self._mark_at(noted.seq).chain if 0 < noted.seq <= self._newest.seq else None
            compare(noted, self._newest, at_noted)

    def append(self, step: Step) -> int:
        """Make a step durable and return its sequence number. Raises JournalError; then nothing was recorded."""
        if not self._newest.seq:
            # What it was founded with is in the chain from the first step on.
            self._newest = self.genesis()
        row = link(self._newest, self._term, step.now_s, self._encoder.encode(step))
        try:
            with self._lock:
                self._db.execute(_INSERT.format("steps"), row)
        except _ERRORS as error:
            raise JournalError(f"the journal {self._path} cannot be written: {error}") from error
        self._newest = JournalMark(row.seq, row.chain)
        self._encoder.note(step)
        if self._witness is not None:
            self._witness.note(self._newest, step.now_s)
        return row.seq

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, Step]]:
        """Every step with a higher sequence number, in order. Raises JournalDamaged, JournalError."""
        yield from decode_rows(self.rows(after_seq), self._memory_at(after_seq))

    def rows(self, after_seq: int = 0) -> Iterator[Row]:
        """The rows as they are stored, each compared with the chain. Raises JournalDamaged, JournalError."""
        previous = self.archive.first_mark() if after_seq == 0 else self._mark_at(after_seq)
        for row in self.archive.rows(after_seq):
            previous = JournalMark(row.seq, row.chain)
            yield row
        try:
            if previous.seq >= after_seq:
                yield from follow(map(Row._make, self._db.execute(_SELECT, (previous.seq,))), previous)
        except _ERRORS as error:
            raise JournalError(f"the journal {self._path} cannot be read: {error}") from error

    def cut(
        self, blob: bytes, now_s: float, keep: Retention | None = None, at: Callable[[str], None] = lambda name: None
    ) -> None:
        """Keep the state after the newest step, and what is older as `keep` says. Raises JournalError."""
        keep = keep or Retention()
        self.archive.cut(self._newest, now_s, blob, keep, at)
        self.ended.drop(keep.ended_s, now_s)
        at("cut.ended.after")
        self._give_back()
        at("cut.end")

    def shrink(self) -> None:
        """Give all unused room back to the disk, also of a file from before it could. Raises JournalError."""
        if self.query("PRAGMA auto_vacuum") == [(0,)]:
            self.query("PRAGMA auto_vacuum = INCREMENTAL")
            self.query("VACUUM")
        self._give_back()

    def _give_back(self) -> None:
        with self._lock, self._failing("written"):
            # With `execute` it would stop after the first page.
            self._db.executescript("PRAGMA incremental_vacuum")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a statement of the archive. Raises JournalError."""
        with self._lock, self._failing("used"):
            return self._db.execute(sql.replace("@", ""), values).fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements inside are done, or none. Raises JournalError."""
        with self._lock:
            with self._failing("written"):
                self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                with self._failing("written"):
                    self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(*_ERRORS):
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _failing(self, verb: str) -> Iterator[None]:
        try:
            yield
        except _ERRORS as error:
            raise JournalError(f"the journal {self._path} cannot be {verb}: {error}") from error

    def _memory_at(self, seq: int) -> Any:
        """The policy's memory at a step. Raises JournalError."""
        # Rows before a snapshot are compared with no chain: they may be damaged.
        if (kept := self.archive.snapshot_memory(seq)) is not None:
            return kept
        query = "SELECT step FROM steps WHERE seq <= ? ORDER BY seq DESC"
        with self._failing("read"):
            for (data,) in self._db.execute(query, (seq,)):
                if (memory := decode_step(data).memory) != SAME_MEMORY:
                    return memory
        return self.archive.memory_at(seq)

    def last_now_s(self) -> float:
        """When the newest step was taken; 0 for an empty journal."""
        row = self._db.execute("SELECT now_s FROM steps ORDER BY seq DESC LIMIT 1").fetchone()
        if row is None and self._newest.seq:
            return next((snapshot.now_s for snapshot in self.archive.snapshots()), 0.0)
        return 0.0 if row is None else float(row[0])

    def meta(self, key: str) -> str | None:
        """A fact that the journal was founded with, such as when the platform's clock began."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        """Set what the journal is founded with; once there are steps, only CHANGING_KEYS. Raises JournalError."""
        if self._newest.seq and key not in CHANGING_KEYS:
            raise JournalError(f"the journal {self._path} has steps: what it was founded with cannot change")
        self._put_meta(key, value)

    def close(self) -> None:
        """Close the file. The journal cannot be used afterwards."""
        if self._witness is not None:
            self._witness.close()
            self._witness = None
        self._db.close()

    def _put_meta(self, key: str, value: str) -> None:
        try:
            with self._lock:
                self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
        except _ERRORS as error:
            raise JournalError(f"the journal {self._path} cannot be written: {error}") from error

    def genesis(self) -> JournalMark:
        """Where the chain begins."""
        return genesis(dict(self._db.execute("SELECT key, value FROM meta")))

    def _mark_at(self, seq: int | None) -> JournalMark:
        """The place of a step, of the newest one for None; the beginning if there is none."""
        which = "ORDER BY seq DESC LIMIT 1" if seq is None else "WHERE seq = ?"
        row = self._db.execute(f"SELECT seq, chain FROM steps {which}", () if seq is None else (seq,)).fetchone()
        if row is not None:
            return JournalMark(*row)
        return (self.archive.newest_mark() if seq is None else self.archive.mark_at(seq)) or self.genesis()

    def _open_witness(self) -> None:
        self.check_end()
        noted = read_witness(witness_path(self._path))
        self._witness = Witness(witness_path(self._path))
        if noted is None and self._newest.seq:
            name = witness_path(self._path).name
            _log.warning("%s was missing: had steps been lost at the journal's end, it would not be known", name)
            self._witness.note(self._newest, 0.0)

    def _prepare(self) -> None:
        self._path.chmod(0o600)
        # Before the log is made; afterwards it is silently without effect.
        self._db.execute("PRAGMA auto_vacuum=INCREMENTAL")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(_META)
        self._db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (_SCHEMA, str(SCHEMA_VERSION)))
        found = self.meta(_SCHEMA) or ""
        if found.isdecimal() and int(found) < SCHEMA_VERSION:
            self._convert(int(found))
        self._db.execute(_STEPS.format("steps"))
        for statement in (*archive.TABLES, *ended.TABLES):
            self._db.execute(statement.replace("@", ""))

    def _convert(self, found: int) -> None:
        """Convert a journal of an older schema in one transaction; a copy of it is kept beside it."""
        kept = self._path.with_name(f"{self._path.stem}.schema-{found}.db")
        _copy(self._path, kept)
        _log.warning("%s has schema %d and is converted; as it was it is kept in %s", self._path.name, found, kept.name)
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.execute("DROP TABLE IF EXISTS converted")
            self._db.execute(_STEPS.format("converted"))
            at, term = self.genesis(), int(self.meta(_TERM) or 0)
            for seq, now_s, step in self._db.execute("SELECT seq, now_s, step FROM steps ORDER BY seq"):
                row = link(at, term, now_s, upgraded(found, step))
                if row.seq != seq:
                    raise JournalDamaged(row.seq, f"step {row.seq} of the journal is missing")
                self._db.execute(_INSERT.format("converted"), row)
                at = JournalMark(row.seq, row.chain)
            self._db.execute("DROP TABLE IF EXISTS steps")
            self._db.execute("ALTER TABLE converted RENAME TO steps")
            self._put_meta(_SCHEMA, str(SCHEMA_VERSION))
            with contextlib.closing(Witness(witness_path(self._path))) as witness:
                witness.reset(at)
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise


def cut(path: Path, seq: int) -> Path:
    """Drop the steps from `seq` on and note the rest as all that was acknowledged. No process may use the journal.

    The files are copied as they are first. Returns the copy's path. Raises JournalError.
    """
    number = 1
    while (kept := path.with_name(f"{path.stem}.damaged-{number}.db")).exists():
        number += 1
    try:
        _copy(path, kept)
        with contextlib.closing(_connect(path)) as db:
            db.execute("DELETE FROM steps WHERE seq >= ?", (seq,))
            if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'snapshots'").fetchone():
                db.execute("DELETE FROM snapshots WHERE seq >= ?", (seq,))
        with (
            contextlib.closing(SqliteJournal(path, read_only=True)) as journal,
            contextlib.closing(Witness(witness_path(path))) as witness,
        ):
            witness.reset(journal.newest)
    except (*_ERRORS, OSError) as error:
        raise JournalError(f"the journal {path} cannot be repaired: {error}") from error
    return kept


def witness_path(path: Path) -> Path:
    """Where it is noted how far the journal at `path` was written."""
    return path.with_suffix(".head")


def newest_seq(path: Path) -> int:
    """The number of a journal's newest step, read beside its writer; 0 if it has none or cannot be read."""
    if not path.exists():
        return 0
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=1.0)) as journal:
            (newest,) = journal.execute("SELECT max(seq) FROM steps").fetchone()
    except _ERRORS:
        return 0
    return int(newest or 0)


def _connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    uri = f"file:{quote(str(path))}?mode={'ro' if read_only else 'rwc'}"
    return sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None, timeout=5.0)


def _check_end_of(path: Path) -> None:
    noted, found = read_witness(witness_path(path)), None
    if path.exists():
        with contextlib.suppress(*_ERRORS), contextlib.closing(_connect(path, read_only=True)) as db:
            found = db.execute("SELECT value FROM meta WHERE key = ?", (_SCHEMA,)).fetchone()
    if found is None and noted is not None and noted.seq:
        compare(noted, JournalMark(0, b""), None)
    if found is not None and found[0] == str(SCHEMA_VERSION):
        with contextlib.closing(SqliteJournal(path, read_only=True)) as journal:
            journal.check_end()


def _copy(path: Path, to: Path) -> None:
    """Copy a journal with its write-ahead log, as they are."""
    for suffix in ("", "-wal"):
        source = Path(f"{path}{suffix}")
        if source.exists():
            with source.open("rb") as content, open_private(f"{to}{suffix}", "wb") as copy:
                shutil.copyfileobj(content, copy)
                os.fsync(copy.fileno())
