"""Storage of what outlives a job's workers: in the job's directory, or in an object store."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError

from springtide.core.errors import CheckpointError, ObjectMissing, StorageError
from springtide.core.wire.workers import WorkerSpec
from springtide.core.workload import Checkpoint
from springtide.runtime.elastic.checkpoint import (
    FILES,
    MANIFEST,
    StateSnapshot,
    load_checkpoint,
    load_newest,
    write_checkpoint,
    write_files,
)
from springtide.runtime.elastic.remote_steps import RemoteStepLog
from springtide.runtime.elastic.step_log import StepLog, StepMemory
from springtide.runtime.elastic.training_cursor import Cursor
from springtide.runtime.models.named_tensors import TrainingState
from springtide.runtime.process.exits import EXIT_UNFIT, WorkerExit
from springtide.storage.fence import Fence
from springtide.storage.files import make_private, write_durable
from springtide.storage.workloads.head import version_name
from springtide.storage.workloads.store import WorkloadStore, open_workload_store

_RESTORE_PATIENCE_S = 120.0
_RESTORE_RETRY_S = 1.0


class JobStorage(Protocol):
    """Checkpoints, artifacts and step log of one job.

    Methods that write raise StorageError, and Fenced if a newer generation owns the job.
    """

    step_log: StepMemory

    def write_checkpoint(self, snapshot: StateSnapshot, generation: int) -> Checkpoint:
        """Publish the snapshot, visible only when complete, and remove all but the newest two checkpoints."""
        ...

    def load_newest(self, state: TrainingState) -> Cursor | None:
        """Restore the newest intact checkpoint and return its cursor; None if there are no checkpoints.

        Raises CheckpointError if none of them can be loaded.
        """
        ...

    def artifact_path(self, name: str, generation: int, step: int) -> str:
        """The path or key at which `publish_artifact` would write."""
        ...

    def publish_artifact(self, name: str, data: bytes, generation: int, step: int) -> str:
        """Write or replace an artifact and return its path or key."""
        ...


def open_storage(spec: WorkerSpec) -> JobStorage:
    """The storage of a worker's job. Raises InvalidRequest, StorageError if the spec's store cannot be opened."""
    work_dir = Path(spec.work_dir)
    if spec.store_url:
        return RemoteStorage(open_workload_store(spec.store_url, spec.workload_id), work_dir)
    return LocalStorage(work_dir)


class LocalStorage:
    """The job's directory, which all workers and the platform share, under its fence."""

    def __init__(self, work_dir: Path) -> None:
        self._work_dir = work_dir
        self.step_log: StepMemory = StepLog(work_dir)

    def write_checkpoint(self, snapshot: StateSnapshot, generation: int) -> Checkpoint:
        """Publish the snapshot under `checkpoints/`."""
        return write_checkpoint(self._work_dir, snapshot, generation)

    def load_newest(self, state: TrainingState) -> Cursor | None:
        """Restore the newest intact checkpoint; None if there are no checkpoints."""
        return load_newest(self._work_dir, state)

    def artifact_path(self, name: str, generation: int, step: int) -> str:
        return str(self._work_dir / "artifacts" / name)

    def publish_artifact(self, name: str, data: bytes, generation: int, step: int) -> str:
        """Write the step log's missing lines, then the file, durably and under the fence."""
        path = Path(self.artifact_path(name, generation, step))
        try:
            # The lines of the last steps are missing if the disk was full when these were taken.
            self.step_log.flush(generation)
            make_private(path.parent)
            with Fence(self._work_dir).writing(generation):
                write_durable(path, data)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error}") from error
        return str(path)


class RemoteStorage:
    """The job's part of an object store. `work_dir` is this worker's own, for files being uploaded or downloaded."""

    def __init__(self, store: WorkloadStore, work_dir: Path) -> None:
        self._store = store
        self._work_dir = work_dir
        self.step_log: StepMemory = RemoteStepLog(store, work_dir)

    def write_checkpoint(self, snapshot: StateSnapshot, generation: int) -> Checkpoint:
        """Flush the step log, write the files locally, upload them, and then publish the checkpoint."""
        name = version_name(generation, snapshot.step)
        staging = self._work_dir / "checkpoints" / f"{name}.up"
        try:
            self.step_log.flush(generation)
            make_private(staging)
            (staging / MANIFEST).write_text(write_files(staging, snapshot, generation))
            files = {file: staging / file for file in (*FILES, MANIFEST)}
            return self._store.publish_checkpoint(generation, snapshot.step, files)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"cannot write the checkpoint {name}: {error}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def load_newest(self, state: TrainingState) -> Cursor | None:
        """Download and restore the newest intact checkpoint; None if the store has none.

        Retries for two minutes while the store fails; then raises WorkerExit, so that the worker is replaced and the
        job does not fail.
        """
        end_s = time.monotonic() + _RESTORE_PATIENCE_S
        while True:
            try:
                return self._load_newest(state)
            except StorageError as error:
                sys.stderr.write(f"springtide: no checkpoint can be looked for yet: {error}\n")
                if time.monotonic() > end_s:
                    raise WorkerExit(EXIT_UNFIT) from error
            time.sleep(_RESTORE_RETRY_S)

    def _load_newest(self, state: TrainingState) -> Cursor | None:
        problems: list[str] = []
        for checkpoint in self._store.checkpoints():
            directory = self._work_dir / "checkpoints"
            try:
                directory = self._store.fetch_checkpoint(checkpoint, (*FILES, MANIFEST), directory)
                return load_checkpoint(directory, state)
            except (CheckpointError, ObjectMissing) as error:
                problems.append(str(error))
                sys.stderr.write(f"springtide: {error}\n")
            finally:
                shutil.rmtree(self._work_dir / "checkpoints", ignore_errors=True)
        if problems:
            raise CheckpointError(f"no checkpoint can be loaded: {problems[0]}")
        return None

    def artifact_path(self, name: str, generation: int, step: int) -> str:
        return self._store.artifact_key(name, generation, step)

    def publish_artifact(self, name: str, data: bytes, generation: int, step: int) -> str:
        """Flush the step log, then upload the artifact."""
        self.step_log.flush(generation)
        return self._store.publish_artifact(name, data, generation, step)
