"""The user's source files: checked without running them, and the place of each in the platform's store."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import PurePosixPath

from springtide.core.errors import InvalidRequest
from springtide.core.workload import Entrypoint, JobFolder, WorkloadId
from springtide.service.submission.problems import TooLarge
from springtide.service.submission.schemas import MAX_SOURCE_BYTES, JobSourceIn, ServiceSourceIn
from springtide.service.submission.source_check import SOURCES

_FILENAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\.py")


def check_source(source: JobSourceIn | ServiceSourceIn) -> None:
    """Raise InvalidRequest unless the file's name is safe, its text is Python and the object's name is an identifier.

    The text is compiled to find its syntax errors, in another process; nothing of it is executed. Also raises
    CapacityError if too many others are being compiled.
    """
    if _FILENAME.fullmatch(source.filename) is None or ".." in source.filename:
        raise InvalidRequest(
            f"source.filename {source.filename!r:.80} is not allowed; "
            "send the bare name of a Python file, like 'train.py'"
        )
    _check_files(source)
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
    identity_of(source)


def identity_of(source: JobSourceIn | ServiceSourceIn) -> str:
    """What the function computes, whatever is written around it (code_identity.py); empty if it has no identity.

    Raises InvalidRequest if the text is not Python or takes too much to be compiled, CapacityError if too many others
    are being compiled.
    """
    name = "" if source.kind == "script" else source.object_name
    return SOURCES.check({source.filename: source.text, **source.files}, source.filename, name)


def _check_files(source: JobSourceIn | ServiceSourceIn) -> None:
    if source.filename in source.files:
        raise InvalidRequest(f"source.files holds {source.filename} once more; its text belongs into source.text alone")
    for name in source.files:
        folder = next((other for other in (source.filename, *source.files) if name.startswith(f"{other}/")), "")
        if folder:
            raise InvalidRequest(f"source.files holds {name}, and {folder} is a file; give one of them another name")
    if len(source.text.encode()) + sum(len(text.encode()) for text in source.files.values()) > MAX_SOURCE_BYTES:
        raise TooLarge("the source is larger than 1 MiB; put data into a dataset and read it from the function")


def check_import_root(import_root: str) -> None:
    """Raise InvalidRequest unless `import_root` is empty or an absolute directory that exists."""
    if not import_root:
        return
    if "\0" in import_root or not os.path.isabs(import_root) or not os.path.isdir(import_root):
        raise InvalidRequest(
            f"source.import_root {import_root!r:.200} must be an existing absolute directory; "
            "send the folder that holds the file, or leave it out"
        )


def entrypoint_of(
    source: JobSourceIn | ServiceSourceIn, address: str, import_root: str, folder: JobFolder | None = None
) -> Entrypoint:
    """Return where workers find the user's code: at `address`, and its neighbours in `import_root` or beside it."""
    if (source.files or folder is not None) and not import_root and os.path.isabs(address):
        import_root = os.path.dirname(address)
    return Entrypoint(
        source_path=address,
        object_name=source.object_name,
        kind=source.kind,
        args=source.args,
        import_root=import_root,
        folder=folder,
    )


def job_place(job_id: WorkloadId, source: JobSourceIn) -> PurePosixPath:
    """Where a job's source goes; it never changes after submission."""
    return PurePosixPath("workloads", job_id, "source", source.filename)


def service_place(service_id: WorkloadId, source: ServiceSourceIn) -> PurePosixPath:
    """Where this revision's source goes; replicas of the revision before still read theirs."""
    return PurePosixPath("workloads", service_id, "source", source_digest(source)[:16], source.filename)


def source_digest(source: JobSourceIn | ServiceSourceIn) -> str:
    """The digest of a source: of its main file and, in order, of all others."""
    digest = hashlib.sha256(source.text.encode())
    for name, text in sorted(source.files.items()):
        digest.update(f"\0{name}\0{text}".encode())
    return digest.hexdigest()
