"""Where a job works: in its copy of the folder that was submitted, with a folder for what it is to leave behind."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from springtide.core.errors import InvalidRequest, StorageError
from springtide.core.wire.workers import WorkerSpec
from springtide.core.workload import Entrypoint
from springtide.storage.files import make_private
from springtide.storage.folders.tree import import_roots
from springtide.storage.workloads.results import OUT_VARIABLE, RESULTS, list_results
from springtide.storage.workloads.store import open_workload_store

# The head object of a job names each of them.
MAX_HANDED_IN = 1_000


def enter_job(spec: WorkerSpec) -> None:
    """Name the folder of the job's results in the environment, and enter its copy of the submitted folder, if any.

    Raises InvalidRequest if that is gone.
    """
    results = Path(spec.work_dir) / RESULTS
    with contextlib.suppress(OSError):
        # On a full disk the job may still train; what it writes there then fails.
        make_private(results)
    os.environ[OUT_VARIABLE] = str(results)
    enter_folder(spec.workload.entrypoint)


def hand_in_results(spec: WorkerSpec, generation: int, step: int) -> None:
    """Put what a job in a pod wrote into its folder of results into the job's store, under the fence.

    On one machine that folder is where the platform finds it. What cannot be handed in is told in the job's output.
    """
    if not spec.store_url:
        return
    root = Path(spec.work_dir) / RESULTS
    found = list_results(root)
    if len(found) > MAX_HANDED_IN:
        sys.stderr.write(f"springtide: of {len(found):,} files in {OUT_VARIABLE}, {MAX_HANDED_IN:,} are handed in\n")
    try:
        store = open_workload_store(spec.store_url, spec.workload_id)
        for result in found[:MAX_HANDED_IN]:
            try:
                store.publish_artifact(result.name, root / result.name, generation, step)
            except StorageError as error:
                sys.stderr.write(f"springtide: {result.name} in {OUT_VARIABLE} could not be handed in: {error}\n")
        store.close()
    except StorageError as error:
        sys.stderr.write(f"springtide: what is in {OUT_VARIABLE} could not be handed in: {error}\n")


def enter_folder(entrypoint: Entrypoint) -> None:
    """Work in the copy of the folder, where the owner stood in it, and import from the copy before anything else.

    Raises InvalidRequest if the copy is gone. Does nothing for a job without a folder.
    """
    folder = entrypoint.folder
    if folder is None:
        return
    file = Path(entrypoint.source_path)
    root = file.parents[folder.path.count("/")]
    began_in = _working_directory()
    try:
        os.chdir(root / folder.directory)
    except OSError as error:
        raise InvalidRequest(
            f"the job's copy of its folder, {root}, cannot be entered ({error.strerror}); submit the job again"
        ) from None
    os.environ["PWD"] = str(root / folder.directory)
    roots = [str(each) for each in import_roots(file, root)]
    # The directory where the process began is on the path of a program that is started with `python -m`.
    sys.path[:] = [*roots, *(entry for entry in sys.path if entry not in ("", began_in, *roots))]


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
