"""The port of a durable journal, and opening the one that a URL names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from springtide.control.journal.archive import Archive
from springtide.control.journal.chain import JournalMark, Row
from springtide.control.journal.ended import EndedJobs
from springtide.control.journal.retention import Retention
from springtide.control.journal.sqlite import SqliteJournal, cut
from springtide.core.errors import InvalidRequest
from springtide.core.ports import Step

JOURNAL_FORMS = "postgresql://USER@HOST/DATABASE, sqlite:///absolute/path, or nothing for the state directory"


class DurableJournal(Protocol):
    """The journal of a platform: its steps, and what it was founded with. Every method raises JournalError."""

    @property
    def term(self) -> int:
        """The number of control planes that have taken it over so far; only the newest may write."""
        ...

    def append(self, step: Step) -> int:
        """Make a step durable and return its sequence number. Raises Superseded once a newer term was taken."""
        ...

    def check(self) -> None:
        """Raise Superseded once a newer term was taken."""
        ...

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, Step]]:
        """Every step with a higher sequence number, in order. Raises JournalDamaged."""
        ...

    def rows(self, after_seq: int = 0) -> Iterator[Row]:
        """The same as they are stored. Raises JournalDamaged at the first that was changed or is missing."""
        ...

    @property
    def newest(self) -> JournalMark:
        """The place of the newest step."""
        ...

    def check_end(self) -> None:
        """Raise JournalDamaged unless the journal reaches as far as was acknowledged."""
        ...

    def last_now_s(self) -> float:
        """When the newest step was taken; 0 for an empty journal."""
        ...

    def meta(self, key: str) -> str | None:
        """A fact that the journal was founded with, such as when the platform's clock began."""
        ...

    def set_meta(self, key: str, value: str) -> None:
        """Set a fact that the journal is founded with; once it has steps, only those of CHANGING_KEYS."""
        ...

    @property
    def archive(self) -> Archive:
        """The snapshots of the state, and the steps before them."""
        ...

    @property
    def ended(self) -> EndedJobs:
        """The jobs that have left the state."""
        ...

    def cut(self, blob: bytes, now_s: float, keep: Retention, at: Callable[[str], None]) -> None:
        """Keep the state after the newest step, and of what is older only what `keep` says.

        `at` is called with the name of each place at which a crash may interrupt this. Raises Superseded.
        """
        ...

    def shrink(self) -> None:
        """Give unused room back."""
        ...

    def close(self) -> None:
        """Close it. The journal cannot be used afterwards."""
        ...


def open_journal(url: str, state_dir: Path, *, holder: str = "") -> DurableJournal:
    """Open the journal that a URL names and take its next term. An empty URL is SQLite in the state directory.

    `holder` names the process that takes the term, for people. Raises InvalidRequest for a URL that names no journal,
    JournalError.
    """
    journal = _open(url, state_dir, holder=holder, read_only=False)
    if isinstance(journal, SqliteJournal):
        journal.take_term()
    return journal


def read_journal(url: str, state_dir: Path) -> DurableJournal:
    """Open the journal for reading only, beside the process that writes. Raises like `open_journal`."""
    return _open(url, state_dir, holder="", read_only=True)


def cut_journal(url: str, state_dir: Path, seq: int) -> str:
    """Drop the steps from `seq` on, after a copy was made; return where that is. No platform may be using it.

    Raises InvalidRequest for a URL that names no journal, JournalError.
    """
    if urlsplit(url).scheme in {"postgresql", "postgres"}:
        from springtide.control.journal.postgres import cut as cut_in_database

        return cut_in_database(url, seq)
    path = Path(unquote(urlsplit(url).path)) if url else state_dir / "journal.db"
    return str(cut(path, seq))


def _open(url: str, state_dir: Path, *, holder: str, read_only: bool) -> DurableJournal:
    if not url:
        return SqliteJournal(state_dir / "journal.db", read_only=read_only)
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidRequest(f"a journal's URL must look like one of: {JOURNAL_FORMS}") from None
    if parts.scheme in {"postgresql", "postgres"}:
        try:
            from springtide.control.journal.postgres import PostgresJournal
        except ImportError as error:
            raise InvalidRequest(
                f"a journal in PostgreSQL needs psycopg ({error}): pip install 'springtide[postgres]'"
            ) from None
        return PostgresJournal(url, holder=holder, read_only=read_only)
    path = Path(unquote(parts.path))
    if parts.scheme != "sqlite" or parts.netloc or not path.is_absolute() or path == Path("/"):
        raise InvalidRequest(f"no journal has the URL {parts.scheme}://...; it is one of: {JOURNAL_FORMS}")
    return SqliteJournal(path, read_only=read_only)
