"""Checkpoints of a job: safetensors files and a manifest with a hash of each, visible only when complete.

The state is copied into reused memory at a step boundary, and a background thread writes the copy under the job's
fence. A checkpoint whose bytes do not match its manifest, or that does not fit the live model, is never loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from springtide.core.decoding import convert
from springtide.core.errors import CheckpointError, Fenced, InvalidRequest, StorageError
from springtide.core.workload import Checkpoint
from springtide.runtime.elastic.training_cursor import Cursor
from springtide.runtime.models.named_tensors import TrainingState
from springtide.runtime.models.packing import dtype_name
from springtide.storage.fence import Fence
from springtide.storage.files import fsync_file, make_private, write_directory_durable

_MAX_HEADER_BYTES = 1 << 20
_MAX_MANIFEST_BYTES = 16 << 20
_NUM_KEPT = 2
_READ_BYTES = 1 << 22
FILES = ("model.safetensors", "optimizer.safetensors")
MANIFEST = "manifest.json"


@dataclass(slots=True)
class StateSnapshot:
    """A copy of a training state at a step boundary; its memory is reused for the next copy."""

    cursor: Cursor = field(default_factory=Cursor)
    epoch: int = 0
    packed: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = field(default_factory=lambda: ({}, {}))

    @property
    def step(self) -> int:
        return self.cursor.step

    def take(self, state: TrainingState, cursor: Cursor, epoch: int) -> None:
        """Copy the state as it is now."""
        packed, model, optimizer = state.pack_all()
        self.cursor, self.epoch, self.packed = cursor, epoch, packed
        self.tensors = (_copy_into(self.tensors[0], model), _copy_into(self.tensors[1], optimizer))


def _copy_into(old: dict[str, torch.Tensor], source: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    copies: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, tensor in source.items():
            buffer = old.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
            copies[name] = buffer.copy_(tensor)
    return copies


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def write_checkpoint(work_dir: Path, snapshot: StateSnapshot, generation: int) -> Checkpoint:
    """Publish the snapshot as `checkpoints/<generation>-<step>` and remove all but the newest two.

    The files are written and synced in a staging directory first: the fence is held only for the publication, because
    the step log needs it too. Raises StorageError (nothing new is visible then, older checkpoints remain) and Fenced.
    """
    root = work_dir / "checkpoints"
    path = root / f"{generation:08d}-{snapshot.step:010d}"
    staging = root / f".staging-{path.name}.{os.getpid()}.tmp"
    try:
        make_private(staging)
        manifest = write_files(staging, snapshot, generation)

        def fill(directory: Path) -> None:
            for name in FILES:
                os.rename(staging / name, directory / name)
            (directory / MANIFEST).write_text(manifest)

        with Fence(work_dir).writing(generation):
            if not (path / MANIFEST).exists():
                write_directory_durable(path, fill)
            _remove_old(root)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write the checkpoint {path.name}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    num_bytes = sum(file.stat().st_size for file in path.iterdir())
    return Checkpoint(generation=generation, step=snapshot.step, path=str(path), num_bytes=num_bytes)


def write_files(directory: Path, snapshot: StateSnapshot, generation: int) -> str:
    """Write the tensors' files, durably, and return the manifest's text.

    Raises OSError, SafetensorError, and StorageError for a manifest that would be too large to be read.
    """
    files: dict[str, Any] = {}
    for name, tensors in zip(FILES, snapshot.tensors, strict=True):
        file = directory / name
        save_file(tensors, file)
        fsync_file(file)
        files[name] = {
            "sha256": _sha256(file),
            "num_bytes": file.stat().st_size,
            "tensors": _kinds(tensors),
        }
    manifest = {"format": 1, "generation": generation, "step": snapshot.step, "epoch": snapshot.epoch}
    cursor = msgspec.to_builtins(snapshot.cursor)
    text = json.dumps({**manifest, "cursor": cursor, "files": files, "values": snapshot.packed})
    if len(text) > _MAX_MANIFEST_BYTES:
        raise StorageError(
            f"the checkpoint of step {snapshot.step} would have {len(text)} bytes of plain values, and at most "
            f"{_MAX_MANIFEST_BYTES} are read; have state_dict() of prepared objects return tensors for long lists"
        )
    return text


def list_checkpoints(work_dir: Path) -> list[Path]:
    """The directories of all complete checkpoints, newest first."""
    found: list[tuple[tuple[int, int], Path]] = []
    for path in (work_dir / "checkpoints").glob("*-*"):
        generation, _, step = path.name.partition("-")
        if generation.isdigit() and step.isdigit() and (path / MANIFEST).is_file():
            found.append(((int(generation), int(step)), path))
    return [path for _, path in sorted(found, reverse=True)]


def _remove_old(directory: Path) -> None:
    for path in list_checkpoints(directory.parent)[_NUM_KEPT:]:
        # The manifest goes first: a directory without one is not a checkpoint.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(".*.tmp"):
        owner = path.name.split(".")[-2]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            # A writer that was killed left it.
            shutil.rmtree(path, ignore_errors=True)


def load_newest(work_dir: Path, state: TrainingState) -> Cursor | None:
    """Restore the newest intact checkpoint and return its cursor; None if there are no checkpoints.

    Raises CheckpointError if there are checkpoints but none can be loaded.
    """
    problems: list[str] = []
    for path in list_checkpoints(work_dir):
        try:
            return load_checkpoint(path, state)
        except CheckpointError as error:
            problems.append(str(error))
            sys.stderr.write(f"springtide: {error}\n")
    if problems:
        raise CheckpointError(f"no checkpoint can be loaded: {problems[0]}")
    return None


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """What a checkpoint holds, verified: cursor, plain values, the model's tensors and the optimizer's, by name."""

    cursor: Cursor
    values: Mapping[str, Any]
    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]


def read_checkpoint(path: Path) -> StoredCheckpoint:
    """Read a checkpoint and verify it against its manifest. Raises CheckpointError."""
    manifest = _read_manifest(path)
    try:
        cursor = _cursor(manifest)
        model, optimizer = (_load_file(path / name, manifest["files"][name]) for name in FILES)
        return StoredCheckpoint(cursor, manifest["values"], model, optimizer)
    except (InvalidRequest, KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint {path.name} is malformed: {error!r}") from error


def load_checkpoint(path: Path, state: TrainingState) -> Cursor:
    """Verify a checkpoint, restore it and return its cursor.

    Raises CheckpointError; the state is then untouched, unless a prepared object refused its part.
    """
    stored = read_checkpoint(path)
    try:
        expected, found = (_kinds(tensors) for tensors in (state.model_tensors(), stored.model))
        if found != expected:
            raise CheckpointError(
                f"the checkpoint {path.name} is of another model: {_difference(stored.model, expected)}"
            )
        live_model, live_optimizer, load_objects = state.unpack_all(stored.values)
        # Of an object that is not prepared any more nothing is restored.
        saved_names = {name for name in stored.optimizer if name in live_optimizer or not name.startswith("object.")}
        if live_optimizer.keys() != saved_names:
            raise CheckpointError(f"the checkpoint {path.name} is of another optimizer")
        with torch.no_grad():
            for live, saved in ((live_model, stored.model), (live_optimizer, stored.optimizer)):
                for name, tensor in live.items():
                    tensor.copy_(saved[name])
        load_objects()
        return stored.cursor
    except InvalidRequest as error:
        raise CheckpointError(f"the checkpoint {path.name} cannot be restored: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint {path.name} is malformed: {error!r}") from error


def _kinds(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Type and shape of each tensor, as in a manifest."""
    return {name: [dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}


def _cursor(manifest: Mapping[str, Any]) -> Cursor:
    """The cursor in a manifest. Old checkpoints of jobs with a fixed batch hold only the step."""
    step = int(manifest["step"])
    if "cursor" not in manifest:
        return Cursor(step=step, num_seen=None, progress=float(step))
    cursor = convert(manifest["cursor"], Cursor)
    if cursor.step != step:
        raise CheckpointError(f"the checkpoint of step {step} has the cursor of step {cursor.step}")
    return cursor


def _difference(saved: Mapping[str, torch.Tensor], expected: Mapping[str, Any]) -> str:
    for name in sorted(saved.keys() ^ expected.keys()):
        return f"{name!r} is only in the {'checkpoint' if name in saved else 'model'}"
    for name, tensor in saved.items():
        if expected[name] != [dtype_name(tensor.dtype), list(tensor.shape)]:
            return f"{name!r} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, the model has {expected[name]}"
    return "its manifest names other tensors"


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        file = path / MANIFEST
        if file.stat().st_size > _MAX_MANIFEST_BYTES:
            raise CheckpointError(f"the manifest of {path.name} is too large")
        manifest = json.loads(file.read_text())
        if not isinstance(manifest, dict) or manifest.get("format") != 1:
            raise CheckpointError(f"the manifest of {path.name} is of an unknown format")
        return manifest
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the manifest of {path.name} is unreadable: {error}") from error


def _load_file(path: Path, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Check length, hash, header size, duplicate names and the tensors' shapes, and only then load."""
    try:
        if path.stat().st_size != entry["num_bytes"] or _sha256(path) != entry["sha256"]:
            raise CheckpointError(f"{path.parent.name}/{path.name} does not match its manifest")
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(f"{path.parent.name}/{path.name} has a header of {length} bytes")
            json.loads(file.read(length), object_pairs_hook=_refuse_duplicates)
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (OSError, struct.error, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path.parent.name}/{path.name} is unreadable: {error}") from error
    if _kinds(tensors) != entry["tensors"]:
        raise CheckpointError(f"{path.parent.name}/{path.name} holds other tensors than its manifest says")
    return tensors


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise CheckpointError("a safetensors header names a tensor twice")
    return dict(pairs)


class CheckpointWriter:
    """Writes snapshots in the background, one at a time. A failed write is logged and training goes on."""

    def __init__(
        self,
        write: Callable[[StateSnapshot, int], Checkpoint],
        on_written: Callable[[Checkpoint], object],
        on_fenced: Callable[[str], None],
        *,
        interval_s: float = 0.0,
    ) -> None:
        """`write(snapshot, generation)` publishes a checkpoint, or raises StorageError or Fenced.

        `on_written` and `on_fenced` (with the error's text) are called on the thread that writes. `interval_s` is the
        time from one write that `write_if_due` begins to the next.
        """
        self._publish = write
        self._on_written = on_written
        self._on_fenced = on_fenced
        self._snapshot = StateSnapshot()
        self._interval_s = interval_s
        self._due_s = time.monotonic() + interval_s
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def write_if_due(self, state: TrainingState, cursor: Cursor, epoch: int, generation: int) -> None:
        """Write in the background, if the interval is over and the writer is not busy."""
        now_s = time.monotonic()
        if now_s >= self._due_s and not self.is_busy:
            self._due_s = now_s + self._interval_s
            self.write_in_background(state, cursor, epoch, generation)

    def write_in_background(self, state: TrainingState, cursor: Cursor, epoch: int, generation: int) -> None:
        """Copy the state now and publish it from a background thread. Only when not busy."""
        assert not self.is_busy
        self._snapshot.take(state, cursor, epoch)
        self._thread = threading.Thread(target=self._write, args=(generation,), name="springtide-checkpoint")
        self._thread.start()

    def write_now(self, state: TrainingState, cursor: Cursor, epoch: int, generation: int) -> Checkpoint:
        """Publish the state before returning. Raises StorageError and Fenced."""
        self.wait()
        self._snapshot.take(state, cursor, epoch)
        checkpoint = self._publish(self._snapshot, generation)
        self._on_written(checkpoint)
        return checkpoint

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _write(self, generation: int) -> None:
        try:
            self._on_written(self._publish(self._snapshot, generation))
        except Fenced as error:
            self._on_fenced(str(error))
        except StorageError as error:
            sys.stderr.write(f"springtide: {error}; the older checkpoint stands, training goes on\n")
