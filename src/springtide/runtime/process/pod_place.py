"""A worker's environment in a container: its spec and key, its source, its directories, and where its output goes."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest, StorageError
from springtide.core.tokens import replica_token
from springtide.core.wire.workers import WorkerSpec
from springtide.core.workload import Entrypoint
from springtide.runtime.prestop import SOCKET_NAME, SPEC_VARIABLE, WORK_DIR_NAME
from springtide.storage.files import make_private
from springtide.storage.folders.tree import FOLDER
from springtide.storage.workloads.store import open_workload_store

KEY_FILE_VARIABLE = "SPRINGTIDE_KEY_FILE"
ADDRESS_VARIABLE = "POD_IP"
TERMINATION_VARIABLE = "SPRINGTIDE_TERMINATION_LOG"
_TERMINATION_LOG = "/dev/termination-log"
_MAX_TERMINATION_BYTES = 2048
_FETCH_PATIENCE_S = 60.0
_FETCH_RETRY_S = 1.0


def read_spec(environment: Mapping[str, str]) -> WorkerSpec:
    """The spec of this container's worker, completed by its token, directories and address. Raises InvalidRequest.

    `ordered_at_s` is set to 0, because it was measured by another machine's clock.
    """
    text = environment.get(SPEC_VARIABLE, "")
    if not text:
        raise InvalidRequest(f"the environment has no {SPEC_VARIABLE}: what is this worker to do?")
    try:
        spec = decode_json(text, WorkerSpec)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{SPEC_VARIABLE} is not the spec of a worker: {error}") from None
    token = spec.token
    key_file = environment.get(KEY_FILE_VARIABLE, "")
    if key_file:
        try:
            token = replica_token(Path(key_file).read_text().strip(), spec.replica_id)
        except OSError as error:
            raise InvalidRequest(f"the workload's key {key_file} cannot be read: {error.strerror}") from None
    if not token:
        raise InvalidRequest(f"the environment has no {KEY_FILE_VARIABLE}: the platform would not know this worker")
    work_dir = Path(spec.work_dir) if spec.work_dir else Path(tempfile.gettempdir()) / WORK_DIR_NAME
    log_path = work_dir / "logs" / f"{spec.replica_id}.log"
    try:
        make_private(log_path.parent)
    except OSError as error:
        raise InvalidRequest(f"the worker's directory {work_dir} cannot be made: {error.strerror}") from None
    listen_host = spec.listen_host or environment.get(ADDRESS_VARIABLE, "")
    return replace(
        spec, token=token, work_dir=str(work_dir), log_path=str(log_path), listen_host=listen_host, ordered_at_s=0.0
    )


def fetch_source(spec: WorkerSpec) -> WorkerSpec:
    """Download the user's code and return the spec with the local path. Raises InvalidRequest, StorageError.

    Retries for a minute while the store does not answer.
    """
    if not spec.store_url:
        return spec
    entrypoint = spec.workload.entrypoint
    end_s = time.monotonic() + _FETCH_PATIENCE_S
    store = open_workload_store(spec.store_url, spec.workload_id)
    while True:
        try:
            if entrypoint.folder is not None:
                path = store.fetch_folder(entrypoint.folder, Path(spec.work_dir) / FOLDER)
            else:
                path = store.fetch_source(entrypoint.source_path, Path(spec.work_dir))
            break
        except (StorageError, OSError):
            if time.monotonic() > end_s:
                raise
        time.sleep(_FETCH_RETRY_S)
    store.close()
    if path is None:
        what = f"source {entrypoint.source_path}" if entrypoint.folder is None else "archive of the folder"
        raise InvalidRequest(f"the store holds no {what} of {spec.workload_id}")
    # Files that were submitted with the source can be imported from its folder.
    here: Entrypoint = replace(entrypoint, source_path=str(path), import_root=str(path.parent))
    return replace(spec, workload=replace(spec.workload, entrypoint=here))


def root_of_source(spec: WorkerSpec) -> Path:
    """Where a fetched source's folder begins: the copy of what travelled with it, or the folder of the file."""
    file, folder = Path(spec.workload.entrypoint.source_path), spec.workload.entrypoint.folder
    return file.parents[0 if folder is None else folder.path.count("/")]


def open_prestop(spec: WorkerSpec) -> socket.socket:
    """Open the socket that a preStop hook connects to (prestop.py). Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(spec.work_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        (Path(spec.work_dir) / SOCKET_NAME).unlink(missing_ok=True)
        # A work directory's path may be longer than a unix socket's may be.
        listener.bind(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
        listener.listen()
    finally:
        os.close(directory)
    return listener


def write_termination_message(environment: Mapping[str, str], sentence: str) -> None:
    """Write the termination message that Kubernetes shows; does nothing outside a container."""
    path = Path(environment.get(TERMINATION_VARIABLE, "") or _TERMINATION_LOG)
    try:
        # Kubernetes creates the file; outside a container it does not exist and must not be created.
        with path.open("r+b") as file:
            file.write(sentence.encode()[:_MAX_TERMINATION_BYTES])
    except OSError:
        return


def upload_log(spec: WorkerSpec, output: bytes) -> None:
    """Upload a worker's output to the job's store, if it has one. Raises InvalidRequest, StorageError."""
    if not spec.store_url:
        return
    store = open_workload_store(spec.store_url, spec.workload_id)
    store.put_log(spec.replica_id, output)
    store.close()
