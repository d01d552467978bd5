"""Fetching what a job left behind: each file under another name until its digest was checked."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from springtide.core.errors import BackendError, InvalidRequest, NotFound, StorageError
from springtide.core.status.artifacts import ArtifactStatus
from springtide.storage.folders.tree import problem_with_path

if TYPE_CHECKING:
    from springtide.client.api import Client


def fetch_artifacts(
    client: Client,
    job_id: str,
    to: Path,
    names: Sequence[str] = (),
    *,
    overwrites: bool = False,
    on_fetched: Callable[[ArtifactStatus], None] = lambda found: None,
) -> list[Path]:
    """Fetch artifacts of a job, all of them without `names`, into the folder `to`; returns where they are.

    A file that is there with the same content stays. `on_fetched` is called after each one. Raises NotFound for a name
    that there is not, InvalidRequest for a file that is there with another content, unless `overwrites`, and
    BackendError for one that did not come whole.
    """
    known = {found.name: found for found in client.artifacts(job_id, with_digests=True)}
    unknown = [name for name in names if name not in known]
    if unknown:
        listed = ", ".join(sorted(known)[:10]) or "none"
        raise NotFound(f"{job_id} has no artifact {unknown[0]!r:.200}; it has {listed}")
    wanted = [known[name] for name in names or known]
    for found in wanted:
        problem = problem_with_path(found.name)
        if problem:
            raise BackendError(f"the platform names an artifact {found.name!r:.120}, which cannot be: {problem}")
        target = to / found.name
        if os.path.lexists(target) and not overwrites and _digest(target) != found.sha256:
            raise InvalidRequest(f"{target} is there already and is another file; fetch into another folder, with --to")
    return [_fetch(client, job_id, found, to / found.name, on_fetched) for found in wanted]


def _fetch(
    client: Client, job_id: str, found: ArtifactStatus, target: Path, on_fetched: Callable[[ArtifactStatus], None]
) -> Path:
    if _digest(target) == found.sha256 != "":
        return target
    digest, temporary = hashlib.sha256(), ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", prefix=".", suffix=".part", dir=target.parent, delete=False) as file:
            temporary = file.name
            for chunk in client.artifact(job_id, found.name):
                digest.update(chunk)
                file.write(chunk)
        if found.sha256 and digest.hexdigest() != found.sha256:
            raise BackendError(f"{found.name} of {job_id} did not come whole, or was written to meanwhile; try again")
        os.replace(temporary, target)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
    on_fetched(found)
    return target


def _digest(path: Path) -> str:
    """The digest of a file's content; empty if there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
