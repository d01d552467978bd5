"""The chain of hashes over a journal's rows: rows that were changed, removed or added by other hands are found.

SQLite and PostgreSQL check the structure of their files, not what the rows say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from struct import pack
from typing import NamedTuple

from springtide.core.errors import JournalDamaged

# What a platform's journal is founded with: when its clock began, and on that clock the local midnight before.
CLOCK_BEGAN, MIDNIGHT = "clock_began_unix_s", "midnight_s"
# Metadata that may change after the first step, and is not among what the journal was founded with.
CHANGING_KEYS = ("schema", "term", "intake")
_SIZE = 16


class JournalMark(NamedTuple):
    """A place in a journal: the number of a step (0: before the first one) and the chain's value there."""

    seq: int
    chain: bytes


class Row(NamedTuple):
    """A step as it is stored. `chain` covers all before it and the other fields."""

    seq: int
    term: int
    now_s: float
    step: bytes
    chain: bytes


def genesis(facts: Mapping[str, str]) -> JournalMark:
    """Where a chain begins, which depends on what the journal was founded with: `facts` less CHANGING_KEYS."""
    digest = blake2b(digest_size=_SIZE)
    for key, value in sorted((key, value) for key, value in facts.items() if key not in CHANGING_KEYS):
        for text in (key.encode(), value.encode()):
            digest.update(pack(">Q", len(text)) + text)
    return JournalMark(0, digest.digest())


def link(previous: JournalMark, term: int, now_s: float, step: bytes) -> Row:
    """The row that follows `previous`."""
    seq = previous.seq + 1
    digest = blake2b(pack(">QQd", seq, term, now_s), key=previous.chain, digest_size=_SIZE)
    digest.update(step)
    return Row(seq, term, now_s, step, digest.digest())


def follow(rows: Iterable[Row], previous: JournalMark) -> Iterator[Row]:
    """The rows, each after it was compared with the chain from `previous` on. Raises JournalDamaged."""
    for row in rows:
        if row.seq != previous.seq + 1:
            raise JournalDamaged(
                previous.seq + 1, f"step {previous.seq + 1} of the journal is missing: step {row.seq} stands there"
            )
        if not _is_typed(row) or link(previous, row.term, row.now_s, row.step).chain != row.chain:
            where = " or what the journal was founded with" if row.seq == 1 else ""
            raise JournalDamaged(row.seq, f"step {row.seq} of the journal{where} was changed after it was written")
        yield row
        previous = JournalMark(row.seq, row.chain)


def _is_typed(row: Row) -> bool:
    return isinstance(row.step, bytes) and isinstance(row.term, int) and isinstance(row.now_s, float)
