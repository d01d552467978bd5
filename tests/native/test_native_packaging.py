"""The library as users come by it: in a wheel, or built into their cache, and a clear line where neither works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kits.native.native_build import Native
from springtide.backends.sharing.gpu import build, library
from springtide.backends.sharing.gpu.enforcement import choose_enforcement
from springtide.backends.sharing.gpu.library import LIBRARY_NAME, find_library, preload, why_not_preloaded
from springtide.core.errors import BackendError

# The programs here are Python's and the loader's own: they are not built under sanitizers.
SANITIZED = False
ROOT = Path(__file__).parents[2]
FIND = "from springtide.backends.sharing.gpu.library import find_library; print(find_library())"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    why_not_preloaded.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with the library's sources and nothing else."""
    folder = tmp_path / "package"
    shutil.copytree(ROOT / "native" / "src", folder / "native" / "src")
    shutil.copytree(ROOT / "native" / "include", folder / "native" / "include")
    monkeypatch.setattr(library, "_PACKAGE", folder)
    return folder


@pytest.fixture
def builds(native: Native, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every target that was compiled; what comes out is the library of this session."""
    asked: list[Path] = []

    def compile_(target: Path, **options: object) -> Path:
        asked.append(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(native.library, target)
        return target

    monkeypatch.setattr(build, "build_interposer", compile_)
    return asked


def test_it_is_built_once_into_the_users_cache(own_cache: Path, builds: list[Path]) -> None:
    found = find_library()
    assert found.is_relative_to(own_cache / "springtide" / "gpu")
    assert find_library() == found
    assert builds == [found]


def test_other_sources_make_another_file(package: Path, builds: list[Path]) -> None:
    before = find_library()
    with (package / "native" / "src" / "gate.c").open("a") as file:
        file.write("/* changed */\n")
    assert find_library() != before
    assert before.exists(), "a process may have it mapped"


def test_what_came_with_the_package_is_taken(package: Path, native: Native, builds: list[Path]) -> None:
    (package / "lib").mkdir()
    shipped = Path(shutil.copy(native.library, package / "lib" / LIBRARY_NAME))
    assert find_library() == shipped
    assert builds == []


def test_what_came_with_the_package_and_does_not_load_is_built_anew(package: Path, builds: list[Path]) -> None:
    (package / "lib").mkdir()
    (package / "lib" / LIBRARY_NAME).write_bytes(b"\x7fELF of another machine")
    assert find_library() in builds


def test_without_a_compiler_a_line_says_what_to_do(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BackendError, match="apt-get install gcc"):
        find_library()
    chosen = choose_enforcement({})
    assert (chosen.mechanism, chosen.library) == ("none", None)
    assert "CC=no-such-compiler is not there" in chosen.enforced
    assert "springtide[gpu]" in chosen.mend


def test_a_home_that_cannot_be_written_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BackendError, match="cannot write"):
        find_library()


def test_nothing_is_built_by_who_only_looks(own_cache: Path) -> None:
    with pytest.raises(BackendError, match="has not been built yet"):
        find_library(builds=False)
    assert not own_cache.exists()


def test_an_installation_without_sources_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_PACKAGE", tmp_path / "a" / "b" / "c" / "d" / "e")
    with pytest.raises(BackendError, match="not in this installation"):
        find_library()


def test_the_loaders_complaint_is_passed_on(tmp_path: Path, native: Native) -> None:
    assert why_not_preloaded(native.library) == ""
    (tmp_path / "text.so").write_text("no library")
    assert "cannot be preloaded" in why_not_preloaded(tmp_path / "text.so")
    assert "cannot be preloaded" in why_not_preloaded(tmp_path / "missing.so")
    blank = tmp_path / "a blank"
    blank.mkdir()
    assert "no way to name" in why_not_preloaded(Path(shutil.copy(native.library, blank)))


def test_the_library_comes_first_and_once(tmp_path: Path) -> None:
    ours = tmp_path / LIBRARY_NAME
    assert preload({}, ours) == {"LD_PRELOAD": str(ours)}
    assert preload({"LD_PRELOAD": "/a.so /b.so"}, ours) == {"LD_PRELOAD": f"{ours}:/a.so:/b.so"}
    assert preload({"LD_PRELOAD": f"/a.so:{ours}:"}, ours) == {"LD_PRELOAD": f"{ours}:/a.so"}


def _wheel(target: Path, **environment: str) -> tuple[Path, str]:
    pytest.importorskip("hatchling")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target / "installed")
    return wheel, done.stdout + done.stderr


def _found_from(installed: Path, **environment: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", FIND],
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.mark.slow
def test_a_wheel_brings_the_library(native: Native, tmp_path: Path) -> None:
    wheel, _ = _wheel(tmp_path / "dist")
    assert "-py3-none-linux_" in wheel.name
    installed = tmp_path / "dist" / "installed"
    found = _found_from(installed, CC="no-such-compiler")
    assert found == installed / "springtide" / "backends" / "sharing" / "gpu" / "lib" / LIBRARY_NAME


@pytest.mark.slow
def test_a_wheel_made_without_a_compiler_says_so_and_is_built_where_it_is_used(native: Native, tmp_path: Path) -> None:
    wheel, said = _wheel(tmp_path / "dist", CC="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert f"comes without {LIBRARY_NAME}" in said
    found = _found_from(tmp_path / "dist" / "installed")
    assert found.is_relative_to(tmp_path / "cache")
    assert why_not_preloaded(found) == ""
