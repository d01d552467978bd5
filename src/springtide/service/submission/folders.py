"""Folders of jobs and services: checked against what was sent, kept while they may be needed, and then removed."""

from __future__ import annotations

import hashlib
import logging
import threading
import time

from springtide.control.records import ServiceRecord
from springtide.control.releases.steps import newest_of
from springtide.core.errors import Conflict, InvalidRequest, SpringtideError, StorageError
from springtide.core.workload import InferenceService, JobFolder, WorkloadId
from springtide.service.lookup import job_of_id
from springtide.service.ports import PlatformLike, SourceStore
from springtide.service.submission.schemas import JobIn, ServiceIn
from springtide.storage.bundles import DEFAULT_LIMITS
from springtide.storage.folders.contents import ContentDirectory
from springtide.storage.folders.tree import FolderTree, check_amount, problem_with_path

LOG = logging.getLogger("springtide.folders")
# Contents that no unfinished job has are kept for the next run of the same folder; copies for their last outputs.
UNUSED_S = 86_400.0
SWEEP_EVERY_S = 3_600.0


def folder_of(request: JobIn | ServiceIn, contents: ContentDirectory) -> tuple[JobFolder, FolderTree] | None:
    """The folder of a request and the list of its files, of which every content is here; None without one.

    Raises InvalidRequest, and Conflict for contents that were not sent.
    """
    source = request.source
    asked = source.folder
    if asked is None:
        return None
    if source.import_root:
        raise InvalidRequest("source.import_root has no meaning with source.folder, which is copied; leave it out")
    for name, value in (("path", asked.path), ("directory", asked.directory)):
        problem = problem_with_path(value) if value else ""
        if problem:
            raise InvalidRequest(f"source.folder.{name} {value!r:.120} cannot be: {problem}")
    tree = contents.read_tree(asked.sha256)
    known = {file.path: file for file in tree.files}
    main = known.get(asked.path)
    if main is None or asked.path.rpartition("/")[2] != source.filename:
        raise InvalidRequest(f"source.folder.path {asked.path!r:.120} is not the file {source.filename} of that folder")
    if main.sha256 != hashlib.sha256(source.text.encode()).hexdigest():
        raise InvalidRequest(f"source.text is another text than {asked.path} in the folder; send both of one moment")
    if any(asked.directory == path or asked.directory.startswith(f"{path}/") for path in known):
        raise InvalidRequest(f"source.folder.directory {asked.directory!r:.120} is a file of the folder")
    lacking = contents.missing(file.sha256 for file in tree.files)
    if lacking:
        raise Conflict(
            f"{len(lacking):,} contents of the folder were not sent, as {lacking[0]}; ask POST /v1/missing-contents "
            "which, and send them first"
        )
    if isinstance(request, JobIn) and request.options.on == "functions":
        check_fits_functions(tree)
    folder = JobFolder(
        sha256=asked.sha256,
        path=asked.path,
        directory=asked.directory,
        origin=asked.origin,
        num_files=len(tree.files),
        num_bytes=tree.num_bytes,
    )
    return folder, tree


def check_fits_functions(tree: FolderTree) -> None:
    """Raise InvalidRequest for a folder that is more than a function takes as a job's code."""
    check_amount(
        ((file.path, file.num_bytes) for file in tree.files),
        limits=(DEFAULT_LIMITS.max_files, DEFAULT_LIMITS.max_bytes, DEFAULT_LIMITS.max_bytes),
        advice="; on functions a job has no more: leave files out in .springtideignore, or read them from a store",
    )


def shared_folder(
    request: ServiceIn, service_id: WorkloadId, old: ServiceRecord | None, store: SourceStore, address: str
) -> JobFolder | None:
    """The folder of a service, durable for its replicas; None without one.

    Of one that `old` has with the source at `address` no content is needed again, as far as the store has it. Raises
    as `folder_of` does.
    """
    asked = request.source.folder
    if asked is None:
        return None
    for known in _versions(old):
        folder = known.entrypoint.folder
        if folder is None or known.entrypoint.source_path != address:
            continue
        is_same = (folder.sha256, folder.path, folder.directory) == (asked.sha256, asked.path, asked.directory)
        if is_same and store.shares_folder(service_id, folder):
            return folder
    sent = folder_of(request, store.contents)
    assert sent is not None
    store.share_folder(service_id, *sent)
    return sent[0]


def drop_folders(record: ServiceRecord, store: SourceStore) -> None:
    """Remove what the store has for versions that a service has no more. What cannot be removed now stays."""
    try:
        store.drop_folders(record.workload_id, _folders_of(record))
    except StorageError as error:
        LOG.warning("older folders of %s stay for now: %s", record.workload_id, error)


def _folders_of(record: ServiceRecord) -> list[JobFolder]:
    """The folders from which replicas of a service may still start."""
    return [each.entrypoint.folder for each in _versions(record) if each.entrypoint.folder is not None]


def _versions(record: ServiceRecord | None) -> list[InferenceService]:
    """The revisions of a service of which replicas may still start, also after a rollback, or that were given up."""
    if record is None or record.is_removed:
        return []
    retired = [each.service for each in record.past if each.state == "retired"]
    known = (record.service, record.proven, record.refused, *retired)
    return [each for each in (*known, newest_of(record)) if each is not None]


class FolderSweep:
    """Removes contents that no unfinished job or service has, and what ended jobs left unchanged in their copies."""

    def __init__(self, platform: PlatformLike) -> None:
        self._platform = platform
        self._lock = threading.Lock()
        self._last_s = -SWEEP_EVERY_S

    def begin(self) -> None:
        """Begin a sweep on a thread of its own, if none was in the last hour: only submissions add to folders."""
        with self._lock:
            if time.monotonic() - self._last_s < SWEEP_EVERY_S:
                return
            self._last_s = time.monotonic()
        threading.Thread(target=self._run, name="springtide-folders", daemon=True).start()

    def _run(self) -> None:
        try:
            self.sweep()
        except (SpringtideError, OSError) as error:
            LOG.warning("contents that no job needs any more stay for now: %s", error)

    def sweep(self, unused_s: float = UNUSED_S) -> int:
        """Remove what no job needs and nothing has used for so long. Returns the number of contents."""
        view, store = self._platform.view(), self._platform.source_store
        needed = [
            record.job.entrypoint.folder for record in view.jobs.values() if not record.lifecycle.state.is_terminal
        ]
        for service in view.services.values():
            needed += _folders_of(service)
        kept: set[str] = set()
        for folder in needed:
            if folder is not None and folder.sha256 not in kept:
                kept.add(folder.sha256)
                if not store.contents.missing([folder.sha256]):
                    kept.update(file.sha256 for file in store.contents.read_tree(folder.sha256).files)
        oldest_unix_s = time.time() - unused_s
        num_removed = store.contents.sweep(kept, oldest_unix_s)

        def is_over(job_id: WorkloadId) -> bool:
            found = job_of_id(self._platform.view(), job_id)
            return found is None or (found.lifecycle.state.is_terminal and not found.replicas)

        store.prune_folders(is_over, oldest_unix_s)
        return num_removed
