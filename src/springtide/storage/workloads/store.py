"""A workload's source, checkpoints, step log, artifacts and logs in an object store, guarded by compare-and-swap.

    workloads/<id>/source/...
    workloads/<id>/folder-<digest>.zip                        the folder that was submitted with a job
    workloads/<id>/head                                       names what counts (head.py)
    workloads/<id>/checkpoints/<generation>-<step>/...
    workloads/<id>/steps/<generation>-<first step>.jsonl      never written twice
    workloads/<id>/artifacts/<generation>-<step>/<name>
    workloads/<id>/logs/<replica>.log

All other objects are written under new names; a compare-and-swap of the head makes them count. The swap of a writer
with an outdated generation fails, even if the writer was suspended in between, so that its objects are never read.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import Fenced, ObjectMissing, StorageError
from springtide.core.workload import Checkpoint, JobFolder, ReplicaId, WorkloadId
from springtide.storage.files import make_private
from springtide.storage.folders.contents import open_archive
from springtide.storage.folders.copies import make_copy
from springtide.storage.folders.tree import folder_name
from springtide.storage.step_lines import Line, is_gap
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.open import open_store
from springtide.storage.workloads.head import (
    RETIRED_GENERATION,
    Departure,
    KeptArtifact,
    KeptCheckpoint,
    WorkloadHead,
    parse_version,
    version_name,
)

# Heads are swapped a few times a second at most, so a writer that loses this often in a row has a faulty store.
_MAX_RACES = 100


def open_workload_store(url: str, workload_id: WorkloadId) -> WorkloadStore:
    """The part of the store at `url` that belongs to a workload. Raises InvalidRequest, StorageError."""
    return WorkloadStore(open_store(url), workload_id)


class WorkloadStore:
    """One workload's objects. Thread-safe. All methods raise StorageError if the store fails.

    Methods that publish take the caller's generation and raise Fenced if a newer one owns the workload.
    """

    def __init__(self, store: CheckedStore, workload_id: WorkloadId) -> None:
        self.store = store
        self.prefix = f"workloads/{workload_id}/"
        self._lock = threading.Lock()
        # The head as last read, with its version. A swap fails if it has changed since.
        self._known: tuple[WorkloadHead, str] | None = None

    def close(self) -> None:
        self.store.close()

    def key(self, *parts: str) -> str:
        return self.prefix + "/".join(parts)

    # --- the head ----------------------------------------------------------------------------------------------------

    def head(self) -> WorkloadHead:
        with self._lock:
            return self._read_head()[0]

    def raise_fence(self, generation: int) -> None:
        """Refuse all writers below `generation` from now on. A lower value changes nothing."""
        self._change(lambda head: msgspec.structs.replace(head, generation=max(head.generation, generation)))

    def _read_head(self) -> tuple[WorkloadHead, str]:
        found = self.store.get_version(self.key("head"))
        if found is None:
            known = (WorkloadHead(), "")
        else:
            try:
                known = (decode_json(found[0], WorkloadHead), found[1])
            except msgspec.MsgspecError as error:
                raise StorageError(f"{self.key('head')} is unreadable: {error}") from error
        self._known = known
        return known

    def _change(
        self, change: Callable[[WorkloadHead], WorkloadHead], generation: int | None = None
    ) -> tuple[WorkloadHead, WorkloadHead]:
        """Replace the head by `change(head)`, as `generation`. Returns the head before and after.

        `change` is called again with the newer head whenever another writer was faster.
        """
        with self._lock:
            known = self._known or self._read_head()
            for _ in range(_MAX_RACES):
                head, version = known
                if generation is not None:
                    _check_fence(head, generation)
                wanted = change(head)
                if generation is not None and generation > wanted.generation:
                    wanted = msgspec.structs.replace(wanted, generation=generation)
                if wanted == head or self._swap(wanted, version):
                    return head, wanted
                known = self._read_head()
        raise StorageError(f"{self.key('head')} was changed by others {_MAX_RACES} times in a row")

    def _swap(self, wanted: WorkloadHead, version: str) -> bool:
        data = msgspec.json.encode(wanted)
        self._known = None
        try:
            replaced = self.store.replace(self.key("head"), data, version)
        except StorageError:
            # The write may have succeeded although its answer was lost: compare with what is stored.
            found = self.store.get_version(self.key("head"))
            if found is None or found[0] != data:
                raise
            replaced = found[1]
        if replaced is None:
            return False
        self._known = (wanted, replaced)
        return True

    # --- source ------------------------------------------------------------------------------------------------------

    def put_source(self, name: str, data: bytes) -> str:
        """Write a source file, whose name may contain folders. Returns its key."""
        key = self.key("source", name)
        self.store.put(key, data)
        return key

    def fetch_source(self, main_file: str, into: Path) -> Path | None:
        """Download source files into `into`, under their keys without the workload's prefix.

        `main_file` is the key of the file to run; all files in its folder and below are downloaded. For a path that is
        not a key of this workload, the file of that name in `source/` is used. Returns the path of the main file; None
        if the store has no such file.
        """
        key = main_file if main_file.startswith(self.key("source/")) else self.key("source", Path(main_file).name)
        keys = self.store.keys(key.rpartition("/")[0] + "/")
        for found in keys:
            path = into / found.removeprefix(self.prefix)
            make_private(path.parent)
            self.store.get_file(found, path)
        return into / key.removeprefix(self.prefix) if key in keys else None

    def fetch_folder(self, folder: JobFolder, into: Path) -> Path | None:
        """Unpack the job's folder as `into`, unless it is there. Returns the job's file in it; None without an archive.

        Raises ContentDamaged, and StorageError for an archive that is another one than was submitted.
        """
        archive = into.with_name(f"{into.name}.zip")
        if not into.exists():
            make_private(into.parent)
            try:
                self.store.get_file(self.prefix + folder_name(folder), archive)
                with open_archive(archive, folder.sha256) as (tree, open_content):
                    make_copy(tree, open_content, into, directory=folder.directory)
            except ObjectMissing:
                return None
            finally:
                archive.unlink(missing_ok=True)
        return into / folder.path

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """All complete checkpoints, newest first; the path of each is the prefix of its objects."""
        return tuple(self._described(kept) for kept in self.head().checkpoints)

    def publish_checkpoint(self, generation: int, step: int, files: Mapping[str, Path]) -> Checkpoint:
        """Upload the files, make them the newest checkpoint, and delete old checkpoints."""
        head = self.head()
        kept = head.holds_checkpoint(generation, step)
        if kept is not None:
            return self._described(kept)
        _check_fence(head, generation)
        for name, path in files.items():
            self.store.put_file(self.key("checkpoints", version_name(generation, step), name), path)
        num_bytes = sum(path.stat().st_size for path in files.values())
        kept = KeptCheckpoint(generation=generation, step=step, num_bytes=num_bytes)
        _, head = self._change(lambda head: head.with_checkpoint(kept), generation)
        self._remove_old_checkpoints(head)
        return self._described(kept)

    def fetch_checkpoint(self, checkpoint: Checkpoint, names: Sequence[str], into: Path) -> Path:
        """Download files of a checkpoint into a directory of its name, and return it. Raises ObjectMissing."""
        directory = into / version_name(checkpoint.generation, checkpoint.step)
        make_private(directory)
        for name in names:
            self.store.get_file(f"{checkpoint.path}/{name}", directory / name)
        return directory

    def _described(self, kept: KeptCheckpoint) -> Checkpoint:
        path = self.key("checkpoints", kept.name)
        return Checkpoint(generation=kept.generation, step=kept.step, path=path, num_bytes=kept.num_bytes)

    def _remove_old_checkpoints(self, head: WorkloadHead) -> None:
        """Delete checkpoints that can no longer be named: of an older generation, or older than all that are kept."""
        oldest = min(((kept.generation, kept.step) for kept in head.checkpoints), default=(0, 0))
        names = {kept.name for kept in head.checkpoints}
        prefix = self.key("checkpoints/")
        to_delete = []
        for key in self.store.keys(prefix):
            name = key.removeprefix(prefix).partition("/")[0]
            version = parse_version(name)
            if name not in names and version is not None and (version < oldest or version[0] < head.generation):
                to_delete.append(key)
        if to_delete:
            self.store.delete(to_delete)

    # --- the step log ------------------------------------------------------------------------------------------------

    def log_steps(self, generation: int, lines_after: Callable[[int], Sequence[Line]], after: int | None = None) -> int:
        """Add the lines that the step log lacks. Returns the last step that it then holds.

        `lines_after(step)` returns the lines of later steps (ascending). `after` is the step of the checkpoint that the
        job was restored from, if any.
        """
        for _ in range(_MAX_RACES):
            with self._lock:
                head = (self._known or self._read_head())[0]
            _check_fence(head, generation)
            last = head.last_logged(generation, after)
            lines = lines_after(last)
            if not lines:
                return last
            upto = self._write_segment(generation, lines)

            def log_more(head: WorkloadHead, last: int = last, upto: int = upto) -> WorkloadHead:
                is_end = head.last_logged(generation, after) == last
                return head.with_logged(generation, upto) if is_end else head

            before, _ = self._change(log_more, generation)
            if before.last_logged(generation, after) == last and upto >= lines[-1][0]:
                return upto
            # Another writer has logged in between, or had written part of this segment: check again what is lacking.
        raise StorageError(f"the step log of {self.prefix} was changed by others {_MAX_RACES} times in a row")

    def _write_segment(self, generation: int, lines: Sequence[Line]) -> int:
        """Write lines as a new segment. Returns the last step in the segment of that name."""
        key = self.key("steps", f"{version_name(generation, lines[0][0])}.jsonl")
        text = "".join(line + "\n" for _, line in lines).encode()
        if self.store.put_if_absent(key, text):
            return lines[-1][0]
        # The segment exists: another writer of these steps died before it swapped the head, or this worker's own
        # earlier put succeeded although its answer was lost.
        return int(json.loads(self.store.get(key).splitlines()[-1])["step"])

    def steps(self) -> list[dict[str, Any]]:
        """The step log, in order. A step that was repeated after a restart appears once, as it was done last.

        Steps below the last one can be missing if their lines were lost before they were logged.
        """
        head = self.head()
        upto = {entry.generation: entry.step for entry in head.logged}
        prefix = self.key("steps/")
        merged: dict[int, dict[str, Any]] = {}
        for key in self.store.keys(prefix):
            version = parse_version(key.removeprefix(prefix).removesuffix(".jsonl"))
            if version is None or version[1] > upto.get(version[0], -1):
                continue
            for line in self.store.get(key).splitlines():
                record = json.loads(line)
                if record["step"] <= upto[version[0]] and not is_gap(record):
                    merged[record["step"]] = record
        return [merged[step] for step in sorted(merged)]

    # --- artifacts and logs ------------------------------------------------------------------------------------------

    def artifact_key(self, name: str, generation: int, step: int) -> str:
        return self.key("artifacts", version_name(generation, step), name)

    def publish_artifact(self, name: str, data: bytes | Path, generation: int, step: int) -> str:
        """Upload an artifact, from memory or a file, and make it the version that counts. Returns its key."""
        key = self.artifact_key(name, generation, step)
        _check_fence(self.head(), generation)
        if isinstance(data, Path):
            self.store.put_file(key, data)
        else:
            self.store.put(key, data)
        num_bytes = data.stat().st_size if isinstance(data, Path) else len(data)
        kept = KeptArtifact(generation=generation, step=step, num_bytes=num_bytes)
        before, _ = self._change(lambda head: head.with_artifact(name, kept), generation)
        old = before.artifacts.get(name)
        if old is not None and self.artifact_key(name, old.generation, old.step) != key:
            self.store.delete([self.artifact_key(name, old.generation, old.step)])
        return key

    def artifacts(self) -> dict[str, str]:
        """The keys of all artifacts that count, by name."""
        found = self.head().artifacts
        return {name: self.artifact_key(name, kept.generation, kept.step) for name, kept in found.items()}

    def read_artifact(self, name: str) -> bytes:
        """The artifact's bytes. Raises ObjectMissing."""
        key = self.artifacts().get(name)
        if key is None:
            raise ObjectMissing(f"there is no artifact {name} of this workload yet")
        return self.store.get(key)

    def put_log(self, replica_id: ReplicaId, data: bytes) -> None:
        self.store.put(self.log_key(replica_id), data)

    def put_log_if_absent(self, replica_id: ReplicaId, data: bytes) -> bool:
        """Store a replica's output unless it exists. Returns whether it was stored; a retired workload stores none."""
        if self.head().generation == RETIRED_GENERATION:
            return False
        return self.store.put_if_absent(self.log_key(replica_id), data)

    def read_log(self, replica_id: ReplicaId) -> bytes:
        """A replica's output. Raises ObjectMissing if the replica has not ended yet."""
        return self.store.get(self.log_key(replica_id))

    def log_key(self, replica_id: ReplicaId) -> str:
        return self.key("logs", f"{replica_id}.log")

    def set_departure(self, departure: Departure) -> None:
        """Record when the workload is to be retired. Does nothing for a retired one."""
        self._change(
            lambda head: (
                head if head.generation == RETIRED_GENERATION else msgspec.structs.replace(head, departure=departure)
            )
        )

    def retire(self, *, keeps_artifacts: bool) -> int:
        """Delete the objects of an ended workload. Returns how many there were. Idempotent.

        The head stays, with a fence above every generation, so that writers that are still suspended are refused when
        they resume. With `keeps_artifacts` the artifacts that count stay, too.
        """
        if not self.store.keys(self.prefix):
            return 0

        def ended(head: WorkloadHead) -> WorkloadHead:
            kept = head.artifacts if keeps_artifacts else {}
            return WorkloadHead(generation=RETIRED_GENERATION, artifacts=kept, departure=head.departure)

        _, head = self._change(ended)
        kept = {
            self.artifact_key(name, artifact.generation, artifact.step) for name, artifact in head.artifacts.items()
        }
        to_delete = [key for key in self.store.keys(self.prefix) if key not in kept and key != self.key("head")]
        if to_delete:
            self.store.delete(to_delete)
        # Cleared last: as long as the head has a departure, objects may be left.
        self._change(lambda head: msgspec.structs.replace(head, departure=None))
        return len(to_delete)

    def remove(self) -> None:
        with self._lock:
            self._known = None
            self.store.delete(self.store.keys(self.prefix))


def _check_fence(head: WorkloadHead, generation: int) -> None:
    # A cached head can only have a fence that is too low, so a refusal based on it is final.
    if generation < head.generation:
        raise Fenced(f"generation {generation} may not write: generation {head.generation} owns the workload")
