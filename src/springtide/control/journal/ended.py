"""The workloads that ended long ago, each in a row of its own.

A job is found by its id, its name, its code, the key of its submission or the Kubernetes object that it stands for, a
removed service by its id. No plan depends on them. A row that is not as it was written is left out.
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
from springtide.control.records import JobRecord, ServiceRecord
from springtide.core.decoding import decode_msgpack
from springtide.core.errors import JournalError
from springtide.core.workload import WorkloadId

TABLES = (
    # `owner` is the uid of the job's object, as long as that may be there: until then the row is not dropped.
    "CREATE TABLE IF NOT EXISTS @ended (id TEXT PRIMARY KEY, ended_at_s REAL NOT NULL, owner TEXT NOT NULL, "
    "name TEXT NOT NULL, submit_key TEXT NOT NULL, record BLOB NOT NULL, checksum BLOB NOT NULL) STRICT",
    "CREATE INDEX IF NOT EXISTS @ended_by_time ON @ended (ended_at_s)",
    "CREATE INDEX IF NOT EXISTS @ended_by_name ON @ended (name, ended_at_s)",
    "CREATE INDEX IF NOT EXISTS @ended_by_key ON @ended (submit_key)",
    "CREATE INDEX IF NOT EXISTS @ended_by_owner ON @ended (owner)",
    # The code that a job ran. Jobs that were put here by older versions have no row.
    "CREATE TABLE IF NOT EXISTS @ended_code (id TEXT PRIMARY KEY, ended_at_s REAL NOT NULL, code TEXT NOT NULL) STRICT",
    "CREATE INDEX IF NOT EXISTS @ended_code_by_code ON @ended_code (code, ended_at_s)",
    # Of a job that retention has dropped: the hash of its id, and when it ended.
    "CREATE TABLE IF NOT EXISTS @dropped (id_hash INTEGER PRIMARY KEY, ended_at_s REAL NOT NULL) STRICT",
)
_COLUMNS = "id, ended_at_s, record, checksum"
_SERVICE = "service "
_DROPPED_AT_ONCE = 5_000
# That a job was dropped is known for so many times as long as it was kept itself.
_DROPPED_KEPT = 10


class EndedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job's last record, and what readers of the journal keep of it, by name."""

    record: JobRecord
    kept: dict[str, bytes] = {}


class EndedService(msgspec.Struct, frozen=True, kw_only=True):
    """The last record of a service that was removed, and what readers of the journal keep of it, by name."""

    record: ServiceRecord
    kept: dict[str, bytes] = {}


Ended = EndedJob | EndedService


class EndedJobsLike(Protocol):
    """The workloads that ended long ago and left the state. Thread-safe; every method raises JournalError."""

    def get(self, job_id: WorkloadId) -> EndedJob | None:
        """The job of that id."""
        ...

    def named(self, name: str, limit: int) -> Sequence[JobRecord]:
        """The jobs of that name, the newest first."""
        ...

    def of_code(self, code: str, limit: int) -> Sequence[JobRecord]:
        """The jobs that ran that code (TrainingJob.code), the newest first, whatever their names."""
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

    def service(self, service_id: WorkloadId) -> EndedService | None:
        """The service of that id, as it was when it was removed last."""
        ...

    def of_owner(self, uid: str) -> JobRecord | None:
        """The job that stands for the object of that uid. Raises also if its row was changed."""
        ...

    def owned(self) -> Sequence[tuple[WorkloadId, str]]:
        """The jobs whose objects may still be there, and the uids of these."""
        ...

    def release(self, job_id: WorkloadId) -> None:
        """The job's object is gone for good: retention may drop the job. Raises Superseded."""
        ...


class NoEndedJobs:
    """For a platform whose journal keeps none apart."""

    def get(self, job_id: WorkloadId) -> EndedJob | None:
        """None."""
        return None

    def named(self, name: str, limit: int) -> Sequence[JobRecord]:
        """None."""
        return ()

    def of_code(self, code: str, limit: int) -> Sequence[JobRecord]:
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

    def service(self, service_id: WorkloadId) -> EndedService | None:
        """None."""
        return None

    def of_owner(self, uid: str) -> JobRecord | None:
        """None."""
        return None

    def owned(self) -> Sequence[tuple[WorkloadId, str]]:
        """None."""
        return ()

    def release(self, job_id: WorkloadId) -> None:
        """Does nothing."""


class EndedJobs:
    """The tables of one journal."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def put(self, workloads: Sequence[Ended]) -> None:
        """Keep these workloads. One that is there already is replaced. Raises JournalError, Superseded."""
        genesis = self._db.genesis().chain
        with self._db.transaction():
            for ended in workloads:
                row_id, at_s, *columns = _columns_of(ended)
                content = zlib.compress(msgspec.msgpack.encode(ended), 1)
                self._db.query("DELETE FROM @ended WHERE id = ?", row_id)
                self._db.query(
                    "INSERT INTO @ended (id, ended_at_s, owner, name, submit_key, record, checksum) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    *(row_id, at_s, *columns, content, _checksum(genesis, row_id, at_s, content)),
                )
                if code := _code_of(ended):
                    self._db.query("DELETE FROM @ended_code WHERE id = ?", row_id)
                    self._db.query(
                        "INSERT INTO @ended_code (id, ended_at_s, code) VALUES (?, ?, ?)", row_id, at_s, code
                    )

    def get(self, job_id: WorkloadId) -> EndedJob | None:
        """The job of that id; None if there is none. Raises JournalError."""
        return next(self._jobs("id = ?", job_id), None)

    def named(self, name: str, limit: int) -> Sequence[JobRecord]:
        """The jobs of that name, the newest first. Raises JournalError."""
        return [job.record for job in self._jobs("name = ? ORDER BY ended_at_s DESC LIMIT ?", name, limit)]

    def of_code(self, code: str, limit: int) -> Sequence[JobRecord]:
        """The jobs that ran that code, the newest first. Raises JournalError."""
        newest = "SELECT id FROM @ended_code WHERE code = ? ORDER BY ended_at_s DESC LIMIT ?"
        found = self._jobs(f"id IN ({newest}) ORDER BY ended_at_s DESC", code, limit) if code else ()
        return [job.record for job in found if job.record.job.code == code]

    def with_key(self, key: str) -> JobRecord | None:
        """The job that was submitted with a key of which the journal holds this digest. Raises JournalError."""
        return next((job.record for job in self._jobs("submit_key = ?", key)), None) if key else None

    def newest(self, limit: int) -> Sequence[JobRecord]:
        """The jobs that ended last, the newest first. Raises JournalError."""
        return [job.record for job in self._jobs("name <> '' ORDER BY ended_at_s DESC LIMIT ?", limit)]

    def count(self) -> int:
        """How many jobs there are. Raises JournalError."""
        return int(self._db.query("SELECT count(*) FROM @ended WHERE name <> ''")[0][0])

    def service(self, service_id: WorkloadId) -> EndedService | None:
        """The service of that id, as it was when it was removed last; None if there is none. Raises JournalError."""
        found = next(self._found("id = ?", _service_row(service_id)), None)
        return found if isinstance(found, EndedService) else None

    def of_owner(self, uid: str) -> JobRecord | None:
        """The job that stands for the object of that uid; None if there is none.

        Raises JournalError also if its row was changed: the object must not be taken for a new one.
        """
        found = next(self._jobs("owner = ?", uid), None) if uid else None
        if found is None and uid and (rows := self._db.query("SELECT id FROM @ended WHERE owner = ?", uid)):
            raise JournalError(f"the record of {rows[0][0]}, which has ended, was changed: springtide journal check")
        return None if found is None else found.record

    def owned(self) -> Sequence[tuple[WorkloadId, str]]:
        """The jobs whose objects may still be there, and the uids of these. Raises JournalError."""
        rows = self._db.query("SELECT id, owner FROM @ended WHERE owner <> '' ORDER BY id")
        return [(WorkloadId(str(job_id)), str(uid)) for job_id, uid in rows]

    def release(self, job_id: WorkloadId) -> None:
        """The job's object is gone for good: retention may drop the job. Raises JournalError, Superseded."""
        with self._db.transaction():
            self._db.query("UPDATE @ended SET owner = '' WHERE id = ?", job_id)

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
        """Drop what ended longer than `ended_s` ago, and note the ids. Raises JournalError, Superseded.

        A job whose object may still be there stays, or the object would be taken for a new one.
        """
        while ids := self._db.query(
            "SELECT id, ended_at_s FROM @ended WHERE ended_at_s < ? AND owner = '' ORDER BY ended_at_s LIMIT ?",
            *(now_s - ended_s, _DROPPED_AT_ONCE),
        ):
            with self._db.transaction():
                for job_id, at_s in ids:
                    self._db.query("DELETE FROM @dropped WHERE id_hash = ?", _hash(job_id))
                    self._db.query("INSERT INTO @dropped (id_hash, ended_at_s) VALUES (?, ?)", _hash(job_id), at_s)
                    self._db.query("DELETE FROM @ended WHERE id = ?", job_id)
                    self._db.query("DELETE FROM @ended_code WHERE id = ?", job_id)
        forgotten_s = now_s - _DROPPED_KEPT * ended_s
        if forgotten_s > 0.0:
            self._db.query("DELETE FROM @dropped WHERE ended_at_s < ?", forgotten_s)

    def _jobs(self, where: str, *values: Any) -> Iterator[EndedJob]:
        return (found for found in self._found(where, *values) if isinstance(found, EndedJob))

    def _found(self, where: str, *values: Any) -> Iterator[Ended]:
        genesis = self._db.genesis().chain
        for row in self._db.query(f"SELECT {_COLUMNS} FROM @ended WHERE {where}", *values):
            found = _decoded(genesis, *_plain(row))
            if found is not None:
                yield found


def kept_of(ended: EndedJobsLike, workload_id: WorkloadId) -> Mapping[str, bytes]:
    """What readers of the journal keep of a workload that left the state."""
    found = ended.get(workload_id) or ended.service(workload_id)
    return {} if found is None else found.kept


def _plain(row: tuple[Any, ...]) -> tuple[str, float, bytes, bytes]:
    job_id, at_s, content, checksum = row
    return str(job_id), float(at_s), _bytes(content), _bytes(checksum)


def _bytes(value: Any) -> bytes:
    """The bytes of a column; none where damage has made something else of it."""
    return bytes(value) if isinstance(value, bytes | bytearray | memoryview) else b""


# Lists show the same ones again and again.
@lru_cache(maxsize=2_000)
def _decoded(genesis: bytes, row_id: str, at_s: float, content: bytes, checksum: bytes) -> Ended | None:
    if _checksum(genesis, row_id, at_s, content) != checksum:
        return None
    kind: type[Ended] = EndedService if row_id.startswith(_SERVICE) else EndedJob
    try:
        return decode_msgpack(zlib.decompress(content), kind)
    except (ValueError, TypeError, RecursionError, zlib.error):
        return None


def _checksum(genesis: bytes, row_id: str, at_s: float, content: bytes) -> bytes:
    return blake2b(pack(">d", at_s) + row_id.encode() + b"\0" + content, key=genesis, digest_size=16).digest()


def _hash(job_id: str) -> int:
    return int.from_bytes(blake2b(job_id.encode(), digest_size=8).digest(), "big", signed=True)


def _key(submit_key: str) -> str:
    """The digest of the key alone, without that of the request."""
    return submit_key.partition(".")[0]


def _columns_of(ended: Ended) -> tuple[str, float, str, str, str]:
    """Id, time of the end, owner, name and key of a row."""
    if isinstance(ended, EndedService):
        # Without a name it is in no list of jobs.
        return _service_row(ended.record.workload_id), ended.record.removed_at_s or 0.0, "", "", ""
    job = ended.record.job
    uid = "" if job.container is None else job.container.owner_uid
    return job.job_id, ended.record.lifecycle.ended_at_s or 0.0, uid, job.name, _key(job.submit_key)


def _code_of(ended: Ended) -> str:
    return ended.record.job.code if isinstance(ended, EndedJob) else ""


def _service_row(service_id: WorkloadId) -> str:
    """The id of a service's row, which no job has: names have no blanks."""
    return _SERVICE + service_id
