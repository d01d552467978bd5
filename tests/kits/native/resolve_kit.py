"""Asking, from within a program, where its names lead; and the names that the library hooks, read from its sources."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kits.native.native_build import NATIVE, Native, headers_version
from springtide.backends.sharing.gpu.build import LIBRARY_NAME, build_library

DRIVER = "libcuda.so.1"
OURS = LIBRARY_NAME
_ENTRY = re.compile(r"^(?:ST_HOOK|STUB)\((\w+), (\w+), (\d+), (true|false)\)", re.MULTILINE)
_CONDITION = re.compile(r"#if CUDA_VERSION >= (\d+)\n(.*?)#endif\n", re.DOTALL)


class Found(msgspec.Struct, frozen=True):
    """Where a name led: the object and the symbol in it, None if nowhere."""

    result: int
    status: int
    has_error: bool
    owner: str | None
    symbol: str | None


@dataclass(frozen=True)
class Entry:
    """A line of a table of functions: asked for as `api` from version `since` on, it is `symbol`."""

    api: str
    symbol: str
    since: int
    is_per_thread: bool


def read_table(path: Path, version: int) -> list[Entry]:
    """The entries of a .def file that a compiler with headers of this version sees."""
    text = _CONDITION.sub(lambda found: found[2] if version >= int(found[1]) else "", path.read_text(encoding="utf-8"))
    return [Entry(api, symbol, int(since), twin == "true") for api, symbol, since, twin in _ENTRY.findall(text)]


def hooks(native: Native) -> list[Entry]:
    """What the library takes the place of."""
    version = headers_version(native.headers)
    return [entry for path in sorted((NATIVE / "src").glob("*.def")) for entry in read_table(path, version)]


def ask(
    native: Native,
    lines: Sequence[str],
    *,
    preload: bool = True,
    stub: Path | None = None,
    before: Sequence[Path] = (),
    after: Sequence[Path] = (),
    links: Sequence[str] = (),
) -> list[Found]:
    """Have resolve_probe answer; `before` and `after` are preloaded around the library."""
    program = native.program("resolve_probe", links=links)
    environment = native.environment(preload=preload, stub=stub)
    own = [environment["LD_PRELOAD"]] if "LD_PRELOAD" in environment else []
    environment["LD_PRELOAD"] = ":".join([*map(str, before), *own, *map(str, after)])
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(
        [str(program)], input=text, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    found = [msgspec.convert(json.loads(line), Found) for line in done.stdout.splitlines()]
    assert len(found) == len(lines), done.stdout
    return found


def build_shared(native: Native, target: Path, text: str, *, links: Sequence[str] = ()) -> Path:
    """A shared library from C text."""
    source = target.with_suffix(".c")
    source.write_text(text, encoding="utf-8")
    flags = ["-std=gnu11", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{target.name}"]
    return build_library(target, sources=[source], headers=[native.headers], flags=flags, links=[*links, "-ldl"])


def symbols_of(library: Path) -> dict[int, set[str]]:
    """The functions that an object exports, by their offset from its beginning."""
    environment = {**os.environ, "LC_ALL": "C"}
    said = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True, env=environment
    ).stdout
    found: dict[int, set[str]] = {}
    for line in said.splitlines():
        offset, _, name = line.split()
        found.setdefault(int(offset, 16), set()).add(name.split("@")[0])
    return found
