"""What of a folder travels: its files, without those that ignore files, or what is usual, leave out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pathspec import GitIgnoreSpec

from springtide.core.quantities import format_bytes
from springtide.storage.folders.tree import MAX_FILES, problem_with_path

OWN_IGNORE = ".springtideignore"
GIT_IGNORE = ".gitignore"
# Left out of every folder, unless .springtideignore takes a name back with `!`.
USUAL = (
    *(".git", ".hg", ".svn", "__pycache__/", "*.py[cod]", ".venv/", "node_modules/", ".tox/", ".nox/", ".eggs/"),
    *("*.egg-info/", ".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".ipynb_checkpoints/", ".DS_Store", ".idea/"),
    *(".vscode/", "springtide-out/", ".env", ".env.*"),
)
# Weights of this size are taken for results of earlier runs, not for what a job needs.
MODEL_SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".onnx", ".h5", ".npz", ".gguf", ".pkl")
MAX_MODEL_BYTES = 32 << 20
_NAMED = 3
# Beside its journal, and from its first start on.
_OF_PLATFORM = frozenset({"token", "journal.head", "workloads"})


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that travels: its path below the folder, where it is, and what the system says of it."""

    path: str
    location: str
    stat: os.stat_result


@dataclass(slots=True)
class FoundFolder:
    """What of a folder travels. `left_out` are paths by the reason why they do not, where that is worth a word."""

    files: list[FoundFile] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """A sentence for each reason, with the first paths that it concerns."""
        return [
            f"not sent, {reason}: {', '.join(paths[:_NAMED])}"
            + (f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else "")
            for reason, paths in self.left_out.items()
        ]

    def leave_out(self, reason: str, path: str) -> None:
        """Note that a path does not travel."""
        self.left_out.setdefault(reason, []).append(path)


class _Rule(NamedTuple):
    """An ignore file: its patterns are for `lead` and what is left of a path without its first `cut` characters."""

    spec: GitIgnoreSpec
    cut: int = 0
    lead: str = ""


class _Rules(NamedTuple):
    """Ignore files on the way to a folder, the innermost first.

    A file of Springtide's own decides before one of git's; what neither names is left out if it is usual.
    """

    own: tuple[_Rule, ...]
    git: tuple[_Rule, ...]

    def verdict(self, path: str) -> tuple[bool | None, str]:
        """Whether the path (a folder's ends with a slash) is left out, None if no rule names it; and by what."""
        for by, rules in ((OWN_IGNORE, self.own), (GIT_IGNORE, self.git)):
            for rule in rules:
                found = rule.spec.check_file(rule.lead + path[rule.cut :]).include
                if found is not None:
                    # What is usual is left out without a word, though git names it, too.
                    return found, "" if found and _USUAL.check_file(path).include else by
        return _USUAL.check_file(path).include, ""


_USUAL = GitIgnoreSpec.from_lines(USUAL)


def scan(root: Path, always: str) -> FoundFolder:
    """Find what of the folder travels; the file `always` (a path below it) does in any case.

    Links within the folder are followed, so that their contents travel; links that leave it, files that cannot be read
    or named, and large weights are left out with a note.
    """
    found = FoundFolder()
    _Walk(root, found, always).enter(str(root), "", _Rules((), _git_rules_above(root)), (os.path.realpath(root),))
    found.files.sort(key=lambda file: file.path)
    found.folders.sort()
    return found


class _Walk:
    """One walk through a folder."""

    def __init__(self, root: Path, found: FoundFolder, always: str) -> None:
        self._root = os.path.realpath(root)
        self._found = found
        self._always = always

    def enter(self, folder: str, prefix: str, rules: _Rules, around: tuple[str, ...]) -> None:
        """Add what is in a folder. `around` are the real paths of it and the ones that were entered before it.

        Ends early when there are more files than may travel.
        """
        if len(self._found.files) > MAX_FILES:
            return
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            self._found.leave_out("as it cannot be read", prefix)
            return
        names = {entry.name for entry in entries}
        if prefix and ("pyvenv.cfg" in names or ("journal.db" in names and names & _OF_PLATFORM)):
            # A virtual environment, or the state of a platform, with its token and the copies of its jobs.
            return
        num_files = len(self._found.files)
        rules = _with_files(rules, folder, prefix, names)
        for entry in entries:
            path = prefix + entry.name
            problem = problem_with_path(path)
            if problem:
                self._found.leave_out(f"as its name cannot be ({problem})", ascii(path)[1:-1])
            elif entry.is_symlink():
                self._add_link(entry, path, rules, around)
            elif entry.is_dir():
                self._add_folder(entry.path, path, rules, around)
            else:
                self._add_file(entry.path, path, rules)
        if prefix and len(self._found.files) == num_files:
            self._found.folders.append(prefix.rstrip("/"))

    def _add_link(self, entry: os.DirEntry[str], path: str, rules: _Rules, around: tuple[str, ...]) -> None:
        real = os.path.realpath(entry.path)
        is_folder = os.path.isdir(real)
        if rules.verdict(f"{path}/" if is_folder else path)[0]:
            return
        if os.path.commonpath([real, self._root]) != self._root:
            self._found.leave_out("as the link leaves the folder", path)
        elif is_folder and real in around:
            self._found.leave_out("as the link leads to a folder around it", path)
        elif is_folder:
            self._add_folder(entry.path, path, rules, around)
        else:
            self._add_file(entry.path, path, rules)

    def _add_folder(self, location: str, path: str, rules: _Rules, around: tuple[str, ...]) -> None:
        left_out, by = rules.verdict(f"{path}/")
        if not left_out or self._always.startswith(f"{path}/"):
            self.enter(location, f"{path}/", rules, (*around, os.path.realpath(location)))
        elif by == GIT_IGNORE:
            self._found.leave_out(f"by {GIT_IGNORE}", f"{path}/")

    def _add_file(self, location: str, path: str, rules: _Rules) -> None:
        left_out, by = rules.verdict(path)
        if left_out and path != self._always:
            if by == GIT_IGNORE:
                self._found.leave_out(f"by {GIT_IGNORE}", path)
            elif path.rpartition("/")[2].startswith(".env"):
                self._found.leave_out(f"as it may hold secrets (`!.env` in {OWN_IGNORE} sends it)", path)
            return
        try:
            stat = os.stat(location)
        except OSError:
            self._found.leave_out("as it cannot be read", path)
            return
        if not os.path.isfile(location) or not os.access(location, os.R_OK):
            self._found.leave_out("as it is no file that can be read", path)
        elif left_out is None and path.endswith(MODEL_SUFFIXES) and stat.st_size > MAX_MODEL_BYTES:
            reason = f"as large weights (`!NAME` in {OWN_IGNORE} sends them)"
            self._found.leave_out(reason, f"{path} ({format_bytes(stat.st_size)})")
        else:
            self._found.files.append(FoundFile(path, location, stat))


def _with_files(rules: _Rules, folder: str, prefix: str, names: Iterable[str]) -> _Rules:
    """The rules with the ignore files of a folder itself."""
    own, git = _read(folder, OWN_IGNORE, names), _read(folder, GIT_IGNORE, names)
    if own is None and git is None:
        return rules
    return _Rules(
        rules.own if own is None else (_Rule(own, len(prefix)), *rules.own),
        rules.git if git is None else (_Rule(git, len(prefix)), *rules.git),
    )


def _git_rules_above(root: Path) -> tuple[_Rule, ...]:
    """The rules of git from the folders above, up to the one of the repository; none outside of a repository.

    A folder that such a file leaves out as a whole was named in spite of it.
    """
    found: list[_Rule] = []
    if (root / ".git").exists():
        return ()
    for above in root.parents:
        spec, lead = _read(str(above), GIT_IGNORE, (GIT_IGNORE,)), f"{root.relative_to(above).as_posix()}/"
        if spec is not None and not spec.check_file(lead).include:
            found.append(_Rule(spec, lead=lead))
        if (above / ".git").exists():
            return tuple(found)
    return ()


def _read(folder: str, name: str, names: Iterable[str]) -> GitIgnoreSpec | None:
    if name not in names:
        return None
    try:
        return GitIgnoreSpec.from_lines(Path(folder, name).read_text(encoding="utf-8", errors="replace").splitlines())
    except (OSError, ValueError):
        return None
