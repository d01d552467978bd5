"""What the tables beside a journal's steps need of a database, of whichever kind."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from springtide.control.journal.chain import JournalMark


class Database(Protocol):
    """Statements have `?` for values and `@` before the names of tables."""

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a statement. Raises JournalError."""
        ...

    def transaction(self) -> AbstractContextManager[None]:
        """All statements inside are done, or none. Raises JournalError, Superseded."""
        ...

    def genesis(self) -> JournalMark:
        """Where the chain begins."""
        ...
