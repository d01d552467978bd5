"""Segments: consecutive steps of a journal, compressed, which only readers of the past want."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from struct import Struct, error
from typing import NamedTuple, Protocol

from springtide.control.journal.chain import JournalMark, Row, link
from springtide.control.journal.database import Database
from springtide.core.errors import JournalDamaged, JournalError, StorageError
from springtide.storage.files import make_private, write_durable

_HEAD = Struct(">QdI")
_NAME = re.compile(r"(\d+)-(\d+)\.z")


class Segment(NamedTuple):
    """The steps from `first_seq` to `last_seq`, and the chain before and after them."""

    first_seq: int
    last_seq: int
    chain_in: bytes
    chain_out: bytes
    sha256: bytes
    num_bytes: int
    last_s: float


class SegmentStore(Protocol):
    """Where the contents of segments are kept. Every method raises JournalError."""

    def write(self, segment: Segment, content: bytes) -> None:
        """Keep a content; it is durable when this returns."""
        ...

    def read(self, segment: Segment) -> bytes | None:
        """The content; None if there is none."""
        ...

    def keep_only(self, segments: Sequence[Segment]) -> None:
        """Delete the contents of all others."""
        ...


def packed(rows: Sequence[Row], chain_in: bytes) -> tuple[Segment, bytes]:
    """Rows that follow each other, of which the first continues `chain_in`, as a segment and its content."""
    content = zlib.compress(b"".join(_HEAD.pack(row.term, row.now_s, len(row.step)) + row.step for row in rows), 6)
    segment = Segment(
        first_seq=rows[0].seq,
        last_seq=rows[-1].seq,
        chain_in=chain_in,
        chain_out=rows[-1].chain,
        sha256=sha256(content).digest(),
        num_bytes=len(content),
        last_s=rows[-1].now_s,
    )
    return segment, content


def rows_of(segment: Segment, content: bytes | None) -> Iterator[Row]:
    """The rows of a segment, after all of them were compared with the chain at both ends. Raises JournalDamaged."""
    name = f"the segment of steps {segment.first_seq} to {segment.last_seq}"
    if content is None:
        raise JournalDamaged(segment.first_seq, f"{name} is missing")
    rows = []
    at = JournalMark(segment.first_seq - 1, segment.chain_in)
    try:
        if sha256(content).digest() == segment.sha256:
            for term, now_s, step in _unpacked(zlib.decompress(content)):
                rows.append(link(at, term, now_s, step))
                at = JournalMark(rows[-1].seq, rows[-1].chain)
    except (error, zlib.error, ValueError, TypeError):
        rows = []
    if not rows or at != (segment.last_seq, segment.chain_out):
        raise JournalDamaged(segment.first_seq, f"{name} was changed after it was written")
    yield from rows


def _unpacked(data: bytes) -> Iterator[tuple[int, float, bytes]]:
    at = 0
    while at < len(data):
        term, now_s, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        yield term, now_s, data[at : at + size]
        at += size


class SegmentFolder:
    """Segments as files `FIRST-LAST.z` of one folder."""

    def __init__(self, folder: Path) -> None:
        """The folder is made with the first segment."""
        self._folder = folder

    def write(self, segment: Segment, content: bytes) -> None:
        """Write the file and make it durable before it has its name."""
        try:
            make_private(self._folder)
            write_durable(self._path(segment), content)
        except (OSError, StorageError) as failure:
            raise JournalError(str(failure)) from failure

    def read(self, segment: Segment) -> bytes | None:
        """The file's content; None if there is no file."""
        try:
            return self._path(segment).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as failure:
            raise JournalError(f"{self._path(segment)} cannot be read: {failure.strerror}") from failure

    def keep_only(self, segments: Sequence[Segment]) -> None:
        """Delete the other files of segments, also those of which a crash kept the table from naming them."""
        kept = {self._path(segment).name for segment in segments}
        try:
            for path in self._folder.iterdir() if self._folder.is_dir() else ():
                if path.name not in kept and (_NAME.fullmatch(path.name) or path.name.endswith(".tmp")):
                    path.unlink(missing_ok=True)
        except OSError as failure:
            raise JournalError(f"{self._folder} cannot be cleared: {failure.strerror}") from failure

    def _path(self, segment: Segment) -> Path:
        return self._folder / f"{segment.first_seq}-{segment.last_seq}.z"


class SegmentTable:
    """Segments as rows of a table."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def write(self, segment: Segment, content: bytes) -> None:
        """Write the row."""
        with self._db.transaction():
            self._db.query("DELETE FROM @segment_contents WHERE first_seq = ?", segment.first_seq)
            self._db.query(
                "INSERT INTO @segment_contents (first_seq, last_seq, content) VALUES (?, ?, ?)",
                *(segment.first_seq, segment.last_seq, content),
            )

    def read(self, segment: Segment) -> bytes | None:
        """The row's content; None if there is no row."""
        found = self._db.query(
            "SELECT content FROM @segment_contents WHERE first_seq = ? AND last_seq = ?",
            *(segment.first_seq, segment.last_seq),
        )
        return bytes(found[0][0]) if found else None

    def keep_only(self, segments: Sequence[Segment]) -> None:
        """Delete the rows of all others."""
        kept = {(segment.first_seq, segment.last_seq) for segment in segments}
        for first_seq, last_seq in self._db.query("SELECT first_seq, last_seq FROM @segment_contents"):
            if (first_seq, last_seq) not in kept:
                with self._db.transaction():
                    self._db.query("DELETE FROM @segment_contents WHERE first_seq = ?", first_seq)
