"""The Python packages that a workload asks for: a requirements file, a header (PEP 723), or pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from springtide.client.folders.choice import FolderWish, chosen_folder
from springtide.client.sources.source import SourceFile
from springtide.core.errors import InvalidRequest
from springtide.core.options.packages import check_requirements

_MAX_FILE_BYTES = 1024 * 1024
# The expression of PEP 723.
_HEADER = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
_COMMENT = re.compile(r"(^|\s)#.*$")
_NAMED = 3
_FIND = "--find-links "
_PLACES = ("-f ", "--find-links ", "--find-links=")


def requirements_of(asked: str | Sequence[str], source: SourceFile) -> tuple[str, ...]:
    """The requirements of a workload: those that are asked for, else of its file's header, else of pyproject.toml.

    `asked` is a list of lines, or the path of a requirements file. `pyproject.toml` is the one in the file's folder,
    and its list is `dependencies` of `[tool.springtide]`. Paths become absolute. Raises InvalidRequest.
    """
    if isinstance(asked, str):
        path = Path(asked).expanduser().absolute()
        return _checked(_lines(_read(path)), path.parent, f"the requirements file {asked}")
    if asked:
        return _checked(asked, Path.cwd(), "requirements")
    folder = Path(source.import_root or ".")
    header = _header_of(source)
    if header is not None:
        return _checked(header, folder, f"the header of {source.filename}")
    table = _toml(folder / "pyproject.toml")
    section = table.get("tool", {}).get("springtide", {}) if isinstance(table.get("tool", {}), dict) else {}
    listed = section.get("dependencies", ()) if isinstance(section, dict) else ()
    return _checked(listed, folder, f"[tool.springtide] dependencies in {folder / 'pyproject.toml'}")


def with_packages(
    request: Mapping[str, Any],
    asked: str | Sequence[str],
    source: SourceFile,
    *,
    has_pods: bool,
    folder: FolderWish = None,
    on_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The options of a request with the requirements of its workload. Raises InvalidRequest.

    `folder` is as for `chosen_folder`: pods have no other files than its. On functions packages are those of the image:
    what the file names is told to `on_progress`.
    """
    if request.get("on", "cluster") != "cluster":
        if found := requirements_of((), source):
            named = ", ".join(found[:_NAMED]) + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")
            on_progress(f"{source.filename} asks for {named}: nothing is installed there, its image has to have them")
        return dict(request)
    found = pod_requirements(asked, source, folder) if has_pods else requirements_of(asked, source)
    return {**request, **({"requirements": list(found)} if found else {})}


def pod_requirements(asked: str | Sequence[str], source: SourceFile, wish: FolderWish) -> tuple[str, ...]:
    """The requirements of a workload in pods: paths in them are relative to the folder that travels.

    Raises InvalidRequest, also for a path that is not in it.
    """
    found = requirements_of(asked, source)
    folder = None if source.location is None else chosen_folder(source.location, source.text, wish)
    return tuple(_within(line, folder) for line in found)


def _within(line: str, folder: Path | None) -> str:
    option = _FIND if line.startswith(_FIND) else ""
    place = line.removeprefix(option)
    if not place.startswith("/"):
        return line
    if folder is None or not Path(place).is_relative_to(folder):
        raise InvalidRequest(
            f"the requirement {place:.200} is a path of this machine, which pods do not see; put it into the folder "
            "that travels with the file (--folder names it)"
        )
    return f"{option}./{Path(place).relative_to(folder)}"


def _header_of(source: SourceFile) -> Any:
    """The dependencies in a script's header; None if there is no header, or it names none. Raises InvalidRequest."""
    found = [match for match in _HEADER.finditer(source.text) if match["type"] == "script"]
    if not found:
        return None
    if len(found) > 1:
        raise InvalidRequest(f"{source.filename} has {len(found)} headers of the type script; leave one of them")
    content = "".join(
        line[2:] if line.startswith("# ") else line[1:] for line in found[0]["content"].splitlines(keepends=True)
    )
    try:
        return tomllib.loads(content).get("dependencies")
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"the header of {source.filename} is not valid TOML: {error}") from None


def _lines(text: str) -> Iterator[str]:
    """The lines of a requirements file without comments and empty ones, continued lines as one."""
    for line in text.replace("\\\n", " ").splitlines():
        stripped = _COMMENT.sub("", line).strip()
        if stripped:
            yield " ".join(stripped.split())


def _checked(lines: Any, folder: Path, where: str) -> tuple[str, ...]:
    checked = check_requirements(list(lines) if isinstance(lines, Iterator) else lines, where)
    return tuple(_absolute(line, folder) for line in checked)


def _absolute(line: str, folder: Path) -> str:
    """The line with the path of a file or folder of this machine made absolute: pip runs elsewhere."""
    for option in _PLACES:
        if line.startswith(option):
            place = line.removeprefix(option).strip()
            return line if "://" in place else f"--find-links {folder.joinpath(Path(place).expanduser()).resolve()}"
    if line.startswith((".", "/", "~")) or line.endswith((".whl", ".tar.gz")):
        return line if "://" in line else str(folder.joinpath(Path(line).expanduser()).resolve())
    return line


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InvalidRequest(f"{path} is larger than 1 MiB; is it a requirements file?")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is not UTF-8 text; is it a requirements file?") from None
    except OSError as error:
        raise InvalidRequest(f"the requirements file {path} cannot be read: {error.strerror or error}") from None


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}") from None
