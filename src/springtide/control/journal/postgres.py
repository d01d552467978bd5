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

from springtide.control.journal.codec import SCHEMA_VERSION, decode_step, encode_step
from springtide.core.errors import JournalError, Superseded
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
    "term bigint NOT NULL, holder text NOT NULL, taken_at timestamptz NOT NULL DEFAULT now())",
    "CREATE TABLE IF NOT EXISTS springtide_steps ("
    "seq bigint PRIMARY KEY, term bigint NOT NULL, now_s double precision NOT NULL, step bytea NOT NULL)",
    "INSERT INTO springtide_term (term, holder) VALUES (0, '') ON CONFLICT DO NOTHING",
)
_TAKE_TERM = "UPDATE springtide_term SET term = term + 1, holder = %s, taken_at = now() RETURNING term"
# FOR SHARE locks the row until the insert is committed, so no process can take the next term in between. An insert
# that had to wait for another process to take it finds a different term here and inserts nothing.
_APPEND = """
WITH own AS (SELECT term FROM springtide_term WHERE term = %(term)s FOR SHARE)
INSERT INTO springtide_steps (seq, term, now_s, step)
SELECT %(seq)s, own.term, %(now_s)s, %(step)s FROM own
WHERE coalesce((SELECT max(seq) FROM springtide_steps), 0) = %(seq)s - 1
RETURNING seq
"""
_SET_META = """
WITH own AS (SELECT term FROM springtide_term WHERE term = %(term)s FOR SHARE)
INSERT INTO springtide_meta (key, value) SELECT %(key)s, %(value)s FROM own
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
        self._is_closed = False
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
            # No process with an earlier term can write any more, so this number is final.
            self._last_seq = self._newest_seq(connection)
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
            seq = self._last_seq + 1
            wanted: dict[str, Any] = {
                "term": self._term,
                "seq": seq,
                "now_s": step.now_s,
                "step": encode_step(step),
            }

            def insert(connection: Connection) -> int:
                with contextlib.suppress(psycopg.errors.UniqueViolation):
                    if connection.execute(_APPEND, wanted).fetchone() is not None:
                        return seq
                return self._recorded_seq(connection, wanted)

            self._last_seq = self._run(insert, "written")
            return self._last_seq

    def check(self) -> None:
        """Raise Superseded once a newer term was taken, JournalError when the database does not answer."""
        with self._lock:
            self._run(self._check_term, "read")

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, Step]]:
        """Every step with a higher sequence number, in order. Raises JournalError."""
        query = "SELECT seq, step FROM springtide_steps WHERE seq > %s ORDER BY seq LIMIT %s"
        while True:

            def fetch(connection: Connection, after_seq: int = after_seq) -> list[tuple[Any, ...]]:
                return connection.execute(query, (after_seq, PAGE_STEPS)).fetchall()

            with self._lock:
                rows = self._run(fetch, "read")
            for seq, data in rows:
                yield int(seq), decode_step(bytes(data))
                after_seq = int(seq)
            if len(rows) < PAGE_STEPS:
                return

    def last_now_s(self) -> float:
        """When the newest step was taken; 0 for an empty journal. Raises JournalError."""
        row = self._fetch_one("SELECT now_s FROM springtide_steps ORDER BY seq DESC LIMIT 1")
        return 0.0 if row is None else float(row[0])

    def meta(self, key: str) -> str | None:
        """The metadata under a key, such as when the platform's clock began. Raises JournalError."""
        row = self._fetch_one("SELECT value FROM springtide_meta WHERE key = %s", key)
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        """Set the metadata under a key. Raises Superseded, JournalError."""
        values = {"term": self._term, "key": key, "value": value}

        def put(connection: Connection) -> None:
            if connection.execute(_SET_META, values).fetchone() is None:
                self._check_term(connection)

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
        is_used = self._connection is not None
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
            connection.execute(
                "INSERT INTO springtide_meta VALUES ('schema', %s) ON CONFLICT DO NOTHING", (str(SCHEMA_VERSION),)
            )
        row = connection.execute("SHOW fsync").fetchone()
        if row is not None and row[0] == "off":
            _log.warning(
                "the database %s runs with fsync=off: the journal may not survive a power loss", self._display_url
            )

    def _check_schema(self, connection: Connection) -> None:
        row = connection.execute("SELECT value FROM springtide_meta WHERE key = 'schema'").fetchone()
        found = None if row is None else row[0]
        if found != str(SCHEMA_VERSION):
            raise JournalError(
                f"the journal {self._display_url} has schema {found}, this version reads {SCHEMA_VERSION}; "
                "start with another database or the version that wrote it"
            )

    def _newest_seq(self, connection: Connection) -> int:
        row = connection.execute("SELECT coalesce(max(seq), 0) FROM springtide_steps").fetchone()
        assert row is not None
        return int(row[0])

    def _recorded_seq(self, connection: Connection, wanted: dict[str, Any]) -> int:
        """After an insert that added no row: return `seq` if the step is already recorded, else raise the reason."""
        self._check_term(connection)
        row = connection.execute("SELECT term, step FROM springtide_steps WHERE seq = %s", (wanted["seq"],)).fetchone()
        if row is not None and row[0] == wanted["term"] and bytes(row[1]) == wanted["step"]:
            # An earlier attempt was committed, but the connection broke before the answer arrived.
            return int(wanted["seq"])
        newest = self._newest_seq(connection)
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
