"""Finding the local files that a source file imports, to send them to workers that cannot read the user's folder."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from springtide.core.errors import InvalidRequest

# The API's limits on the files of a request, including the main one, and on the length of a path.
MAX_FILES = 256
MAX_PATH_CHARS = 240
# Only text files that belong to code are sent; data belongs in a store that the code reads.
SUFFIXES = (".py", ".pyi", ".json", ".toml", ".yaml", ".yml", ".txt", ".cfg", ".ini")
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,127})*", re.ASCII)
_ADVICE = "put them into the image"


def neighbours(filename: str, text: str, folder: Path) -> dict[str, str]:
    """The texts of all files in `folder` that a file there imports, directly or indirectly, by path below the folder.

    A package is included with all its text files, because other modules may import its parts. Raises InvalidRequest for
    too many files, or one that is not UTF-8.
    """
    waiting, found, seen = [text], dict[str, str](), set[str]()
    while waiting:
        for name in imported_names(waiting.pop()):
            if name in seen:
                continue
            seen.add(name)
            for path in _files_of(name, folder):
                place = path.relative_to(folder).as_posix()
                if place == filename or place in found:
                    continue
                if len(found) >= MAX_FILES - 1:
                    raise InvalidRequest(f"{filename} imports more than {MAX_FILES} files; {_ADVICE}")
                found[place] = _read(path, place)
                if path.suffix == ".py":
                    waiting.append(found[place])
    return found


def _files_of(name: str, folder: Path) -> list[Path]:
    """The files that `import NAME` may read; like Python, a package precedes a file, and a file a namespace package."""
    top, _, rest = name.partition(".")
    package, file = folder / top, folder / f"{top}.py"
    if (package / "__init__.py").is_file():
        return list(_within(package, folder))
    if file.is_file():
        return [file]
    # A folder without __init__.py may hold anything, so it is included only if the import names something in it.
    part = package / rest.partition(".")[0]
    is_imported = bool(rest) and package.is_dir() and (part.is_dir() or part.with_name(f"{part.name}.py").is_file())
    return list(_within(package, folder)) if is_imported else []


def _within(package: Path, folder: Path) -> Iterator[Path]:
    for path in sorted(package.iterdir()):
        if path.name.startswith(".") or not path.resolve().is_relative_to(folder.resolve()):
            continue
        if path.is_dir() and not path.is_symlink() and path.name not in _SKIPPED_FOLDERS:
            yield from _within(path, folder)
        elif path.is_file() and path.suffix in SUFFIXES:
            yield path


def _read(path: Path, place: str) -> str:
    if len(place) > MAX_PATH_CHARS or _PATH.fullmatch(place) is None:
        raise InvalidRequest(
            f"{place!r:.80} cannot be sent: a path is at most {MAX_PATH_CHARS} letters, digits, '.', '_' and '-', in "
            "parts that begin with a letter, a digit or '_'; rename it, or move it out of the package"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{place} is not UTF-8 text; {_ADVICE}") from None
    except OSError as error:
        raise InvalidRequest(f"cannot read {place}: {error.strerror or error}") from None


def imported_names(text: str) -> Iterator[str]:
    """The dotted names that a file imports; `from a import b` gives a.b, because b may be a module."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
