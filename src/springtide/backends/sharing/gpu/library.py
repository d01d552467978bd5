"""Finding the interposition library: as it came with the package, or built here for this user, once."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from springtide.backends.sharing.gpu import build
from springtide.backends.sharing.gpu.build import LIBRARY_NAME
from springtide.core.errors import BackendError

__all__ = ["LIBRARY_NAME", "PRELOAD_VARIABLE", "compile_library", "find_library", "is_loaded", "preload"]
PRELOAD_VARIABLE = "LD_PRELOAD"
_PACKAGE = Path(__file__).resolve().parent
_TRIAL_TIMEOUT_S = 10.0


def sources_directory() -> Path:
    """Where the library's sources lie: in an installed package, or in the working tree. Raises BackendError."""
    for folder in (_PACKAGE / "native", _PACKAGE.parents[4] / "native"):
        if (folder / "src" / "hooks.h").is_file():
            return folder
    raise BackendError("the sources of the CUDA interposition library are not in this installation; install it anew")


def find_library(*, builds: bool = True) -> Path:
    """Return the library, ready to be preloaded.

    The packaged one is used if this machine can load it; else one is built from the sources into the user's cache,
    once, and only with `builds`. Raises BackendError whose sentence says what is missing.
    """
    shipped = _PACKAGE / "lib" / LIBRARY_NAME
    if shipped.is_file() and not why_not_preloaded(shipped):
        return shipped
    return _built(builds)


def preload(environment: Mapping[str, str], library: Path) -> dict[str, str]:
    """The additions to an environment by which every program loads the library, before other preloaded ones."""
    # The loader accepts both blanks and colons between names.
    others = [name for name in environment.get(PRELOAD_VARIABLE, "").replace(":", " ").split() if name != str(library)]
    return {PRELOAD_VARIABLE: ":".join([str(library), *others])}


def is_loaded(pid: int) -> bool:
    """Whether a process has loaded the library, of any version; False if its maps may not be read."""
    try:
        return LIBRARY_NAME.encode() in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False


@cache
def why_not_preloaded(library: Path) -> str:
    """Why programs of this machine cannot load the library, in the loader's words; empty if they can."""
    program = shutil.which("true")
    if program is None:
        return ""
    if any(character in str(library) for character in ": "):
        return f"LD_PRELOAD has no way to name {library}: there is a blank or a colon in it"
    try:
        tried = subprocess.run(
            [program],
            env={PRELOAD_VARIABLE: str(library)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TRIAL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"a program with {library} preloaded does not run: {error}"
    if tried.returncode or tried.stderr.strip():
        said = tried.stderr.strip().splitlines()
        return said[-1] if said else f"a program with {library} preloaded ends with {tried.returncode}"
    return ""


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "springtide" / "gpu"


def compile_library(target: Path) -> None:
    """Compile the library from its sources to `target`. Raises BackendError."""
    try:
        # Warnings of a newer compiler must not keep users from building it.
        build.build_interposer(target, native=sources_directory(), flags=["-Wno-error"])
    except OSError as error:
        raise BackendError(f"cannot write {target}: {error.strerror}") from error


def _built(builds: bool) -> Path:
    folder = sources_directory()
    inputs = [path for name in ("include", "src") for path in sorted((folder / name).glob("*.[cdh]*"))]
    # The path depends on all inputs, so that processes that have an older library mapped keep it.
    digest = hashlib.sha256()
    for path in (*inputs, Path(build.__file__)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    library = cache_directory() / digest.hexdigest()[:16] / LIBRARY_NAME
    if not library.is_file():
        if not builds:
            raise BackendError("the CUDA interposition library has not been built yet; the platform builds it")
        compile_library(library)
    reason = why_not_preloaded(library)
    if reason:
        raise BackendError(f"the CUDA interposition library cannot be preloaded here: {reason}")
    return library
