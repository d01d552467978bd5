"""A workload's source, checkpoints, step log, artifacts and logs in an object store, guarded by compare-and-swap.

    workloads/<id>/source/...
    workloads/<id>/head                                       what counts (workload_head.py)
    workloads/<id>/checkpoints/<generation>-<step>/...
    workloads/<id>/steps/<generation>-<first step>.jsonl      never written twice
    workloads/<id>/artifacts/<generation>-<step>/<name>
    workloads/<id>/logs/<replica>.log

Everything but the head is written under a name that nothing refers to yet; one swap of the head makes it count. A
writer whose generation is over fails to swap, however long it slept in between, so that nothing it does is ever seen.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from springtide.core.errors import Fenced, ObjectMissing, StorageError
from springtide.core.workload import Checkpoint, ReplicaId, WorkloadId
from springtide.storage.step_lines import Line, is_gap
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.open import open_store
from springtide.storage.workloads.head import (
    NOBODYS_GENERATION,
    Departure,
    KeptArtifact,
    KeptCheckpoint,
    WorkloadHead,
    parse_version,
    version_name,
)

# Swaps of one head are a few a second at most: a writer loses so often in a row only if the store breaks its promise.
_MAX_RACES = 100


def open_workload_store(url: str, workload_id: WorkloadId) -> WorkloadStore:
    """The part of the store at `url` that belongs to a workload. Raises InvalidRequest, StorageError."""
    return WorkloadStore(open_store(url), workload_id)


class WorkloadStore:
    """One workload's objects. Thread-safe. All methods raise StorageError where the store does not do as it should.

    Methods that publish take the generation as which they do, and raise Fenced where a newer one owns the workload.
    """

    def __init__(self, store: CheckedStore, workload_id: WorkloadId) -> None:
        self.store = store
        self.prefix = f"workloads/{workload_id}/"
        self._lock = threading.Lock()
        # The head as it was last seen; a swap finds out whether it still is.
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
                known = (msgspec.json.decode(found[0], type=WorkloadHead), found[1])
            except msgspec.MsgspecError as error:
                raise StorageError(f"{self.key('head')} is unreadable: {error}") from error
        self._known = known
        return known

    def _change(
        self, change: Callable[[WorkloadHead], WorkloadHead], generation: int | None = None
    ) -> tuple[WorkloadHead, WorkloadHead]:
        """Replace the head by what `change` makes of it, as `generation`; the head before and after.

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
            # The answer may be lost, not the write: what is there says so.
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
        """Write a file of the source, which may have folders in its name; returns its key."""
        key = self.key("source", name)
        self.store.put(key, data)
        return key

    def fetch_source(self, main_file: str, into: Path) -> Path | None:
        """Write a source's files below `into`, under their keys without the workload's prefix.

        `main_file` is the key of the file to run; those beside and below it come along. Of a path that is no key of
        this workload the name counts, and the file lies in `source/`. Returns where the main file is then; None where
        the store has no such file.
        """
        key = main_file if main_file.startswith(self.key("source/")) else self.key("source", Path(main_file).name)
        keys = self.store.keys(key.rpartition("/")[0] + "/")
        for found in keys:
            path = into / found.removeprefix(self.prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            self.store.get_file(found, path)
        return into / key.removeprefix(self.prefix) if key in keys else None

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """All whole checkpoints, newest first; the path of each is the prefix of its objects."""
        return tuple(self._described(kept) for kept in self.head().checkpoints)

    def publish_checkpoint(self, generation: int, step: int, files: Mapping[str, Path]) -> Checkpoint:
        """Upload the files, then make them the newest checkpoint, and take away what is too old by then."""
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
        """Download these files of a checkpoint into a directory of its name; returns that. Raises ObjectMissing."""
        directory = into / version_name(checkpoint.generation, checkpoint.step)
        directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            self.store.get_file(f"{checkpoint.path}/{name}", directory / name)
        return directory

    def _described(self, kept: KeptCheckpoint) -> Checkpoint:
        path = self.key("checkpoints", kept.name)
        return Checkpoint(generation=kept.generation, step=kept.step, path=path, num_bytes=kept.num_bytes)

    def _remove_old_checkpoints(self, head: WorkloadHead) -> None:
        """Whatever is not kept and can never be: of an older generation, or older than all that are kept."""
        oldest = min(((kept.generation, kept.step) for kept in head.checkpoints), default=(0, 0))
        names = {kept.name for kept in head.checkpoints}
        prefix = self.key("checkpoints/")
        doomed = []
        for key in self.store.keys(prefix):
            name = key.removeprefix(prefix).partition("/")[0]
            version = parse_version(name)
            if name not in names and version is not None and (version < oldest or version[0] < head.generation):
                doomed.append(key)
        if doomed:
            self.store.delete(doomed)

    # --- the step log ------------------------------------------------------------------------------------------------

    def log_steps(self, generation: int, lines_after: Callable[[int], Sequence[Line]], after: int | None = None) -> int:
        """Add to the step log what it lacks; returns the last step that it holds then.

        `lines_after(step)` are the lines (with their steps, ascending) for steps above that one. `after` is where a
        job that goes on from a checkpoint logs again.
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
            # Another writer has logged meanwhile, or had written a part of it: what is left has to be looked at again.
        raise StorageError(f"the step log of {self.prefix} was changed by others {_MAX_RACES} times in a row")

    def _write_segment(self, generation: int, lines: Sequence[Line]) -> int:
        """Write lines under a name of their own; the last step that is under that name then."""
        key = self.key("steps", f"{version_name(generation, lines[0][0])}.jsonl")
        text = "".join(line + "\n" for _, line in lines).encode()
        if self.store.put_if_absent(key, text):
            return lines[-1][0]
        # Another writer of the same steps died before it recorded them, or this member's own put was answered too late.
        return int(json.loads(self.store.get(key).splitlines()[-1])["step"])

    def steps(self) -> list[dict[str, Any]]:
        """The step log, each step once and in order: where a step was done again, as it was done last.

        A step that is not in it, and is below the last one, had already been lost when the log was written.
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

    def publish_artifact(self, name: str, data: bytes, generation: int, step: int) -> str:
        """Upload an artifact and make it the version that counts; returns its key."""
        key = self.artifact_key(name, generation, step)
        _check_fence(self.head(), generation)
        self.store.put(key, data)
        kept = KeptArtifact(generation=generation, step=step, num_bytes=len(data))
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
        """Keep a replica's output unless it is there; whether it was not. One of a retired workload is not kept."""
        if self.head().generation == NOBODYS_GENERATION:
            return False
        return self.store.put_if_absent(self.log_key(replica_id), data)

    def read_log(self, replica_id: ReplicaId) -> bytes:
        """A replica's output. Raises ObjectMissing where it has not ended yet."""
        return self.store.get(self.log_key(replica_id))

    def log_key(self, replica_id: ReplicaId) -> str:
        return self.key("logs", f"{replica_id}.log")

    def set_departure(self, departure: Departure) -> None:
        """Record when the workload is to be retired. A retired one stays as it is."""
        self._change(
            lambda head: (
                head if head.generation == NOBODYS_GENERATION else msgspec.structs.replace(head, departure=departure)
            )
        )

    def retire(self, *, keeps_artifacts: bool) -> int:
        """Take away what an ended workload has no use for any more; returns how many objects that were.

        The head stays, with a fence above every generation: a writer that sleeps now and wakes up later is refused,
        too. Of its artifacts those that count stay where `keeps_artifacts` says so. Idempotent.
        """
        if not self.store.keys(self.prefix):
            return 0

        def ended(head: WorkloadHead) -> WorkloadHead:
            kept = head.artifacts if keeps_artifacts else {}
            return WorkloadHead(generation=NOBODYS_GENERATION, artifacts=kept, departure=head.departure)

        _, head = self._change(ended)
        kept = {
            self.artifact_key(name, artifact.generation, artifact.step) for name, artifact in head.artifacts.items()
        }
        doomed = [key for key in self.store.keys(self.prefix) if key not in kept and key != self.key("head")]
        if doomed:
            self.store.delete(doomed)
        # As long as it is there, not all may be gone.
        self._change(lambda head: msgspec.structs.replace(head, departure=None))
        return len(doomed)

    def remove(self) -> None:
        with self._lock:
            self._known = None
            self.store.delete(self.store.keys(self.prefix))


def _check_fence(head: WorkloadHead, generation: int) -> None:
    # What is remembered of a head can only show too low a fence: a writer that it refuses is refused for good.
    if generation < head.generation:
        raise Fenced(f"generation {generation} may not write: generation {head.generation} owns the workload")
