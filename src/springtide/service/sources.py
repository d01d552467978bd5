"""The user's source files: checked without ever being run here, and written once to where workers read them."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path

from springtide.core.errors import InvalidRequest, StorageError
from springtide.core.workload import Entrypoint, WorkloadId
from springtide.service.contract import PlatformLike
from springtide.service.problems import TooLarge
from springtide.service.schemas import MAX_SOURCE_BYTES, JobSourceIn, ServiceSourceIn
from springtide.storage.files import fsync_directory, write_durable

_FILENAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\.py")


def check_source(source: JobSourceIn | ServiceSourceIn) -> None:
    """Raise InvalidRequest unless the file's name is safe, its text is Python and the named object can be one.

    The text is compiled to find its syntax errors; nothing of it is executed.
    """
    if _FILENAME.fullmatch(source.filename) is None or ".." in source.filename:
        raise InvalidRequest(
            f"source.filename {source.filename!r:.80} is not allowed; "
            "send the bare name of a Python file, like 'train.py'"
        )
    if len(source.text.encode()) > MAX_SOURCE_BYTES:
        raise TooLarge("source.text is larger than 1 MiB; put data into files and read them from the function")
    if not source.text.strip():
        raise InvalidRequest("source.text is empty; send the whole content of the file")
    if source.kind == "script":
        if source.object_name:
            raise InvalidRequest("source.object_name has no meaning for a script, which runs as a whole; leave it out")
    elif not source.object_name.isidentifier():
        raise InvalidRequest(
            f"source.object_name {source.object_name!r:.80} is not a Python name; "
            f"send the name of the {source.kind} in {source.filename}"
        )
    for argument in source.args:
        if "\0" in argument:
            raise InvalidRequest("source.args must not hold NUL characters; remove them")
    try:
        compile(source.text, source.filename, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise InvalidRequest(f"{source.filename} line {error.lineno} is not valid Python: {error.msg}") from None
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"{source.filename} is not valid Python: {error}") from None
    except (RecursionError, MemoryError):
        raise InvalidRequest(f"{source.filename} is nested too deeply to be compiled; flatten it") from None


def check_import_root(import_root: str) -> None:
    """Raise InvalidRequest unless `import_root` is empty or an absolute directory that exists."""
    if not import_root:
        return
    if "\0" in import_root or not os.path.isabs(import_root) or not os.path.isdir(import_root):
        raise InvalidRequest(
            f"source.import_root {import_root!r:.200} must be an existing absolute directory; "
            "send the folder that holds the file, or leave it out"
        )


def entrypoint_of(source: JobSourceIn | ServiceSourceIn, path: Path) -> Entrypoint:
    """Return where workers find the user's code, once it is written to `path`."""
    return Entrypoint(
        source_path=str(path),
        object_name=source.object_name,
        kind=source.kind,
        args=source.args,
        import_root=source.import_root,
    )


def job_source_path(platform: PlatformLike, job_id: WorkloadId, source: JobSourceIn) -> Path:
    """Where a job's source goes; it never changes after submission."""
    return platform.workload_dir(job_id) / "source" / source.filename


def service_source_path(platform: PlatformLike, service_id: WorkloadId, source: ServiceSourceIn) -> Path:
    """Where this revision's source goes: replicas of the revision before go on reading theirs."""
    digest = hashlib.sha256(source.text.encode()).hexdigest()[:16]
    return platform.workload_dir(service_id) / "source" / digest / source.filename


def may_write(path: Path, text: str) -> bool:
    """Whether there is no source at `path` yet, or this very one."""
    try:
        return path.read_bytes() == text.encode()
    except FileNotFoundError:
        return True
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def write_source(workload_dir: Path, path: Path, text: str) -> None:
    """Write a source file durably, 0600, in 0700 directories. Raises StorageError.

    Neither the workload's directory nor anything in it may be a symbolic link.
    """
    root = workload_dir.parent
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = root
        for part in path.parent.relative_to(root).parts:
            folder /= part
            _make_private_directory(folder)
    except OSError as error:
        raise StorageError(f"cannot make the directory {path.parent}: {error.strerror}") from error
    write_durable(path, text.encode(), mode=0o600)


def _make_private_directory(path: Path) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise StorageError(f"{path} is in the way: it is not a directory; remove it") from None
    else:
        fsync_directory(path.parent)
