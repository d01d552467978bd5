"""Where a platform keeps the sources of its workloads: in its state directory, or in an object store.

A place is a path like `workloads/<id>/source/<file>`, the same in both.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO

from msgspec.structs import replace

from springtide.backends.functions.shell.copies import copies_prefix
from springtide.core.errors import BackendError, Conflict, Fenced, InvalidRequest, NotFound, ObjectMissing, StorageError
from springtide.core.status.artifacts import ArtifactStatus
from springtide.core.workload import JobFolder, ReplicaId, WorkloadId
from springtide.service.ports import Source
from springtide.service.submission import sources
from springtide.storage.files import fsync_directory, make_private, sync_filesystem, write_durable
from springtide.storage.folders.contents import CONTENTS, ContentDirectory, write_archive
from springtide.storage.folders.copies import ContentDamaged, make_copy, prune_copy
from springtide.storage.folders.replica_copies import REPLICA_FOLDERS, remove_left_copies
from springtide.storage.folders.tree import FOLDER, FOLDER_LIST, FolderTree, decode_tree, encode_tree, folder_name
from springtide.storage.step_lines import lines_above, unpack_lines
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.workloads.head import Departure, WorkloadHead
from springtide.storage.workloads.results import RESULTS, ResultDigests, list_results, open_result
from springtide.storage.workloads.store import WorkloadStore

LOG = logging.getLogger("springtide.sources")
MAX_FETCHED_LOGS = 64
MAX_FETCHED_LOG_BYTES = 8 * 1024 * 1024


class DirectorySources:
    """The state directory, which workers read, too."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self.contents = ContentDirectory(state_dir / CONTENTS)
        self._result_digests = ResultDigests()

    def address(self, place: PurePosixPath) -> str:
        """The file's path."""
        return str(self._state_dir / place)

    def holds(self, address: str, text: str) -> bool:
        """Whether the file of that path is this text. False where it cannot be read."""
        try:
            return Path(address).read_bytes() == text.encode()
        except OSError:
            return False

    def check_not_moved(self, addresses: Mapping[WorkloadId, str]) -> None:
        """Raise BackendError if sources at these addresses lay here before the state directory was moved.

        Addresses are absolute paths, in the journal and in the workers' orders: the workloads would fail one by one.
        """
        for workload_id, address in addresses.items():
            path = Path(address)
            before = next((parent.parent for parent in path.parents if parent.name == "workloads"), self._state_dir)
            if (
                before != self._state_dir
                and not path.exists()
                and (self._state_dir / path.relative_to(before)).exists()
            ):
                raise BackendError(
                    f"this state directory was {before} when {workload_id} was submitted, which reads its files there; "
                    f"move it back, or make a link to where it is now: ln -s {self._state_dir} {before}"
                )

    def may_write(self, place: PurePosixPath, source: Source) -> bool:
        """Whether there is no source at that place yet, or this very one."""
        return all(self._may_be(name, text) for name, text in _files(place, source))

    def write(self, place: PurePosixPath, source: Source) -> None:
        """Keep the files, 0600 in 0700 directories, none of which may be a symbolic link."""
        for name, text in _files(place, source):
            write_private(self._state_dir / "workloads", self._state_dir / name, text)

    def write_folder(self, job_id: WorkloadId, folder: JobFolder, tree: FolderTree, address: str) -> str:
        """Make the job's copy of the folder in its directory, and the list of its files. Returns its file's path."""
        root = self._state_dir / "workloads" / job_id
        listed, (sha256, data) = root / FOLDER_LIST, encode_tree(tree)
        make_private_directories(self._state_dir / "workloads", root)
        if not listed.exists():
            write_durable(listed, data)
        elif hashlib.sha256(listed.read_bytes()).hexdigest() != sha256:
            raise Conflict(f"this Idempotency-Key was used for {job_id} with another folder; use a new key")
        try:
            make_copy(tree, self.contents.open, root / FOLDER, directory=folder.directory)
        except ContentDamaged as error:
            self.contents.discard(error.sha256)
            raise
        # From now on, what is newer in the copy was written by the job.
        os.utime(listed)
        return str(root / FOLDER / folder.path)

    def share_folder(self, service_id: WorkloadId, folder: JobFolder, tree: FolderTree) -> None:
        """Make the contents durable, of which each replica of the service makes a copy when it starts."""
        sync_filesystem(self._state_dir)

    def shares_folder(self, service_id: WorkloadId, folder: JobFolder) -> bool:
        """False: whether all contents are here is asked of them."""
        return False

    def drop_folders(self, service_id: WorkloadId, kept: Collection[JobFolder]) -> None:
        """Do nothing: contents go when nothing has named them for long, copies with their replicas."""

    def prune_folders(self, is_over: Callable[[WorkloadId], bool], oldest_unix_s: float) -> None:
        """Remove what is unchanged in the copies of jobs that are over, of those that were made before that time.

        Copies of replicas that were killed go, too.
        """
        for copies in (self._state_dir / "workloads").glob(f"*/{REPLICA_FOLDERS}"):
            remove_left_copies(copies)
        for listed in (self._state_dir / "workloads").glob(f"*/{FOLDER_LIST}"):
            with contextlib.suppress(OSError, InvalidRequest):
                made = listed.stat()
                if made.st_mtime < oldest_unix_s and is_over(WorkloadId(listed.parent.name)):
                    prune_copy(decode_tree(listed.read_bytes()), listed.parent / FOLDER, made.st_mtime_ns)
                    listed.unlink()

    def has(self, workload_id: WorkloadId) -> bool:
        """Whether there is a directory of that workload."""
        return (self._state_dir / "workloads" / workload_id).exists()

    def import_root(self, asked: str) -> str:
        """The directory itself. Raises InvalidRequest unless it is one."""
        sources.check_import_root(asked)
        return asked

    def fetch_logs(self, workload_id: WorkloadId) -> None:
        """Do nothing: logs are in the state directory already."""

    def artifacts(self, workload_id: WorkloadId, *, with_digests: bool = False) -> list[ArtifactStatus]:
        """The files in the folder of the job's results."""
        root = self._results(workload_id)
        found = list_results(root)
        if not with_digests:
            return found
        return [replace(each, sha256=self._result_digests.of(root, each.name)) for each in found]

    def open_artifact(self, workload_id: WorkloadId, name: str) -> tuple[IO[bytes], int]:
        """One of these files. Raises NotFound."""
        return open_result(self._results(workload_id), name)

    def _results(self, workload_id: WorkloadId) -> Path:
        return self._state_dir / "workloads" / workload_id / RESULTS

    def retire(self, workload_id: WorkloadId, *, keeps_artifacts: bool) -> int:
        """Remove the workload's directory except its fence and, with `keeps_artifacts`, its artifacts."""
        stays = {"fence", "fence.lock", *(("artifacts",) if keeps_artifacts else ())}
        return _remove_files(self._state_dir / "workloads" / workload_id, stays)

    def _may_be(self, place: PurePosixPath, text: str) -> bool:
        path = self._state_dir / place
        try:
            return path.read_bytes() == text.encode()
        except FileNotFoundError:
            return True
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error


class ObjectSources:
    """An object store, which workers fetch from; `state_dir` is a copy that may be lost at any time.

    An address is the object's key, the place itself, so that it holds wherever the control plane runs next.
    """

    def __init__(self, store: CheckedStore, state_dir: Path) -> None:
        self._store = store
        self._state_dir = state_dir
        self.contents = ContentDirectory(state_dir / CONTENTS)
        self._digests: dict[str, bytes] = {}
        # Of artifacts, by key.
        self._result_digests: dict[str, str] = {}
        self._fetched: set[str] = set()

    def address(self, place: PurePosixPath) -> str:
        """The key of the object."""
        return str(place)

    def holds(self, address: str, text: str) -> bool:
        """Whether the object of that key is this text. What a key holds never changes, so it is asked for once."""
        known = self._digests.get(address)
        if known is None:
            found = self._find(address)
            if found is None:
                return False
            known = self._digests[address] = hashlib.sha256(found).digest()
        return known == hashlib.sha256(text.encode()).digest()

    def may_write(self, place: PurePosixPath, source: Source) -> bool:
        """Whether there is no source at that place yet, or this very one."""
        return all(self._find(str(name)) in (None, text.encode()) for name, text in _files(place, source))

    def write(self, place: PurePosixPath, source: Source) -> None:
        """Put the files, the main one last: a reader that finds it finds the others."""
        for name, text in reversed(list(_files(place, source))):
            self._store.put(str(name), text.encode())

    def write_folder(self, job_id: WorkloadId, folder: JobFolder, tree: FolderTree, address: str) -> str:
        """Put the folder as one archive, which each pod of the job unpacks. Returns `address`."""
        make_private(self._state_dir)
        with tempfile.TemporaryDirectory(prefix=".folder-", dir=self._state_dir) as made:
            write_archive(self.contents.open, tree, Path(made, "folder.zip"))
            self._store.put_file(f"workloads/{job_id}/{folder_name(folder)}", Path(made, "folder.zip"))
        return address

    def share_folder(self, service_id: WorkloadId, folder: JobFolder, tree: FolderTree) -> None:
        """Put the folder as one archive, which each of the service's pods unpacks."""
        self.write_folder(service_id, folder, tree, "")

    def shares_folder(self, service_id: WorkloadId, folder: JobFolder) -> bool:
        """Whether the archive is in the store."""
        key = f"workloads/{service_id}/{folder_name(folder)}"
        return key in self._store.keys(key)

    def drop_folders(self, service_id: WorkloadId, kept: Collection[JobFolder]) -> None:
        """Delete the archives of the service except these."""
        prefix = f"workloads/{service_id}/"
        names = {f"{prefix}{folder_name(folder)}" for folder in kept}
        left = [key for key in self._store.keys(f"{prefix}folder-") if key not in names]
        if left:
            self._store.delete(left)

    def prune_folders(self, is_over: Callable[[WorkloadId], bool], oldest_unix_s: float) -> None:
        """Do nothing: copies are in pods, and go with them."""

    def has(self, workload_id: WorkloadId) -> bool:
        """Whether there is any object of that workload."""
        return bool(self._store.keys(f"workloads/{workload_id}/"))

    def import_root(self, asked: str) -> str:
        """Empty: pods see no directory of the client. Neighbouring modules are sent as further files of the source."""
        return ""

    def fetch_logs(self, workload_id: WorkloadId) -> None:
        """Copy the newest logs of ended replicas, which their pods have put into the store, into the state directory.

        Such a log is complete and replaces the part that was followed while the pod ran. Each is fetched once.
        """
        try:
            self._fetch_logs(workload_id)
        except StorageError as error:
            # The logs that are here already can still be read.
            LOG.warning("the logs of %s that are kept in the store cannot be had: %s", workload_id, error)

    def artifacts(self, workload_id: WorkloadId, *, with_digests: bool = False) -> list[ArtifactStatus]:
        """The artifacts that count, by the job's head object. A digest is that of the object, which never changes."""
        kept = WorkloadStore(self._store, workload_id)
        found = []
        for name, artifact in sorted(kept.head().artifacts.items()):
            key = kept.artifact_key(name, artifact.generation, artifact.step)
            sha256 = self._digest_of(key) if with_digests else ""
            found.append(ArtifactStatus(name=name, num_bytes=artifact.num_bytes, sha256=sha256))
        return found

    def open_artifact(self, workload_id: WorkloadId, name: str) -> tuple[IO[bytes], int]:
        """A file without a name that holds one of these artifacts. Raises NotFound."""
        key = WorkloadStore(self._store, workload_id).artifacts().get(name)
        if key is None:
            raise NotFound(
                f"{workload_id} has no artifact {name!r:.200}; `springtide artifacts list` names those it has"
            )
        try:
            file = self._downloaded(key)
        except ObjectMissing:
            raise NotFound(f"the artifact {name!r:.200} of {workload_id} was replaced just now; ask again") from None
        return file, os.fstat(file.fileno()).st_size

    def _digest_of(self, key: str) -> str:
        """The digest of an object; empty if it was replaced just now."""
        known = self._result_digests.get(key)
        if known is None:
            try:
                with self._downloaded(key) as file:
                    known = self._result_digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
            except ObjectMissing:
                return ""
        return known

    def _downloaded(self, key: str) -> io.BufferedReader:
        """An object in a file that vanishes when it is closed: it may be larger than memory. Raises ObjectMissing."""
        make_private(self._state_dir)
        descriptor, path = tempfile.mkstemp(prefix=".artifact-", dir=self._state_dir)
        os.close(descriptor)
        try:
            self._store.get_file(key, Path(path))
            return open(path, "rb")
        finally:
            os.unlink(path)

    def retire(self, workload_id: WorkloadId, *, keeps_artifacts: bool) -> int:
        """Remove the workload's objects except its fence and, with `keeps_artifacts`, its artifacts."""
        num_objects = WorkloadStore(self._store, workload_id).retire(keeps_artifacts=keeps_artifacts)
        # A job on functions that did not succeed leaves its newest states.
        left = self._store.keys(f"jobs/{workload_id}/")
        if left:
            self._store.delete(left)
            num_objects += len(left)
        _remove_files(self._state_dir / "workloads" / workload_id, frozenset())
        prefix = f"workloads/{workload_id}/"
        for key in [key for key in list(self._digests) if key.startswith(prefix)]:
            self._digests.pop(key, None)
        return num_objects

    def keep_log(self, workload_id: WorkloadId, replica_id: ReplicaId, path: Path) -> bool:
        """Put the newest part of a replica's output into the store; False if its pod has already put it there."""
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - MAX_FETCHED_LOG_BYTES))
                text = file.read()
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
        return WorkloadStore(self._store, workload_id).put_log_if_absent(replica_id, text)

    def keep_steps(self, workload_id: WorkloadId, printed: Iterable[str], newest_generation: int) -> None:
        """Add the lines of the step log that a worker printed at its end, as far as the log lacks them.

        Lines of a worker of an older generation are left out: its successors report those steps themselves.
        """
        lines = unpack_lines(printed)
        generation = json.loads(lines[-1][1])["generation"] if lines else 0
        if lines and generation <= newest_generation:
            with contextlib.suppress(Fenced):
                WorkloadStore(self._store, workload_id).log_steps(generation, lambda step: lines_above(lines, step))

    def head(self, workload_id: WorkloadId) -> WorkloadHead:
        """The head object of a workload: its fence and its checkpoints."""
        return WorkloadStore(self._store, workload_id).head()

    def set_departure(self, workload_id: WorkloadId, departure: Departure) -> None:
        """Record when the objects of a workload expire, for any later leader."""
        WorkloadStore(self._store, workload_id).set_departure(departure)

    def _fetch_logs(self, workload_id: WorkloadId) -> None:
        folder = self._state_dir / "workloads" / workload_id / "logs"
        prefix = f"workloads/{workload_id}/logs/"
        for key in self._store.keys(prefix)[-MAX_FETCHED_LOGS:]:
            path = folder / key.removeprefix(prefix)
            if path.parent != folder or path.suffix != ".log" or (key in self._fetched and path.exists()):
                continue
            with contextlib.suppress(ObjectMissing):
                text = self._store.get(key)[-MAX_FETCHED_LOG_BYTES:]
                make_private_directories(self._state_dir / "workloads", folder)
                write_durable(path, text, mode=0o600)
                self._fetched.add(key)
        self._fetch_copies(workload_id, folder)

    def _fetch_copies(self, workload_id: WorkloadId, folder: Path) -> None:
        """Fetch the copies of what functions wrote, unless the log here is longer, because it is still written here."""
        prefix = f"{copies_prefix(workload_id)}logs/"
        for key in self._store.keys(prefix)[-MAX_FETCHED_LOGS:]:
            path = folder / key.removeprefix(prefix)
            if path.parent != folder or path.suffix != ".log" or key in self._fetched:
                continue
            with contextlib.suppress(ObjectMissing):
                text = self._store.get(key)[-MAX_FETCHED_LOG_BYTES:]
                if not path.exists() or path.stat().st_size < len(text):
                    make_private_directories(self._state_dir / "workloads", folder)
                    write_durable(path, text, mode=0o600)
                self._fetched.add(key)

    def _find(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)
        except ObjectMissing:
            return None


def _files(place: PurePosixPath, source: Source) -> Iterator[tuple[PurePosixPath, str]]:
    yield place, source.text
    for name, text in source.files.items():
        yield place.parent / name, text


def _remove_files(folder: Path, stays: Container[str]) -> int:
    """Remove a folder's content except the names in `stays`; return the number of files. Raises StorageError."""
    num_files = 0
    try:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.name in stays:
                continue
            if path.is_dir() and not path.is_symlink():
                num_files += sum(len(names) for _, _, names in os.walk(path))
                shutil.rmtree(path)
            else:
                num_files += 1
                path.unlink()
    except OSError as error:
        raise StorageError(f"cannot clear {folder}: {error.strerror}") from error
    return num_files


def write_private(root: Path, path: Path, text: str) -> None:
    """Write a file durably, 0600, in 0700 directories below `root`. Raises StorageError.

    Neither a directory on the way nor anything in it may be a symbolic link.
    """
    make_private_directories(root, path.parent)
    write_durable(path, text.encode(), mode=0o600)


def make_private_directories(root: Path, folder: Path) -> None:
    """Make the directories from `root` down to `folder`, 0700. Raises StorageError where something else is there."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = root
        for part in folder.relative_to(root).parts:
            made /= part
            _make_private_directory(made)
    except OSError as error:
        raise StorageError(f"cannot make the directory {folder}: {error.strerror}") from error


def _make_private_directory(path: Path) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise StorageError(f"{path} is in the way: it is not a directory; remove it") from None
    else:
        fsync_directory(path.parent)
