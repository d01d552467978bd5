"""A job's objects in the store: storing the job, finding complete states, assembling the model's file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from springtide.backends.functions.shell.fence import RecordFence, decoded
from springtide.core.errors import InvalidRequest, ObjectMissing, StorageError
from springtide.core.ports import Store
from springtide.core.wire.functions import (
    ControlRecord,
    FunctionReport,
    Keys,
    Place,
    StageState,
)
from springtide.core.workload import TrainingJob, WorkloadId
from springtide.storage.bundles import pack_folder
from springtide.storage.files import make_private, write_durable
from springtide.storage.folders.tree import FOLDER
from springtide.storage.frames import FrameTensor, decode, encode
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.open import open_store
from springtide.storage.workloads.artifacts import Artifact, Artifacts
from springtide.storage.workloads.store import WorkloadStore

MODEL_PREFIX = "model/"
MODEL_FILE = "model.safetensors"
# The most stages that one state can have: each has at least one layer.
_MAX_STAGES = 1024


class FoundStates(msgspec.Struct, frozen=True, kw_only=True):
    """The newest step with a complete state (0: none), its stages' records in order, and the keys of later steps."""

    step: int
    metas: tuple[StageState, ...] = ()
    torn: tuple[str, ...] = ()


class JobObjects:
    """A job's objects under its prefix in the object store. Every method raises StorageError.

    `parameter_url` is the store for messages between functions, if there is one; `delete` opens it to remove them.
    """

    def __init__(self, store: Store, keys: Keys, parameter_url: str = "") -> None:
        self.store = store
        self.keys = keys
        self.parameter_url = parameter_url
        self._wire = f"{keys.prefix}/wire/"

    def put_job(self, job: TrainingJob) -> None:
        """Store the job and its code for the functions. Raises InvalidRequest for code that cannot be shipped."""
        source, sent = Path(job.entrypoint.source_path), job.entrypoint.folder
        root = Path(job.entrypoint.import_root) if job.entrypoint.import_root else None
        if sent is not None and source.is_absolute():
            # The job's copy, of which nothing runs on this machine, is as it was submitted.
            bundle = Artifacts(self.store).put(pack_folder(source.parents[sent.path.count("/")]))
        elif source.is_absolute():
            bundle = self._put_bundle(source, root)
        elif sent is not None:
            with tempfile.TemporaryDirectory(prefix="springtide-code-") as folder:
                copy = Path(folder, FOLDER)
                if WorkloadStore(self._checked(), job.job_id).fetch_folder(sent, copy) is None:
                    raise InvalidRequest(f"the store holds no folder of {job.job_id}; submit the job again")
                bundle = Artifacts(self.store).put(pack_folder(copy))
        else:
            with tempfile.TemporaryDirectory(prefix="springtide-code-") as folder:
                found = WorkloadStore(self._checked(), job.job_id).fetch_source(str(source), Path(folder))
                if found is None:
                    raise InvalidRequest(f"the store holds no code {source} of {job.job_id}; submit the job again")
                # The folder holds exactly the files that were submitted.
                bundle = self._put_bundle(found, found.parent)
        self.store.put(self.keys.bundle, msgspec.json.encode(bundle))
        self.store.put(self.keys.job, msgspec.json.encode(job))

    def _put_bundle(self, source: Path, root: Path | None) -> Artifact:
        try:
            text = source.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the job's code {source} cannot be read: {error}") from None
        # Bundles are stored by content: jobs with the same code, such as the trials of a study, share one.
        return Artifacts(self.store).put_bundle(source.name, text, root)

    def fence(self, term: int) -> RecordFence:
        """The fence of the control record and the notes, for the control plane of that term."""
        return RecordFence(self._checked(), self.keys, term)

    def _checked(self) -> CheckedStore:
        if not isinstance(self.store, CheckedStore):
            raise InvalidRequest("a job's code and records need a store that tells versions apart: s3:// or file://")
        return self.store

    def read_control(self) -> ControlRecord | None:
        """The control record; None where there is none."""
        try:
            data = self.store.get(self.keys.control)
        except ObjectMissing:
            return None
        return decoded(data, ControlRecord, "the control record")

    def write_control(self, record: ControlRecord) -> None:
        """Replace the control record."""
        self.store.put(self.keys.control, msgspec.json.encode(record))

    def read_report(self, place: Place, incarnation: int) -> FunctionReport | None:
        """A function's newest report; None where it has not written any."""
        try:
            data = self.store.get(self.keys.report(place, incarnation))
        except ObjectMissing:
            return None
        return decoded(data, FunctionReport, f"the report of {place}")

    def find_states(self, num_layers: int, newest: int | None = None, *, may_begin_anew: bool = False) -> FoundStates:
        """Find the newest step with the records of all stages, by one list and reads of a few steps' records.

        A step after `newest` is returned only if there is no earlier one and not `may_begin_anew`.
        """
        prefix = f"{self.keys.prefix}/state/"
        names = self.store.keys(prefix)
        by_step: dict[int, list[str]] = {}
        for key in names:
            number, _, name = key.removeprefix(prefix).partition("/")
            if number.isdigit() and name:
                by_step.setdefault(int(number), []).append(key)
        found = FoundStates(step=0)
        for step in sorted(by_step, reverse=True):
            is_later = newest is not None and step > newest
            if is_later and (may_begin_anew or found.step):
                continue
            metas = self._chain(step, set(by_step[step]), num_layers)
            if metas:
                found = FoundStates(step=step, metas=metas)
            if metas and not is_later:
                break
        torn = tuple(key for step in sorted(by_step) if step > found.step for key in by_step[step])
        return FoundStates(step=found.step, metas=found.metas, torn=torn)

    def _chain(self, step: int, there: set[str], num_layers: int) -> tuple[StageState, ...]:
        """The records of a step, if together they cover all layers without a gap; else an empty tuple."""
        metas: list[StageState] = []
        layer = 0
        while layer < num_layers and len(metas) < _MAX_STAGES:
            key = self.keys.state_meta(step, len(metas))
            if key not in there or self.keys.state(step, len(metas)) not in there:
                return ()
            try:
                meta = decoded(self.store.get(key), StageState, "the record of a state")
            except ObjectMissing:
                return ()
            if meta.first_layer != layer or meta.end_layer <= layer:
                return ()
            metas.append(meta)
            layer = meta.end_layer
        return tuple(metas) if layer == num_layers else ()

    def assemble(self, found: FoundStates, artifacts: Path) -> Path:
        """Write the model's file from the states of the stages, with the parameter names of the user's model."""
        data = self._model(found)
        try:
            make_private(artifacts)
        except OSError as error:
            raise StorageError(f"cannot make {artifacts}: {error.strerror or os.fspath(artifacts)}") from error
        path = artifacts / MODEL_FILE
        write_durable(path, data)
        return path

    def publish(self, found: FoundStates, job_id: WorkloadId, generation: int) -> str:
        """Store the model's file among the workload's artifacts, where services in pods find it; returns its key."""
        store = WorkloadStore(self._checked(), job_id)
        return store.publish_artifact(MODEL_FILE, self._model(found), generation, found.step)

    def _model(self, found: FoundStates) -> bytes:
        tensors: dict[str, FrameTensor] = {}
        for meta in found.metas:
            frame = decode(self.store.get(meta.key))
            for name, tensor in frame.tensors.items():
                if name.startswith(MODEL_PREFIX):
                    tensors[name.removeprefix(MODEL_PREFIX)] = tensor
        if not tensors:
            raise StorageError(f"the states of step {found.step} hold no model")
        return encode(dict(sorted(tensors.items())), {"format": "pt"})

    def delete(self, keys: tuple[str, ...], prefixes: tuple[str, ...]) -> None:
        """Remove these objects, and all under these prefixes."""
        travelling = self.parameter_url and [prefix for prefix in prefixes if f"{prefix}/".startswith(self._wire)]
        here = [prefix for prefix in prefixes if prefix not in travelling]
        _remove(self.store, [*keys, *(key for prefix in here for key in self.store.keys(prefix))])
        if travelling:
            parameters = open_store(self.parameter_url)
            try:
                _remove(parameters, [key for prefix in travelling for key in parameters.keys(prefix)])
            finally:
                parameters.close()

    def clear(self, *, keeps_states: bool) -> None:
        """Remove an ended job's objects; with `keeps_states` all but its states and what resuming from them needs."""
        prefix = self.keys.prefix
        parts = ("wire", "reports", "left") if keeps_states else ("wire", "reports", "left", "state", "artifact")
        own = () if keeps_states else (self.keys.control, self.keys.job, self.keys.bundle, self.keys.notes)
        self.delete(own, tuple(f"{prefix}/{part}/" for part in parts))


def _remove(store: Store, keys: list[str]) -> None:
    if keys:
        store.delete(keys)
