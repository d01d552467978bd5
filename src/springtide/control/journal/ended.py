"""The jobs that ended long ago: each in a row of its own, found by id, name or the key of its submission.

Nothing is decided by them. A row that is not as it was written is left out.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import pack
from typing import Any, Protocol

import msgspec

from springtide.control.journal.database import Database
from springtide.control.records import JobRecord
from springtide.core.workload import WorkloadId

TABLES = (
    "CREATE TABLE IF NOT EXISTS @ended (id TEXT PRIMARY KEY, ended_at_s REAL NOT NULL, owner TEXT NOT NULL, "
    "name TEXT NOT NULL, submit_key TEXT NOT NULL, record BLOB NOT NULL, checksum BLOB NOT NULL) STRICT",
    "CREATE INDEX IF NOT EXISTS @ended_by_time ON @ended (ended_at_s)",
    "CREATE INDEX IF NOT EXISTS @ended_by_name ON @ended (name, ended_at_s)",
    "CREATE INDEX IF NOT EXISTS @ended_by_key ON @ended (submit_key)",
    # Of a job that retention has dropped: the hash of its id, and when it ended.
    "CREATE TABLE IF NOT EXISTS @dropped (id_hash INTEGER PRIMARY KEY, ended_at_s REAL NOT NULL) STRICT",
)
_COLUMNS = "id, ended_at_s, record, checksum"
_DROPPED_AT_ONCE = 5_000
# That a job was dropped is known for so many times as long as it was kept itself.
_DROPPED_KEPT = 10


class EndedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job's last record, and what readers of the journal keep of it, by name."""

    record: JobRecord
    kept: dict[str, bytes] = {}


class EndedJobsLike(Protocol):
    """The jobs that ended long ago and left the state. Thread-safe; every method raises JournalError."""

    def get(self, job_id: WorkloadId) -> EndedJob | None:
        """The job of that id."""
        ...

    def named(self, name: str, limit: int) -> Sequence[JobRecord]:
        """The jobs of that name, the newest first."""
        ...

    def with_key(self, key: str) -> JobRecord | None:
        """The job that was submitted with a key of which the journal holds this digest."""
        ...

    def newest(self, limit: int) -> Sequence[JobRecord]:
        """The jobs that ended last, the newest first."""
        ...

    def count(self) -> int:
        """How many there are."""
        ...

    def dropped_at_s(self, job_id: WorkloadId) -> float | None:
        """When a job ended that retention has dropped; None if no such job is known."""
        ...


class NoEndedJobs:
    """For a platform whose journal keeps none apart."""

    def get(self, job_id: WorkloadId) -> EndedJob | None:
        """None."""
        return None

    def named(self, name: str, limit: int) -> Sequence[JobRecord]:
        """None."""
        return ()

    def with_key(self, key: str) -> JobRecord | None:
        """None."""
        return None

    def newest(self, limit: int) -> Sequence[JobRecord]:
        """None."""
        return ()

    def count(self) -> int:
        """None."""
        return 0

    def dropped_at_s(self, job_id: WorkloadId) -> float | None:
        """None."""
        return None


class EndedJobs:
    """The tables of one journal."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def put(self, jobs: Sequence[EndedJob]) -> None:
        """Keep these jobs. One that is there already is replaced. Raises JournalError, Superseded."""
        genesis = self._db.genesis().chain
        with self._db.transaction():
            for ended in jobs:
                job, at_s = ended.record.job, ended.record.lifecycle.ended_at_s or 0.0
                content = zlib.compress(msgspec.msgpack.encode(ended), 1)
                self._db.query("DELETE FROM @ended WHERE id = ?", job.job_id)
                self._db.query(
                    "INSERT INTO @ended (id, ended_at_s, owner, name, submit_key, record, checksum) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    *(job.job_id, at_s, _owner(ended.record), job.name, _key(job.submit_key), content),
                    _checksum(genesis, job.job_id, at_s, content),
                )

    def get(self, job_id: WorkloadId) -> EndedJob | None:
        """The job of that id; None if there is none. Raises JournalError."""
        return next(self._found("id = ?", job_id), None)

    def named(self, name: str, limit: int) -> Sequence[JobRecord]:
        """The jobs of that name, the newest first. Raises JournalError."""
        return [job.record for job in self._found("name = ? ORDER BY ended_at_s DESC LIMIT ?", name, limit)]

    def with_key(self, key: str) -> JobRecord | None:
        """The job that was submitted with a key of which the journal holds this digest. Raises JournalError."""
        return next((job.record for job in self._found("submit_key = ?", key)), None) if key else None

    def newest(self, limit: int) -> Sequence[JobRecord]:
        """The jobs that ended last, the newest first. Raises JournalError."""
        return [job.record for job in self._found("id <> '' ORDER BY ended_at_s DESC LIMIT ?", limit)]

    def count(self) -> int:
        """How many there are. Raises JournalError."""
        return int(self._db.query("SELECT count(*) FROM @ended")[0][0])

    def damaged(self) -> list[str]:
        """The ids of rows that are not as they were written. Raises JournalError."""
        genesis, damaged = self._db.genesis().chain, []
        for (job_id,) in self._db.query("SELECT id FROM @ended ORDER BY id"):
            for row in self._db.query(f"SELECT {_COLUMNS} FROM @ended WHERE id = ?", job_id):
                if _decoded(genesis, *_plain(row)) is None:
                    damaged.append(str(job_id))
        return damaged

    def dropped_at_s(self, job_id: WorkloadId) -> float | None:
        """When a job ended that retention has dropped; None if no such job is known. Raises JournalError."""
        found = self._db.query("SELECT ended_at_s FROM @dropped WHERE id_hash = ?", _hash(job_id))
        return float(found[0][0]) if found else None

    def drop(self, ended_s: float, now_s: float) -> None:
        """Drop the jobs that ended longer than `ended_s` ago, and note their ids. Raises JournalError, Superseded."""
        while ids := self._db.query(
            "SELECT id, ended_at_s FROM @ended WHERE ended_at_s < ? ORDER BY ended_at_s LIMIT ?",
            *(now_s - ended_s, _DROPPED_AT_ONCE),
        ):
            with self._db.transaction():
                for job_id, at_s in ids:
                    self._db.query("DELETE FROM @dropped WHERE id_hash = ?", _hash(job_id))
                    self._db.query("INSERT INTO @dropped (id_hash, ended_at_s) VALUES (?, ?)", _hash(job_id), at_s)
                    self._db.query("DELETE FROM @ended WHERE id = ?", job_id)
        forgotten_s = now_s - _DROPPED_KEPT * ended_s
        if forgotten_s > 0.0:
            self._db.query("DELETE FROM @dropped WHERE ended_at_s < ?", forgotten_s)

    def _found(self, where: str, *values: Any) -> Iterator[EndedJob]:
        genesis = self._db.genesis().chain
        for row in self._db.query(f"SELECT {_COLUMNS} FROM @ended WHERE {where}", *values):
            found = _decoded(genesis, *_plain(row))
            if found is not None:
                yield found


def kept_of(jobs: EndedJobsLike, job_id: WorkloadId) -> Mapping[str, bytes]:
    """What readers of the journal keep of a job that left the state."""
    found = jobs.get(job_id)
    return {} if found is None else found.kept


def _plain(row: tuple[Any, ...]) -> tuple[str, float, bytes, bytes]:
    job_id, at_s, content, checksum = row
    return str(job_id), float(at_s), bytes(content), bytes(checksum)


# Lists show the same ones again and again.
@lru_cache(maxsize=2_000)
def _decoded(genesis: bytes, job_id: str, at_s: float, content: bytes, checksum: bytes) -> EndedJob | None:
    if _checksum(genesis, job_id, at_s, content) != checksum:
        return None
    try:
        return msgspec.msgpack.decode(zlib.decompress(content), type=EndedJob)
    except (ValueError, TypeError, RecursionError, zlib.error):
        return None


def _checksum(genesis: bytes, job_id: str, at_s: float, content: bytes) -> bytes:
    return blake2b(pack(">d", at_s) + job_id.encode() + b"\0" + content, key=genesis, digest_size=16).digest()


def _hash(job_id: str) -> int:
    return int.from_bytes(blake2b(job_id.encode(), digest_size=8).digest(), "big", signed=True)


def _key(submit_key: str) -> str:
    """The digest of the key alone, without that of the request."""
    return submit_key.partition(".")[0]


def _owner(record: JobRecord) -> str:
    return "" if record.job.container is None else record.job.container.owner_name
