"""The durable record of each worker, by which a restarted control plane verifies it and adopts or ends it."""

from __future__ import annotations

import logging
from pathlib import Path
from urllib.parse import quote

import msgspec

from springtide.backends.processes import ProcessIdentity
from springtide.core.decoding import decode_json
from springtide.core.workload import ReplicaId, WorkloadId
from springtide.storage.files import make_private, write_durable

_log = logging.getLogger(__name__)


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's identity. `process` None: the record was written before the process was started.

    `share_slot` is the slot in which it reports its activity (None: it has its device to itself).
    """

    replica_id: ReplicaId
    workload_id: WorkloadId
    generation: int
    token_sha256: str
    process: ProcessIdentity | None = None
    share_slot: int | None = None


class WorkerRecords:
    """The records under one directory, a file for each replica."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        make_private(directory)

    def write(self, record: WorkerRecord) -> None:
        """Make a record durable. Raises StorageError."""
        write_durable(self._path(record.replica_id), msgspec.json.encode(record))

    def remove(self, replica_id: ReplicaId) -> None:
        """Remove the record of a replica, if there is one."""
        try:
            self._path(replica_id).unlink(missing_ok=True)
        except OSError as error:
            # The next recovery finds that the record's process is gone.
            _log.warning("cannot remove the record of %s: %s", replica_id, error.strerror)

    def read_all(self) -> dict[ReplicaId, WorkerRecord]:
        """Return every record; unreadable ones are removed."""
        records = {}
        for path in sorted(self._directory.glob("*.json")):
            try:
                record = decode_json(path.read_bytes(), WorkerRecord)
            except (OSError, ValueError, RecursionError):
                path.unlink(missing_ok=True)
                continue
            records[record.replica_id] = record
        return records

    def spec_path(self, replica_id: ReplicaId) -> Path:
        """The file with the spec of a worker that is started by command, until it has connected."""
        return self._directory / f"{quote(replica_id, safe='')}.spec"

    def _path(self, replica_id: ReplicaId) -> Path:
        return self._directory / f"{quote(replica_id, safe='')}.json"
