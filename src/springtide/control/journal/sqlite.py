"""The journal in one SQLite file of the state directory."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from springtide.control.journal.codec import SCHEMA_VERSION, decode_step, encode_step
from springtide.core.errors import JournalError
from springtide.core.ports import Step

_TERM = "term"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS steps (seq INTEGER PRIMARY KEY, now_s REAL NOT NULL, step BLOB NOT NULL) STRICT;
"""


class SqliteJournal:
    """A journal in one SQLite file: WAL with full sync, so that what `append` returned from survives power loss.

    One writer at a time holds it exclusively (a second control plane on the same directory is refused); readers
    open their own `SqliteJournal(path, read_only=True)` and never wait.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        # A cursor's `lastrowid` is that of the connection's newest row, whichever thread wrote it.
        self._lock = threading.Lock()
        try:
            if read_only:
                uri = f"file:{path}?mode=ro"
                self._db = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None, timeout=5.0)
            else:
                self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=5.0)
                path.chmod(0o600)
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                self._db.executescript(_SCHEMA)
                self._db.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (str(SCHEMA_VERSION),))
            self._check_schema()
        except sqlite3.Error as error:
            raise JournalError(f"the journal {path} cannot be opened: {error}") from error

    @property
    def term(self) -> int:
        """How often `take_term` was called, by all processes that ever held the file."""
        return int(self.meta(_TERM) or 0)

    def take_term(self) -> int:
        """Begin the next term and return its number. The directory's lock keeps other processes out."""
        term = self.term + 1
        self.set_meta(_TERM, str(term))
        return term

    def check(self) -> None:
        """Does nothing: no process can take the next term while the directory is locked."""

    def append(self, step: Step) -> int:
        """Make a step durable and return its sequence number. Raises JournalError; then nothing was recorded."""
        try:
            with self._lock:
                cursor = self._db.execute(
                    "INSERT INTO steps (now_s, step) VALUES (?, ?)", (step.now_s, encode_step(step))
                )
        except sqlite3.Error as error:
            raise JournalError(f"the journal {self._path} cannot be written: {error}") from error
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, Step]]:
        """Every step with a higher sequence number, in order. Raises JournalError."""
        try:
            for seq, data in self._db.execute("SELECT seq, step FROM steps WHERE seq > ? ORDER BY seq", (after_seq,)):
                yield seq, decode_step(data)
        except sqlite3.Error as error:
            raise JournalError(f"the journal {self._path} cannot be read: {error}") from error

    def last_now_s(self) -> float:
        """When the newest step was taken; 0 for an empty journal."""
        row = self._db.execute("SELECT now_s FROM steps ORDER BY seq DESC LIMIT 1").fetchone()
        return 0.0 if row is None else float(row[0])

    def meta(self, key: str) -> str | None:
        """The metadata under a key, such as when the platform's clock began."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        """Set the metadata under a key."""
        try:
            with self._lock:
                self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
        except sqlite3.Error as error:
            raise JournalError(f"the journal {self._path} cannot be written: {error}") from error

    def close(self) -> None:
        """Close the file. The journal cannot be used afterwards."""
        self._db.close()

    def _check_schema(self) -> None:
        found = self.meta("schema")
        if found != str(SCHEMA_VERSION):
            raise JournalError(
                f"the journal {self._path} has schema {found}, this version reads {SCHEMA_VERSION}; "
                "start with another state directory or the version that wrote it"
            )


def newest_seq(path: Path) -> int:
    """The number of a journal's newest step, read beside its writer; 0 if it has none or cannot be read."""
    if not path.exists():
        return 0
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=1.0)) as journal:
            (newest,) = journal.execute("SELECT max(seq) FROM steps").fetchone()
    except sqlite3.Error:
        return 0
    return int(newest or 0)
