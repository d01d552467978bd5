"""Compiling what is C: with every cuda.h there is, whole or not at all, and with a line where it cannot be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from kits.native.native_build import NATIVE, STUB, STUB_FLAGS, headers_version
from springtide.backends.sharing.gpu import build
from springtide.backends.sharing.gpu.build import (
    build_interposer,
    build_library,
    find_compiler,
    find_headers,
)
from springtide.core.errors import BackendError

SANITIZED = False
ALL_HEADERS = [folder for folder in dict.fromkeys(build._header_folders()) if (folder / "cuda.h").is_file()]


def test_the_headers_say_their_version(cuda_headers: Path) -> None:
    assert headers_version(cuda_headers) >= 12000


def test_a_machine_without_headers_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_header_folders", lambda: iter([tmp_path]))
    with pytest.raises(BackendError, match="pip install 'nvidia-cuda-runtime"):
        find_headers()


def test_a_machine_without_a_compiler_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match="apt-get install gcc"):
        find_compiler()
    monkeypatch.setenv("CC", "no-such-compiler -O3")
    with pytest.raises(BackendError, match="CC=no-such-compiler is not there"):
        find_compiler()


def test_the_toolkit_of_cuda_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").write_text("#define CUDA_VERSION 12345\n", encoding="utf-8")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert headers_version(find_headers()) == 12345


@pytest.mark.usefixtures("cuda_headers")
def test_what_does_not_compile_leaves_what_was_there(tmp_path: Path) -> None:
    source, target = tmp_path / "source.c", tmp_path / "library.so"
    target.write_text("what was there", encoding="utf-8")
    source.write_text("int main(void) { return undeclared; }\n", encoding="utf-8")
    with pytest.raises(BackendError, match="undeclared"):
        build_library(target, sources=[source], headers=[])
    assert target.read_text(encoding="utf-8") == "what was there"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["library.so", "source.c"]


def test_a_tree_without_sources_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="no sources of the interposition library"):
        build_interposer(tmp_path / "library.so", native=tmp_path, headers=tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_headers")
@pytest.mark.parametrize("headers", ALL_HEADERS, ids=lambda headers: str(headers_version(headers)))
def test_library_and_stub_compile_with_every_header_there_is(tmp_path: Path, headers: Path) -> None:
    build_interposer(tmp_path / "library.so", native=NATIVE, headers=headers)
    build_library(
        tmp_path / "libcuda.so.1",
        sources=sorted(STUB.glob("stub_*.c")),
        headers=[STUB, headers],
        flags=STUB_FLAGS,
    )
