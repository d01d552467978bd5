"""Compiles the interposition library and other C sources, given a compiler and the CUDA headers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from springtide.core.errors import BackendError

LIBRARY_NAME = "libspringtide_gpu.so"
# The compiler's flags for the library on all machines.
LIBRARY_FLAGS = (
    "-std=gnu11",
    "-O2",
    "-g",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
)
# -Bsymbolic: the library's tables refer to its own functions, whatever other libraries are preloaded.
LIBRARY_LINKS = ("-ldl", "-lpthread", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,-soname," + LIBRARY_NAME)
COMPILERS = ("cc", "gcc", "clang")
MAX_ERROR_CHARACTERS = 2000
COMPILE_TIMEOUT_S = 300.0


def find_compiler() -> Path:
    """The C compiler: `CC` if it is set, else the first of the usual names."""
    wanted = os.environ.get("CC", "").split()
    for name in (wanted[0],) if wanted else COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    asked = f"CC={wanted[0]} is not there" if wanted else "there is no C compiler (cc, gcc or clang)"
    raise BackendError(f"{asked}: install one, for example `apt-get install gcc libc6-dev`")


def find_headers() -> Path:
    """The folder with cuda.h: the toolkit of `CUDA_HOME`, the package from PyPI, or the installed toolkit."""
    for folder in _header_folders():
        if (folder / "cuda.h").is_file():
            return folder
    raise BackendError(
        "there is no cuda.h: `pip install 'nvidia-cuda-runtime>=13'`, or install the CUDA toolkit and set CUDA_HOME"
    )


def _header_folders() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "include"
    package = importlib.util.find_spec("nvidia")
    for place in (package.submodule_search_locations or ()) if package is not None else ():
        for name in ("cu13", "cuda_runtime"):
            yield Path(place) / name / "include"
    yield Path("/usr/local/cuda/include")
    yield Path("/usr/include")


def build_library(
    target: Path,
    *,
    sources: Sequence[Path],
    headers: Sequence[Path],
    flags: Sequence[str] = LIBRARY_FLAGS,
    links: Sequence[str] = (),
) -> Path:
    """Compile `sources` into `target`, atomically, even if another process compiles it at the same time."""
    compiler = find_compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        unfinished = Path(folder) / target.name
        includes = [f"-I{header}" for header in headers]
        command = [str(compiler), *flags, *includes, "-o", str(unfinished), *map(str, sources), *links]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BackendError(f"{compiler} could not compile {target.name}: {error}") from error
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip()[:MAX_ERROR_CHARACTERS]
            raise BackendError(f"{compiler} could not compile {target.name}:\n{said}")
        os.replace(unfinished, target)
    return target


def build_interposer(target: Path, *, native: Path, headers: Path | None = None, flags: Sequence[str] = ()) -> Path:
    """Compile the interposition library from the folder `native` (with `src` and `include`)."""
    sources = sorted((native / "src").glob("*.c"))
    if not sources:
        raise BackendError(f"there are no sources of the interposition library in {native / 'src'}")
    return build_library(
        target,
        sources=sources,
        headers=[native / "include", native / "src", headers or find_headers()],
        flags=[*LIBRARY_FLAGS, *flags],
        links=LIBRARY_LINKS,
    )
