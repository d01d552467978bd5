"""Environments with packages of a workload's own: made once for the same packages, kept, and found again.

An environment is a virtual environment without pip, whose own packages come first and which has the platform's behind
them: torch is neither installed nor replaced. Its folder is named by a hash of all that decides what is in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import site
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from springtide.core.errors import SpringtideError
from springtide.core.workload import Packages
from springtide.storage.files import make_private

MAX_CACHE_BYTES: Final = 20_000_000_000
# What of the platform's packages no workload may replace: its workers are tested with exactly these.
PINNED: Final = ("torch", "springtide")
_COMPLETE = "complete"
_KEPT_LINES = 200
_MOST_TOLD = 6
# What pip says each time that it is about to ask an index again, which did not answer.
_RETRYING = "WARNING: Retrying ("
_ASK = "import json, site, sys; print(json.dumps([list(sys.version_info[:2]), sys.implementation.name, sys.prefix]))"


class EnvironmentFailed(SpringtideError):
    """An environment cannot be made; the sentence says why, and what would do."""


@dataclass(frozen=True, slots=True)
class MadeEnvironment:
    """An environment that is there. It is not removed while the descriptor `lock` is open, here or in a program that
    has inherited it."""

    python: Path
    lock: int


class EnvironmentCache:
    """The environments in one directory, at most `max_bytes` of them: those that were used least lately go first.

    Relative paths in requirements begin in `directory`, by default where this process works.
    """

    def __init__(self, root: Path, *, max_bytes: int = MAX_CACHE_BYTES, directory: Path | None = None) -> None:
        self._root = root
        self._directory = directory
        self._max_bytes = max_bytes

    def find(self, packages: Packages) -> MadeEnvironment | None:
        """The environment with these packages, None if it has to be made. Raises EnvironmentFailed."""
        key = key_of(packages, pins())
        if not (self._root / key / _COMPLETE).exists():
            return None
        lock = self._lock(key, fcntl.LOCK_SH)
        return self._used(key, lock)

    def make(self, packages: Packages, variables: Mapping[str, str], tell: Callable[[str], None]) -> MadeEnvironment:
        """Make it, unless another process does so meanwhile, which is waited for. Raises EnvironmentFailed.

        pip's environment gets `variables`; what it prints is passed to `tell`, line by line.
        """
        pinned = pins()
        key = key_of(packages, pinned)
        make_private(self._root)
        while True:
            lock = self._lock(key, fcntl.LOCK_EX)
            try:
                if not (self._root / key / _COMPLETE).exists():
                    self._build(self._root / key, packages, pinned, variables, tell)
                    self._evict(key)
            except BaseException:
                os.close(lock)
                raise
            fcntl.flock(lock, fcntl.LOCK_SH)
            made = self._used(key, lock)
            if made is not None:
                return made

    @staticmethod
    def end_installers() -> None:
        """End the programs that this process has started to make an environment, and those that they have started."""
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _lock(self, key: str, how: int) -> int:
        make_private(self._root)
        descriptor = os.open(self._root / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, how)
        return descriptor

    def _used(self, key: str, lock: int) -> MadeEnvironment | None:
        """The environment, marked as used now; None if it was removed before it was locked."""
        marker = self._root / key / _COMPLETE
        try:
            os.utime(marker)
        except FileNotFoundError:
            os.close(lock)
            return None
        return MadeEnvironment(self._root / key / "bin" / "python", lock)

    def _build(
        self,
        folder: Path,
        packages: Packages,
        pinned: Mapping[str, str],
        variables: Mapping[str, str],
        tell: Callable[[str], None],
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        sites = [path for path in (*site.getsitepackages(), site.getusersitepackages()) if path in sys.path]
        if packages.python:
            sites = [*_sites_of(packages.python), *sites]
        make = [packages.python or sys.executable, "-m", "venv", "--without-pip", str(folder)]
        _run(make, {}, tell, "its interpreter makes no environment")
        folder.chmod(0o700)
        (own,) = folder.glob("lib/python*/site-packages")
        # addsitedir, and not the bare path: packages that are installed for editing are found by .pth files in it.
        lines = [f"import site; site.addsitedir({path!r})" for path in sites]
        (own / "springtide_platform.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
        if packages.requirements:
            self._install(folder, packages.requirements, pinned, variables, tell)
        size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink())
        (folder / _COMPLETE).write_text(json.dumps({"num_bytes": size}), encoding="ascii")

    def _install(
        self,
        folder: Path,
        requirements: tuple[str, ...],
        pinned: Mapping[str, str],
        variables: Mapping[str, str],
        tell: Callable[[str], None],
    ) -> None:
        if importlib.util.find_spec("pip") is None:
            raise EnvironmentFailed(
                "its packages cannot be installed: the platform's Python has no pip; "
                f"{sys.executable} -m ensurepip adds it"
            )
        wanted, constraints = folder / "requirements.txt", folder / "constraints.txt"
        wanted.write_text("\n".join(requirements) + "\n", encoding="utf-8")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pinned.items()), encoding="utf-8")
        # -P: pip is the platform's, whatever lies in the directory.
        command = [
            sys.executable,
            "-P",
            "-m",
            "pip",
            "--python",
            str(folder / "bin" / "python"),
            "install",
            "--no-input",
        ]
        command += ["--disable-pip-version-check", "--no-warn-script-location", "--progress-bar", "off"]
        told = ", ".join(f"{name}=={version}" for name, version in pinned.items())
        _run(
            [*command, "-r", str(wanted), "-c", str(constraints)],
            variables,
            tell,
            "its packages cannot be installed",
            hint=f"workers keep the platform's {told}: ask for what goes with it",
            cwd=self._directory,
        )

    def _evict(self, newest: str) -> None:
        """Remove what was used least lately until the rest is within the bound, but nothing that is in use."""
        found: list[tuple[float, str, int]] = []
        for marker in self._root.glob(f"*/{_COMPLETE}"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                size = int(json.loads(marker.read_text(encoding="ascii"))["num_bytes"])
                found.append((marker.stat().st_mtime, marker.parent.name, size))
        total = sum(size for _, _, size in found)
        for _, key, size in sorted(found):
            if total <= self._max_bytes:
                return
            if key == newest:
                continue
            descriptor = os.open(self._root / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (self._root / key / _COMPLETE).unlink(missing_ok=True)
                shutil.rmtree(self._root / key, ignore_errors=True)
                total -= size
            os.close(descriptor)


def _descendants(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def pins() -> dict[str, str]:
    """The versions of the platform's packages that environments keep, as far as they are installed."""
    found = {}
    for name in PINNED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def key_of(packages: Packages, pinned: Mapping[str, str]) -> str:
    """The name of the environment: a hash of its packages, the pins, the interpreter and the machine.

    A package that is a file of this machine counts with its time and size.
    """
    files = []
    for line in packages.requirements:
        path = line.removeprefix("file://").partition(" ")[0]
        if os.path.isabs(path):
            with contextlib.suppress(OSError):
                seen = os.stat(path)
                files.append([path, seen.st_mtime_ns, seen.st_size])
    facts = [
        sorted(set(packages.requirements)),
        files,
        sorted(pinned.items()),
        os.path.realpath(packages.python) if packages.python else "",
        [sys.version, sys.prefix, platform.machine(), platform.libc_ver()],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _sites_of(python: str) -> list[str]:
    """The folders with packages of another interpreter. Raises EnvironmentFailed if workers cannot run in it."""
    script = f"{_ASK[:-1]}); print(json.dumps(site.getsitepackages()))"
    try:
        asked = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False, timeout=60)
        version, sites = (json.loads(line) for line in asked.stdout.splitlines())
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        told = getattr(error, "strerror", None) or "it does not answer as Python does"
        raise EnvironmentFailed(f"its environment cannot be made: {python} is no interpreter here ({told})") from None
    ours = [list(sys.version_info[:2]), sys.implementation.name]
    if version[:2] != ours:
        theirs = f"{version[1]} {version[0][0]}.{version[0][1]}"
        raise EnvironmentFailed(
            f"its environment cannot be made: {python} is {theirs}, and the platform's packages, torch among them, are "
            f"for {ours[1]} {sys.version_info[0]}.{sys.version_info[1]}; name an interpreter of that version"
        )
    return [str(path) for path in sites]


def _run(
    command: list[str],
    variables: Mapping[str, str],
    tell: Callable[[str], None],
    what: str,
    hint: str = "",
    cwd: Path | None = None,
) -> None:
    """Run a program and tell its output. Raises EnvironmentFailed with the newest of its errors."""
    environment = {**os.environ, **variables}
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=cwd,
        )
    except OSError as error:
        raise EnvironmentFailed(f"its environment cannot be made: {command[0]}: {error.strerror}") from None
    with process:
        assert process.stdout is not None
        for raw in process.stdout:
            lines.append(raw.decode(errors="replace").rstrip())
            tell(lines[-1])
    if process.returncode == 0:
        return
    first, causes = _reason(list(lines))
    told = f"{what}: {first}" + (f" ({'; '.join(causes)})" if causes else "")
    if any(line.startswith(_RETRYING) for line in lines):
        told += "; pip could not reach where packages come from: is there a network, and is the index the right one?"
    raise EnvironmentFailed(f"{told}; {hint}" if hint and causes else told)


def _reason(lines: list[str]) -> tuple[str, list[str]]:
    """The first error among a program's last lines, and the causes that are listed under it."""
    marked = [number for number, line in enumerate(lines) if line.startswith("ERROR:")]
    if not marked:
        told = [line.strip() for line in lines if line.strip()]
        return (told[-1] if told else "it says nothing"), []
    causes: list[str] = []
    for line in lines[marked[0] + 1 :]:
        if line.startswith("    "):
            causes.append(line.strip())
        elif causes:
            break
    return lines[marked[0]].removeprefix("ERROR: ").rstrip(".:"), causes[:_MOST_TOLD]
