"""The real CUDA runtime, linked as a shared library or into the program: every launch it can make goes through us.

Only its first phase is looked at, in which it finds the driver's functions; on a stub driver it goes no further.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kits.native.native_build import Native
from kits.native.resolve_kit import DRIVER, hooks, symbols_of

LAUNCHES = {
    f"{name}{twin}"
    for name in ("cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel", "cuGraphLaunch")
    for twin in ("", "_ptsz")
}
# The unwieldy runtime is no program of ours: it is not run under the sanitizers.
SANITIZED = False


def links_of(native: Native, kind: str) -> list[str]:
    """What a program is linked with to have the runtime; skips where it is not installed."""
    name = {"shared": "libcudart.so*", "static": "libcudart_static.a"}[kind]
    folder = native.headers.parent
    for place in (folder / "lib", folder / "lib64", folder / "targets" / "x86_64-linux" / "lib"):
        for found in sorted(place.glob(name)):
            return [str(found), f"-Wl,-rpath,{place}", "-lpthread", "-ldl", "-lrt"]
    pytest.skip(f"there is no {name} beside {folder}: `pip install 'nvidia-cuda-runtime>=13'`")


def pointers(program: Path, environment: dict[str, str], native: Native) -> tuple[set[str], set[str]]:
    """The functions of the driver that words of the program's memory point to, and those of the library."""
    done = subprocess.run([str(program)], env=environment, capture_output=True, text=True, timeout=60, check=True)
    first, *lines = done.stdout.splitlines()
    assert int(first.removeprefix("error ")) != 0, "the runtime works on a stub driver: this test looks at nothing"
    tables = {DRIVER: symbols_of(native.stub_dir / DRIVER), native.library.name: symbols_of(native.library)}
    found: dict[str, set[str]] = {name: set() for name in tables}
    for line in lines:
        name, offset = line.split()
        found[name] |= tables[name].get(int(offset, 16), set())
    return found[DRIVER], found[native.library.name]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "static"])
def test_the_real_runtime_launches_through_us(native: Native, tmp_path: Path, kind: str) -> None:
    program = native.program("cudart_words", links=links_of(native, kind))
    lookups = tmp_path / "lookups"
    settings = {"STUB_LOOKUPS": lookups, "STUB_ALL_NAMES": 1}
    theirs, ours = pointers(program, native.environment(settings, preload=False), native)
    assert theirs >= LAUNCHES  # this is how it looks without us
    assert not ours
    theirs, ours = pointers(program, native.environment(settings), native)
    assert ours >= LAUNCHES
    hooked = {entry.symbol for entry in hooks(native)}
    assert not theirs & hooked, "it can call these past us"
    asked = {tuple(line.split()[:3]) for line in lookups.read_text(encoding="utf-8").splitlines()}
    assert {("cuLaunchKernel", "4000", "0"), ("cuLaunchKernel", "7000", "2")} <= asked
    assert len(asked) > 300
