"""The user's code inside a function: downloaded, imported as a module of its own, and removed after the invocation."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from springtide.core.decoding import json_decoder
from springtide.core.errors import InvalidRequest, ObjectMissing, StorageError
from springtide.core.ports import Store
from springtide.core.wire.functions import MAX_RECORD_BYTES, Keys
from springtide.core.workload import Entrypoint, TrainingJob
from springtide.runtime.process.entry import load_object
from springtide.storage.files import make_private
from springtide.storage.folders.tree import import_roots
from springtide.storage.workloads.artifacts import fetch_code

# Made once: two threads that made it at a time, as invocations in one process do, could crash the interpreter.
_JOB = json_decoder(TrainingJob)


class UserSource:
    """A job and the user's file, unpacked in a folder of its own."""

    def __init__(self, job: TrainingJob, root: Path) -> None:
        self.job = job
        self.root = root
        self._path = _source_in(root, job.entrypoint)
        # Made from the folder's name, so that two invocations in one process have different module names.
        self._module_name = f"springtide_user_{root.parent.name.replace('-', '_')}"
        self._num_loaded = 0

    @property
    def path(self) -> str:
        return str(self._path)

    def load(self) -> Any:
        """Import the file anew, reusing nothing of an earlier import, and return the named object.

        Raises InvalidRequest, and whatever the file raises.
        """
        self.forget()
        self._num_loaded += 1
        if self.job.entrypoint.folder is not None:
            sys.path[:0] = [str(each) for each in import_roots(self._path, self.root)]
        entrypoint = msgspec.structs.replace(
            self.job.entrypoint, source_path=str(self._path), import_root=str(self.root)
        )
        return load_object(entrypoint, f"{self._module_name}_{self._num_loaded}")

    def enter(self) -> None:
        """Work where the job's owner stood in the folder, if one was sent. Raises StorageError."""
        folder = self.job.entrypoint.folder
        if folder is None:
            return
        try:
            make_private(self.root / folder.directory)
            os.chdir(self.root / folder.directory)
        except OSError as error:
            raise StorageError(f"cannot enter the folder {self.root}: {error.strerror}") from error

    def forget(self) -> None:
        """Remove all modules that were imported from the folder."""
        inside = str(self.root)
        # A copy, because other threads may import; __dict__, because getattr may trigger a lazy module's imports.
        for name, module in sys.modules.copy().items():
            if str(getattr(module, "__dict__", {}).get("__file__") or "").startswith(inside):
                sys.modules.pop(name, None)
        sys.path[:] = [entry for entry in sys.path if not entry.startswith(inside)]
        sys.path_importer_cache.pop(inside, None)


@contextmanager
def user_source(store: Store, keys: Keys) -> Iterator[UserSource]:
    """Download the job's record and source; removes them from process and disk at exit.

    Raises StorageError, InvalidRequest.
    """
    job = read_job(store, keys)
    folder = Path(tempfile.mkdtemp(prefix="springtide-"))
    try:
        root = folder / "source"
        fetch_code(store, store.get(keys.bundle), root)
        source = UserSource(job, root)
        with _settings_kept():
            try:
                source.enter()
                yield source
            finally:
                source.forget()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Restore process-wide settings that user code may change: the next invocation may be another user's."""
    environment, directory = dict(os.environ), os.getcwd()
    settings = _torch_settings()
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        os.chdir(directory)
        _restore_torch(settings)


def _torch_settings() -> tuple[Any, ...] | None:
    """Torch's process-wide settings; None if torch is not imported (this does not import it)."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
    )


def _restore_torch(settings: tuple[Any, ...] | None) -> None:
    """Restore torch's settings, or its defaults if it was imported since."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    dtype, num_threads, is_deterministic, has_gradients = settings or (torch.float32, None, False, True)
    torch.set_default_dtype(dtype)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    # The call imports torch's compiler: over a second of CPU time.
    if torch.are_deterministic_algorithms_enabled() != is_deterministic:
        torch.use_deterministic_algorithms(is_deterministic)
    torch.set_grad_enabled(has_gradients)


def read_job(store: Store, keys: Keys) -> TrainingJob:
    """The job's record. Raises StorageError."""
    try:
        data = store.get(keys.job)
    except ObjectMissing:
        raise StorageError(f"there is no job under {keys.job}; was it removed?") from None
    try:
        if len(data) > MAX_RECORD_BYTES:
            raise ValueError(f"it has {len(data)} bytes")
        return _JOB.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StorageError(f"the job's record is unreadable: {error}") from None


def _source_in(root: Path, entrypoint: Entrypoint) -> Path:
    """The user's file in the unpacked bundle: by its path in the import root, else by its name."""
    source = Path(entrypoint.source_path)
    if entrypoint.folder is not None and (root / entrypoint.folder.path).is_file():
        return root / entrypoint.folder.path
    if entrypoint.import_root and source.is_relative_to(entrypoint.import_root):
        path = root / source.relative_to(entrypoint.import_root)
        if path.is_file():
            return path
    if (root / source.name).is_file():
        return root / source.name
    raise InvalidRequest(f"the bundle does not hold {source.name}; submit the job again")
