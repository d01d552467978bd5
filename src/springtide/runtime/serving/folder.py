"""Where a replica works: in a copy of its service's folder that no other replica sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from msgspec.structs import replace

from springtide.core.errors import Conflict, InvalidRequest
from springtide.core.wire.workers import WorkerSpec
from springtide.core.workload import Entrypoint
from springtide.runtime.process.job_folder import enter_folder
from springtide.storage.folders.contents import contents_of_platform
from springtide.storage.folders.copies import ContentDamaged
from springtide.storage.folders.replica_copies import REPLICA_FOLDERS, replica_copy


@contextmanager
def entered_copy(spec: WorkerSpec) -> Iterator[Entrypoint]:
    """Enter the replica's copy of the folder, if there is one, and return the entrypoint as it is in it.

    On one machine the copy is made here and goes with the `with` block; in a container it is there already.
    Raises InvalidRequest, also for a content that is gone or damaged, and StorageError.
    """
    entrypoint = spec.workload.entrypoint
    folder = entrypoint.folder
    if folder is None or spec.store_url:
        enter_folder(entrypoint)
        yield entrypoint
        return
    contents, copies = contents_of_platform(Path(spec.work_dir)), Path(spec.work_dir) / REPLICA_FOLDERS
    with ExitStack() as kept:
        try:
            tree = contents.read_tree(folder.sha256)
            made = replica_copy(tree, contents.open, copies, spec.replica_id, directory=folder.directory)
            file = kept.enter_context(made) / folder.path
        except Conflict as error:
            if isinstance(error, ContentDamaged):
                # The next deployment sends it again.
                contents.discard(error.sha256)
            raise InvalidRequest(f"the service's folder is not whole any more ({error}); deploy it again") from None
        here: Entrypoint = replace(entrypoint, source_path=str(file), import_root=str(file.parent))
        enter_folder(here)
        yield here
