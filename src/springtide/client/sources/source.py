"""The user's source file as it is submitted: its text is copied, so that later edits do not affect a running job."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from springtide.client.sources.neighbours import neighbours
from springtide.client.sources.notebooks import NOTEBOOK_FILE, cell_text
from springtide.core.errors import InvalidRequest
from springtide.core.workload import Library

# Set while a file is imported only to find what it declares; it must not submit jobs then.
IMPORTING_VARIABLE = "SPRINGTIDE_IMPORTING"
_GUARD = "put it under `if __name__ == '__main__':`"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentFolder:
    """A folder whose contents the platform has: the digest of the list of its files, and the file's path in it.

    `directory` is the one in it where the job works (empty: the folder itself), `origin` where it is, for people.
    """

    sha256: str
    path: str
    directory: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One Python file and the object in it to run. `files` are the texts of further files, by path relative to it.

    `location` is where the file is, None for a text that is in none. `library` is the one that runs a script's loop,
    where that is to make it elastic.
    """

    filename: str
    text: str
    object_name: str = ""
    kind: Literal["function", "class", "script"] = "function"
    args: tuple[str, ...] = ()
    import_root: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    location: Path | None = None
    library: Library = ""


def read_source(
    path: str | Path,
    object_name: str = "",
    kind: Literal["function", "class", "script"] = "function",
    args: tuple[str, ...] = (),
    library: Library = "",
) -> SourceFile:
    """Read a source file. Raises InvalidRequest if it does not exist or is not UTF-8 text."""
    location = Path(path).resolve()
    try:
        text = location.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{location.name} is not UTF-8 text; is it a Python file?") from None
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror or error}") from None
    return SourceFile(
        filename=location.name,
        text=text,
        object_name=object_name,
        kind=kind,
        args=args,
        import_root=str(location.parent),
        location=location,
        library=library,
    )


def source_of(target: Any, kind: Literal["function", "class"]) -> SourceFile:
    """The file that defines a function or class; for one of a notebook, a text that is made of its cells.

    Raises InvalidRequest unless it is defined at the top level, and of a notebook if it uses what cannot be sent.
    """
    if "<locals>" in target.__qualname__ or "." in target.__qualname__ or target.__qualname__ == "<lambda>":
        raise InvalidRequest(
            f"{target.__qualname__} is defined inside something else; workers import the file, "
            f"so define it at the file's top level"
        )
    try:
        path = inspect.getsourcefile(target)
    except TypeError:
        path = None
    if path is not None and os.path.isfile(path):
        return read_source(path, target.__name__, kind)
    # Of a notebook or an interactive session: as if its cells were a file where the session works.
    text, here = cell_text(target), Path.cwd()
    return SourceFile(
        filename=NOTEBOOK_FILE,
        text=text,
        object_name=target.__name__,
        kind=kind,
        import_root=str(here),
        location=here / NOTEBOOK_FILE,
    )


def object_name_in(target: object, namespace: Mapping[str, Any], what: str) -> str:
    """The name that `target` has in its file. Raises InvalidRequest if it has none."""
    for name, value in namespace.items():
        if value is target and not name.startswith("_"):
            return name
    raise InvalidRequest(f"this {what} has no name in its file; assign it at the top level: job = st.Task(...)")


def refuse_while_importing(path: str, verb: str) -> None:
    """Raise InvalidRequest if the file at `path` is being imported by a worker, or only to find what it declares."""
    if os.environ.get(IMPORTING_VARIABLE) or state_directory_around(path) is not None:
        raise InvalidRequest(f"{verb} was called while the file was being imported by Springtide; {_GUARD}")


def state_directory_around(path: str) -> Path | None:
    """The state directory if `path` is in a submitted copy (below <state>/workloads/<id>), else None."""
    folders = Path(path).resolve().parents
    for source, _, workloads, state in zip(folders, folders[1:], folders[2:], folders[3:], strict=False):
        if source.name in ("source", "folder", "folders") and workloads.name == "workloads":
            return state
    return None


def name_from(identifier: str) -> str:
    """A workload name from a Python name: `MyModel` becomes `my-model`."""
    dashed = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", identifier).lower()
    cleaned = re.sub(r"[^a-z0-9._-]+", "-", dashed).strip("-._")
    return cleaned[:48] or "job"


def for_pods(source: SourceFile) -> SourceFile:
    """The source with all local files that it imports, for workers in pods, which cannot read the user's folder.

    Raises InvalidRequest.
    """
    if not source.import_root:
        return replace(source, files={})
    files = neighbours(source.filename, source.text, Path(source.import_root))
    return replace(source, files=files, import_root="")
