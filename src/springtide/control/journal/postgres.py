"""The journal in a PostgreSQL database, which outlives the machine of the control plane. The only user of psycopg.

Only the control plane that opened the journal last may write: opening takes the next **term**, and every append
compares its own term with the newest in the transaction that inserts. So the database refuses a control plane that was
suspended and resumes after another one has taken over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psycopg

from springtide.control.journal import archive, ended
from springtide.control.journal.chain import CHANGING_KEYS, JournalMark, Row, follow, genesis, link
from springtide.control.journal.codec import (
    SCHEMA_VERSION,
    StepEncoder,
    decode_rows,
    decode_step,
    unreadable_schema,
    upgraded,
)
from springtide.control.journal.retention import Retention
from springtide.control.journal.segments import SegmentTable
from springtide.control.journal.witness import compare
from springtide.core.errors import JournalDamaged, JournalError, Superseded
from springtide.core.ports import Step

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5
# A longer statement fails, and the loop retries it, so that decisions never wait for a hanging database.
STATEMENT_TIMEOUT_S = 10
PAGE_STEPS = 500
# The advisory lock under which tables are created: two control planes that did so at once would conflict.
_SCHEMA_LOCK = 0x5350_5254
_TABLES = (
    "CREATE TABLE IF NOT EXISTS springtide_meta (key text PRIMARY KEY, value text NOT NULL)",
    "CREATE TABLE IF NOT EXISTS springtide_term ("
    "only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row), "
    "term bigint NOT NULL, holder text NOT NULL, taken_at timestamptz NOT NULL DEFAULT now(), "
    # How far the steps were written.
    "head_seq bigint NOT NULL DEFAULT 0, head_chain bytea)",
    "CREATE TABLE IF NOT EXISTS springtide_steps ("
    "seq bigint PRIMARY KEY, term bigint NOT NULL, now_s double precision NOT NULL, step bytea NOT NULL, chain bytea)",
    "INSERT INTO springtide_term (term, holder) VALUES (0, '') ON CONFLICT DO NOTHING",
    "CREATE TABLE IF NOT EXISTS springtide_segment_contents ("
    "first_seq bigint PRIMARY KEY, last_seq bigint NOT NULL, content bytea NOT NULL)",
    # They are compressed already.
    "ALTER TABLE springtide_segment_contents ALTER COLUMN content SET STORAGE EXTERNAL",
)
# The names of types, where those of SQLite differ.
_TYPES = (("INTEGER", "bigint"), ("BLOB", "bytea"), ("REAL", "double precision"), (" STRICT", ""))
# Schema 1 has neither the chain of hashes nor a note of how far the steps were written.
_FROM_SCHEMA_1 = (
    "ALTER TABLE springtide_steps ADD COLUMN IF NOT EXISTS chain bytea",
    "ALTER TABLE springtide_term ADD COLUMN IF NOT EXISTS head_seq bigint NOT NULL DEFAULT 0",
    "ALTER TABLE springtide_term ADD COLUMN IF NOT EXISTS head_chain bytea",
)
_TAKE_TERM = "UPDATE springtide_term SET term = term + 1, holder = %s, taken_at = now() RETURNING term"
# The update locks the row until the insert is committed, so no process can take the next term in between. An update
# that had to wait for another process to take it finds a different term here and changes nothing.
_APPEND = """
WITH own AS (
  UPDATE springtide_term SET head_seq = %(seq)s, head_chain = %(chain)s
  WHERE term = %(term)s AND %(seq)s - 1 = coalesce(
    (SELECT max(seq) FROM springtide_steps), (SELECT max(seq) FROM springtide_snapshots), 0)
  RETURNING term
)
INSERT INTO springtide_steps (seq, term, now_s, step, chain)
SELECT %(seq)s, own.term, %(now_s)s, %(step)s, %(chain)s FROM own
RETURNING seq
"""
_SET_META = """
WITH own AS (SELECT term FROM springtide_term WHERE term = %(term)s FOR SHARE)
INSERT INTO springtide_meta (key, value) SELECT %(key)s, %(value)s FROM own
WHERE %(may_change)s OR NOT EXISTS (SELECT FROM springtide_steps)
ON CONFLICT (key) DO UPDATE SET value = excluded.value
RETURNING key
"""

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]


class PostgresJournal:
    """A journal in the tables `springtide_*` of a database (of the first schema in its search path).

    A second platform needs a database or a schema of its own. `holder` names the process that takes the term, for
    people. With `read_only` no term is taken and nothing can be written.
    When the connection is lost during an append, the retry first checks whether the step was recorded, so that it is
    recorded once.
    """

    def __init__(self, url: str, *, holder: str = "", read_only: bool = False) -> None:
        """Open, make the tables where there are none, take the next term. Raises JournalError."""
        self._url = url
        self._display_url = _without_password(url)
        self._read_only = read_only
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._is_closed = self._is_in_transaction = False
        self._encoder = StepEncoder()
        self._term = 0
        try:
            connection = self._connect()
            if not read_only:
                self._make_tables(connection)
            self._check_schema(connection)
            if not read_only:
                row = connection.execute(_TAKE_TERM, (holder,)).fetchone()
                assert row is not None
                self._term = int(row[0])
                # No process with an earlier term can write any more.
                self._convert(connection)
            found = connection.execute("SELECT to_regclass('springtide_snapshots') IS NOT NULL").fetchone()
            self.ended = ended.EndedJobs(self)
            self.archive = archive.Archive(self, SegmentTable(self), has_tables=found == (True,))
            self._newest = self._mark_at(connection, None) if read_only else self._check_end(connection)
        except psycopg.Error as error:
            self.close()
            raise JournalError(f"the journal {self._display_url} cannot be opened: {_one_line(error)}") from error
        except JournalError:
            self.close()
            raise

    @property
    def term(self) -> int:
        """The term that opening took, higher than all before it; 0 if it was opened for reading only."""
        return self._term

    def append(self, step: Step) -> int:
        """Make a step durable and return its sequence number.

        Raises Superseded once a newer term was taken, and JournalError on any other failure of the database; then the
        caller has to retry the same step before it appends another one.
        """
        with self._lock:
            data = self._encoder.encode(step)

            def insert(connection: Connection) -> JournalMark:
                # What it was founded with is in the chain from the first step on.
                previous = self._newest if self._newest.seq else self._genesis(connection)
                row = link(previous, self._term, step.now_s, data)
                wanted = row._asdict()
                with contextlib.suppress(psycopg.errors.UniqueViolation):
                    if connection.execute(_APPEND, wanted).fetchone() is not None:
                        return JournalMark(row.seq, row.chain)
                return self._recorded(connection, wanted)

            self._newest = self._run(insert, "written")
            self._encoder.note(step)
            return self._newest.seq

    def check(self) -> None:
        """Raise Superseded once a newer term was taken, JournalError when the database does not answer."""
        with self._lock:
            self._run(self._check_term, "read")

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, Step]]:
        """Every step with a higher sequence number, in order. Raises JournalDamaged, JournalError."""
        yield from decode_rows(self.rows(after_seq), self._memory_at(after_seq))

    def rows(self, after_seq: int = 0) -> Iterator[Row]:
        """The rows as they are stored, each compared with the chain. Raises JournalDamaged, JournalError."""
        with self._lock:
            previous = (
                self._run(lambda connection: self._mark_at(connection, after_seq), "read")
                if after_seq
                else self.archive.first_mark()
            )
        for row in self.archive.rows(after_seq):
            previous = JournalMark(row.seq, row.chain)
            yield row
        if previous.seq >= after_seq:
            yield from follow(self._rows_after(previous.seq), previous)

    def cut(
        self, blob: bytes, now_s: float, keep: Retention | None = None, at: Callable[[str], None] = lambda name: None
    ) -> None:
        """Keep the state after the newest step, and what is older as `keep` says. Raises JournalError, Superseded."""
        keep = keep or Retention()
        self.archive.cut(self._newest, now_s, blob, keep, at)
        self.ended.drop(keep.ended_s, now_s)
        at("cut.end")

    def shrink(self) -> None:
        """Does nothing: the database gives room back by itself."""

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a statement of the archive. Raises JournalError."""
        text = sql.replace("@", "springtide_").replace("?", "%s").encode()

        def run(connection: Connection) -> list[tuple[Any, ...]]:
            cursor = connection.execute(text, values)
            return cursor.fetchall() if cursor.description is not None else []

        with self._lock:
            return self._run(run, "used")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements inside are done, or none, and only in the newest term. Raises JournalError, Superseded."""
        with self._lock:
            connection = self._run(lambda connection: connection, "written")
            try:
                with connection.transaction():
                    connection.execute("SELECT term FROM springtide_term FOR SHARE")
                    self._check_term(connection)
                    self._is_in_transaction = True
                    yield
            except psycopg.Error as error:
                raise JournalError(f"the journal {self._display_url} cannot be written: {_one_line(error)}") from error
            finally:
                self._is_in_transaction = False

    def genesis(self) -> JournalMark:
        """Where the chain begins. Raises JournalError."""
        with self._lock:
            return self._run(self._genesis, "read")

    def _memory_at(self, seq: int) -> Any:
        """The policy's memory at a step."""
        # Rows before a snapshot are compared with no chain: they may be damaged.
        if (kept := self.archive.snapshot_memory(seq)) is not None:
            return kept
        query = (
            "SELECT step FROM springtide_steps WHERE seq <= %s "
            "AND position('\"memory\":\"=\"' IN convert_from(step, 'UTF8')) = 0 ORDER BY seq DESC LIMIT 1"
        )
        with self._lock:
            row = self._run(lambda connection: connection.execute(query, (seq,)).fetchone(), "read")
        return self.archive.memory_at(seq) if row is None else decode_step(bytes(row[0])).memory

    def _rows_after(self, after_seq: int) -> Iterator[Row]:
        query = "SELECT seq, term, now_s, step, chain FROM springtide_steps WHERE seq > %s ORDER BY seq LIMIT %s"
        while True:

            def fetch(connection: Connection, after_seq: int = after_seq) -> list[tuple[Any, ...]]:
                return connection.execute(query, (after_seq, PAGE_STEPS)).fetchall()

            with self._lock:
                rows = self._run(fetch, "read")
            for seq, term, now_s, step, chain in rows:
                yield Row(int(seq), int(term), float(now_s), bytes(step), bytes(chain or b""))
                after_seq = int(seq)
            if len(rows) < PAGE_STEPS:
                return

    @property
    def newest(self) -> JournalMark:
        """The place of the newest step when it was opened, or of the last one that was appended here."""
        return self._newest

    def check_end(self) -> None:
        """Raise JournalDamaged unless the journal reaches as far as was acknowledged."""
        with self._lock:
            self._run(self._check_end, "read")

    def last_now_s(self) -> float:
        """When the newest step was taken; 0 for an empty journal. Raises JournalError."""
        row = self._fetch_one("SELECT now_s FROM springtide_steps ORDER BY seq DESC LIMIT 1")
        if row is None and self._newest.seq:
            return next((snapshot.now_s for snapshot in self.archive.snapshots()), 0.0)
        return 0.0 if row is None else float(row[0])

    def meta(self, key: str) -> str | None:
        """A fact that the journal was founded with, such as when the platform's clock began. Raises JournalError."""
        row = self._fetch_one("SELECT value FROM springtide_meta WHERE key = %s", key)
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        """Set a fact that the journal is founded with. Raises Superseded, and JournalError also once it has steps."""
        values = {"term": self._term, "key": key, "value": value, "may_change": key in CHANGING_KEYS}

        def put(connection: Connection) -> None:
            if connection.execute(_SET_META, values).fetchone() is None:
                self._check_term(connection)
                raise JournalError(f"the journal {self._display_url} has steps: what it was founded with cannot change")

        with self._lock:
            self._run(put, "written")

    def holder(self) -> tuple[int, str]:
        """The newest term and the process that took it. Raises JournalError."""
        row = self._fetch_one("SELECT term, holder FROM springtide_term")
        return (0, "") if row is None else (int(row[0]), str(row[1]))

    def close(self) -> None:
        """Close the connection. The journal cannot be used afterwards."""
        with self._lock:
            self._is_closed = True
            self._disconnect()

    def _fetch_one(self, query: str, *values: str) -> tuple[Any, ...] | None:
        with self._lock:
            # psycopg's type for queries accepts only literal strings or bytes. All callers pass constants.
            return self._run(lambda connection: connection.execute(query.encode(), values).fetchone(), "read")

    def _run(self, work: Callable[[Connection], T], verb: str) -> T:
        """Run `work`, and once more on a new connection if the present one is dead. Raises JournalError."""
        if self._is_closed:
            raise JournalError(f"the journal {self._display_url} is closed")
        # A new connection would not be inside the transaction.
        is_used = self._connection is not None and not self._is_in_transaction
        for is_last in (not is_used, True):
            try:
                return work(self._connect())
            except psycopg.Error as error:
                is_dead = self._connection is None or self._connection.broken or self._connection.closed
                if is_dead:
                    self._disconnect()
                if is_last or not is_dead:
                    raise JournalError(
                        f"the journal {self._display_url} cannot be {verb}: {_one_line(error)}"
                    ) from error
        raise AssertionError("the second attempt returns or raises")

    def _connect(self) -> Connection:
        if self._connection is None:
            connection = psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                application_name="springtide",
                # Keepalives detect a database that vanished without closing the connection.
                keepalives_idle=5,
                keepalives_interval=2,
                keepalives_count=3,
                tcp_user_timeout=STATEMENT_TIMEOUT_S * 1000,
                # Prepared statements fail behind a connection pooler.
                prepare_threshold=None,
            )
            self._connection = connection
            connection.execute(f"SET statement_timeout = '{STATEMENT_TIMEOUT_S}s'")
            # A step that `append` has returned for must survive a power loss, whatever the server's default is.
            connection.execute(
                "SELECT set_config('synchronous_commit', 'on', false) "
                "WHERE current_setting('synchronous_commit') = 'off'"
            )
            if self._read_only:
                connection.execute("SET default_transaction_read_only = on")
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _make_tables(self, connection: Connection) -> None:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_SCHEMA_LOCK,))
            for statement in _TABLES:
                connection.execute(statement)
            for text in (*archive.TABLES, *ended.TABLES):
                for name, other in (*_TYPES, ("@", "springtide_")):
                    text = text.replace(name, other)
                connection.execute(text.encode())
            connection.execute(
                "INSERT INTO springtide_meta VALUES ('schema', %s) ON CONFLICT DO NOTHING", (str(SCHEMA_VERSION),)
            )
        row = connection.execute("SHOW fsync").fetchone()
        if row is not None and row[0] == "off":
            _log.warning(
                "the database %s runs with fsync=off: the journal may not survive a power loss", self._display_url
            )

    def _check_schema(self, connection: Connection) -> None:
        found = self._schema(connection)
        is_older = found is not None and found.isdecimal() and int(found) < SCHEMA_VERSION
        if found != str(SCHEMA_VERSION) and not (is_older and not self._read_only):
            raise JournalError(unreadable_schema(self._display_url, found))

    def _schema(self, connection: Connection) -> str | None:
        row = connection.execute("SELECT value FROM springtide_meta WHERE key = 'schema'").fetchone()
        return None if row is None else str(row[0])

    def _convert(self, connection: Connection) -> None:
        """Convert the steps of an older schema in one transaction; they are kept in a table of their own."""
        found = self._schema(connection) or ""
        if found == str(SCHEMA_VERSION):
            return
        _log.warning(
            "the journal %s has schema %s and is converted; as it was it is kept in springtide_steps_schema_%s",
            *(self._display_url, found, found),
        )
        with connection.transaction():
            kept = f"springtide_steps_schema_{int(found)}"
            connection.execute(f"CREATE TABLE IF NOT EXISTS {kept} AS TABLE springtide_steps".encode())
            for statement in _FROM_SCHEMA_1:
                connection.execute(statement)
            at = self._genesis(connection)
            with connection.cursor(name="springtide_convert", withhold=False) as rows:
                rows.execute("SELECT seq, term, now_s, step FROM springtide_steps ORDER BY seq")
                for seq, term, now_s, step in rows:
                    row = link(at, int(term), float(now_s), upgraded(int(found), bytes(step)))
                    if row.seq != seq:
                        raise JournalDamaged(row.seq, f"step {row.seq} of the journal is missing")
                    connection.execute(
                        "UPDATE springtide_steps SET step = %(step)s, chain = %(chain)s WHERE seq = %(seq)s",
                        row._asdict(),
                    )
                    at = JournalMark(row.seq, row.chain)
            connection.execute("UPDATE springtide_term SET head_seq = %s, head_chain = %s", at)
            connection.execute("UPDATE springtide_meta SET value = %s WHERE key = 'schema'", (str(SCHEMA_VERSION),))

    def _genesis(self, connection: Connection) -> JournalMark:
        return genesis(dict(connection.execute("SELECT key, value FROM springtide_meta").fetchall()))

    def _mark_at(self, connection: Connection, seq: int | None) -> JournalMark:
        """The place of a step, of the newest one for None; the beginning if there is none."""
        row = connection.execute(
            "SELECT seq, chain FROM springtide_steps WHERE %(seq)s::bigint IS NULL OR seq = %(seq)s "
            "ORDER BY seq DESC LIMIT 1",
            {"seq": seq},
        ).fetchone()
        if row is not None:
            return JournalMark(int(row[0]), bytes(row[1] or b""))
        found = self.archive.newest_mark() if seq is None else self.archive.mark_at(seq)
        return found or self._genesis(connection)

    def _check_end(self, connection: Connection) -> JournalMark:
        """The newest place. Raises JournalDamaged if steps that were acknowledged are missing behind it."""
        newest = self._mark_at(connection, None)
        row = connection.execute("SELECT head_seq, head_chain FROM springtide_term").fetchone()
        if row is not None and row[1] is not None:
            noted = JournalMark(int(row[0]), bytes(row[1]))
            compare(noted, newest, self._mark_at(connection, noted.seq).chain if noted.seq <= newest.seq else None)
        return newest

    def _recorded(self, connection: Connection, wanted: dict[str, Any]) -> JournalMark:
        """After an insert that added no row: the step's place if it is already recorded, else raise the reason."""
        self._check_term(connection)
        row = connection.execute("SELECT term, step FROM springtide_steps WHERE seq = %s", (wanted["seq"],)).fetchone()
        if row is not None and row[0] == wanted["term"] and bytes(row[1]) == wanted["step"]:
            # An earlier attempt was committed, but the connection broke before the answer arrived.
            return JournalMark(int(wanted["seq"]), wanted["chain"])
        newest = self._mark_at(connection, None).seq
        raise JournalError(
            f"the journal {self._display_url} ends at step {newest}, but step {wanted['seq'] - 1} was written here "
            "last: the database was set back (a failover to a copy that was behind?); restart the control plane, "
            "which takes the journal as it is now"
        )

    def _check_term(self, connection: Connection) -> None:
        row = connection.execute("SELECT term, holder FROM springtide_term").fetchone()
        if row is None or row[0] != self._term:
            newest, holder = (None, "no process") if row is None else (row[0], row[1] or "an unnamed process")
            raise Superseded(
                f"another control plane has taken over: {holder} writes the journal in term {newest}, "
                f"this one had term {self._term}"
            )


def cut(url: str, seq: int) -> str:
    """Drop the steps from `seq` on, and note the rest as all that was acknowledged.

    The steps are copied into another table first, whose name is returned. Raises JournalError.
    """
    try:
        with psycopg.connect(url, connect_timeout=CONNECT_TIMEOUT_S) as connection:
            number = 1
            while connection.execute("SELECT to_regclass(%s)", (f"springtide_steps_damaged_{number}",)).fetchone() != (
                None,
            ):
                number += 1
            kept = f"springtide_steps_damaged_{number}"
            connection.execute(f"CREATE TABLE {kept} AS TABLE springtide_steps".encode())
            connection.execute("DELETE FROM springtide_steps WHERE seq >= %s", (seq,))
            ends = "SELECT seq, chain FROM springtide_steps"
            if connection.execute("SELECT to_regclass('springtide_snapshots')").fetchone() != (None,):
                connection.execute("DELETE FROM springtide_snapshots WHERE seq >= %s", (seq,))
                ends += " UNION ALL SELECT seq, chain FROM springtide_snapshots"
            connection.execute(
                "UPDATE springtide_term SET term = term + 1, (head_seq, head_chain) = (SELECT coalesce(max(seq), 0), "
                f"(SELECT chain FROM ({ends}) AS all_ends ORDER BY seq DESC LIMIT 1) FROM ({ends}) AS ends)".encode()
            )
    except psycopg.Error as error:
        raise JournalError(f"the journal {_without_password(url)} cannot be repaired: {_one_line(error)}") from error
    return kept


def _without_password(url: str) -> str:
    """The URL for messages: with host and database, without user, password and options."""
    try:
        parts = urlsplit(url)
        port = "" if parts.port is None else f":{parts.port}"
        return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"
    except ValueError:
        return "postgresql://..."


def _one_line(error: psycopg.Error) -> str:
    """The database's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__
