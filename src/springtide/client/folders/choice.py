"""Which folder travels with a job's file: the one that it is in, or the project's where its imports need that."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from springtide.client.sources.neighbours import imported_names, neighbours
from springtide.client.sources.source import SourceFile, for_pods
from springtide.core.errors import InvalidRequest
from springtide.storage.folders.tree import import_roots

# A folder by its path; None: chosen by the rule; False: the file travels alone.
FolderWish = str | Path | Literal[False] | None
# The most text of neighbours that is sent with a request, beside the file itself.
_MAX_CODE_BYTES = 512 * 1024
_PROJECT_MARKS = ("pyproject.toml", ".git")


def chosen_folder(location: Path, text: str, wish: FolderWish) -> Path | None:
    """The folder that travels with the file at `location`, which holds `text`; None: the file alone.

    Without a wish it is the folder of the file; the nearest one above with a pyproject.toml or .git, else the one that
    holds the file's package, is it if the file, or one that it imports, imports something from there or from its src. A
    file in the home directory itself, or in the one of temporary files, travels alone. Raises InvalidRequest for a wish
    that is no folder around the file.
    """
    if wish is False:
        return None
    if wish is None and is_too_wide(location.parent):
        return None
    if wish is None:
        project = _project_above(location.parent)
        return project if project is not None and _needs(location, text, project) else location.parent
    folder = Path(wish).expanduser().resolve()
    if not folder.is_dir():
        raise InvalidRequest(f"the folder {str(wish)!r:.200} is not there; name one that holds {location.name}")
    if not location.is_relative_to(folder):
        raise InvalidRequest(f"{location} is not in the folder {folder}; name one that holds it")
    return folder


def with_code(source: SourceFile, wish: FolderWish, *, has_pods: bool) -> SourceFile:
    """The source with the texts of what it imports from the folder that travels, or that pods need without one.

    Raises InvalidRequest.
    """
    folder = None if source.location is None else chosen_folder(source.location, source.text, wish)
    if source.location is None or folder is None:
        return for_pods(source) if has_pods else source
    return replace(source, files=code_files(source.location, source.text, folder))


def code_files(location: Path, text: str, folder: Path) -> dict[str, str]:
    """The texts of the modules that the file imports from the folder, by path; they tell one job's code from another's.

    Empty if they are too many to be sent with a request.
    """
    found: dict[str, str] = {}
    for root in reversed(import_roots(location, folder)):
        try:
            found |= neighbours(location.name, text, root)
        except InvalidRequest:
            return {}
    found.pop(location.name, None)
    texts = {path: code for path, code in found.items() if path.endswith(".py") and _is_python(code)}
    return texts if sum(len(code.encode()) for code in texts.values()) <= _MAX_CODE_BYTES else {}


def package_root(folder: Path) -> Path:
    """The folder that holds the package which this folder is, or is in; the folder itself if it is none."""
    return next((each for each in (folder, *folder.parents) if not (each / "__init__.py").is_file()), folder)


def is_too_wide(folder: Path) -> bool:
    """Whether a folder holds all kinds of things, of which a file in it is but one: then it travels only if named."""
    return folder in (Path.home(), Path(tempfile.gettempdir()).resolve(), Path(folder.anchor))


def _project_above(folder: Path) -> Path | None:
    """The nearest folder with a mark of a project, else the one that holds this package, if it is above this one and
    not the home directory or the root."""
    marked = (each for each in (folder, *folder.parents) if any((each / mark).exists() for mark in _PROJECT_MARKS))
    found = next(marked, None) or package_root(folder)
    return None if found == folder or is_too_wide(found) else found


def _needs(location: Path, text: str, project: Path) -> bool:
    """Whether the file, or one beside it that it imports, imports something of the project from elsewhere."""
    try:
        texts = [text, *neighbours(location.name, text, location.parent).values()]
    except InvalidRequest:
        texts = [text]
    for name in dict.fromkeys(top for each in texts for top in _top_names(each)):
        if name in sys.stdlib_module_names or name == "springtide" or _is_module(name, location.parent):
            continue
        if _is_module(name, project) or _is_module(name, project / "src"):
            return True
    return False


def _top_names(text: str) -> Iterator[str]:
    return (name.partition(".")[0] for name in imported_names(text))


def _is_module(name: str, folder: Path) -> bool:
    package = folder / name
    return package.with_name(f"{name}.py").is_file() or (package.is_dir() and any(package.glob("*.py")))


def _is_python(text: str) -> bool:
    try:
        compile(text, "neighbour", "exec", dont_inherit=True, flags=0x400)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
